//! The form in which LSE is stored.

use std::f64::consts::LOG2_E;

/// The form in which LSE is stored. By default LSE is a natural logarithm, includes the sink, and is -inf where it is
/// the logarithm of 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct LseForm {
    /// Whether the logarithm is one in base 2.
    pub base_two: bool,
    /// Whether LSE leaves out the sink, which O has nevertheless. Without sinks it has no effect.
    pub without_sink: bool,
    /// Whether +inf takes the place of -inf, as in FlashMLA: LSE of a row that sees no key, and has no sink in its LSE.
    pub empty_is_infinite: bool,
}

impl LseForm {
    /// The factor that turns a natural logarithm into this one: 1, or log₂ e.
    pub fn unit(self) -> f64 {
        if self.base_two { LOG2_E } else { 1.0 }
    }

    /// LSE of a row that sees no key and has no sink: -inf or +inf.
    pub fn empty(self) -> f32 {
        if self.empty_is_infinite { f32::INFINITY } else { f32::NEG_INFINITY }
    }

    /// LSE in this form, from a natural logarithm.
    pub fn of(self, lse: f64) -> f64 {
        if lse == f64::NEG_INFINITY { self.empty().into() } else { lse * self.unit() }
    }
}
