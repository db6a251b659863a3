//! Division by a number that is known before the kernel runs.

use crate::Int;

/// A divisor, prepared on the host so that a kernel divides by multiplying.
///
/// ```text
/// ⌊x / d⌋ = ⌊2x · multiplier / 2³²⌋ / 2^shift     shift = ⌈log₂ d⌉, multiplier = ⌈2^(31 + shift) / d⌉
/// ```
///
/// Exact for every x < 2³¹ and every d ≥ 1: multiplier · d exceeds 2^(31 + shift) by e < d ≤ 2^shift, so the
/// quotient's error x · e / (d · 2^(31 + shift)) stays below 1 / d (Granlund and Montgomery 1994, §4).
/// Doubling x makes room for d = 1, whose multiplier would otherwise be 2³².
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FastDiv<T> {
    divisor: T,
    multiplier: T,
    shift: T,
}

impl FastDiv<u32> {
    /// Prepares division by `divisor`. A divisor above 2³¹ counts as 2³¹: the quotient is 0 in both cases.
    ///
    /// # Panics
    /// If `divisor` is 0.
    pub fn new(divisor: u32) -> FastDiv<u32> {
        assert!(divisor > 0, "division by zero");
        let divisor = divisor.min(1 << 31);
        let shift = divisor.next_power_of_two().trailing_zeros();
        let multiplier = (1u64 << (31 + shift)).div_ceil(u64::from(divisor));
        // The multiplier is below 2³², because the divisor exceeds 2^(shift − 1).
        FastDiv { divisor, multiplier: multiplier as u32, shift }
    }
}

impl<T> FastDiv<T> {
    /// The same divisor with `f` applied to each of its numbers in a fixed order, in order to pass the numbers to a
    /// kernel or to make them literals.
    pub fn map<U>(self, mut f: impl FnMut(T) -> U) -> FastDiv<U> {
        self.map_named("", &mut |_, number| f(number))
    }

    /// Like [`FastDiv::map`], with the numbers' names: `name` followed by `_divisor`, `_multiplier` or `_shift`.
    pub fn map_named<U>(self, name: &str, f: &mut impl FnMut(&str, T) -> U) -> FastDiv<U> {
        FastDiv {
            divisor: f(&format!("{name}_divisor"), self.divisor),
            multiplier: f(&format!("{name}_multiplier"), self.multiplier),
            shift: f(&format!("{name}_shift"), self.shift),
        }
    }
}

impl<T: Int> FastDiv<T> {
    /// The divisor itself.
    pub fn divisor(self) -> T {
        self.divisor
    }

    /// ⌊x / divisor⌋ for x < 2³¹.
    pub fn quotient(self, x: T) -> T {
        (x + x).mul_hi(self.multiplier).shr(self.shift)
    }

    /// (⌊x / divisor⌋, x mod divisor) for x < 2³¹.
    pub fn div_rem(self, x: T) -> (T, T) {
        let quotient = self.quotient(x);
        (quotient, x.sub_sat(quotient * self.divisor))
    }

    /// ⌈x / divisor⌉ for x < 2³¹.
    pub fn div_ceil(self, x: T) -> T {
        let (quotient, rest) = self.div_rem(x);
        quotient + rest.at_most(rest.lit(1))
    }

    /// `yes` where `condition` holds, `no` elsewhere. It selects the numbers, not the quotients.
    pub fn select(condition: T::Bool, yes: FastDiv<T>, no: FastDiv<T>) -> FastDiv<T> {
        FastDiv {
            divisor: T::select(condition, yes.divisor, no.divisor),
            multiplier: T::select(condition, yes.multiplier, no.multiplier),
            shift: T::select(condition, yes.shift, no.shift),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checked::Checked;
    use proptest::prelude::*;

    fn agrees(x: u32, d: u32) {
        let div = FastDiv::new(d).map(Checked::from);
        let (quotient, rest) = div.div_rem(x.into());
        assert_eq!((quotient.0, rest.0), (u64::from(x / d), u64::from(x % d)), "{x} / {d}");
        assert_eq!(div.div_ceil(x.into()).0, u64::from(x.div_ceil(d)), "{x} / {d} rounded up");
    }

    #[test]
    fn every_small_division() {
        for d in 1..=300 {
            (0..=2000).for_each(|x| agrees(x, d));
        }
    }

    /// The error of a multiplier shows first just below a multiple of the divisor, and at the largest x.
    #[test]
    fn the_edges() {
        let top = (1u32 << 31) - 1;
        let powers = (0..31).flat_map(|p| [(1u32 << p).saturating_sub(1), 1 << p, (1 << p) + 1]);
        for d in powers.chain([80, 112, 132, 176, top - 1, top, top + 1, u32::MAX]).filter(|&d| d > 0) {
            let multiple = top - top % d;
            for x in [0, 1, d - 1, d, multiple.saturating_sub(1), multiple, top - 1, top] {
                agrees(x.min(top), d);
            }
        }
    }

    proptest! {
        #[test]
        fn any_division(x in 0u32..1 << 31, d in 1u32.., bits in 0u32..31) {
            agrees(x, d);
            agrees(x, (d >> bits).max(1));
        }
    }
}
