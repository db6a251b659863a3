//! Scale and soft cap: the steps from Q·K to the softmax.

use std::f64::consts::LOG2_E;
use std::fmt;
use std::ops::RangeInclusive;

use crate::{ProblemError, Real};

/// The range of scales and caps. Within it their products and quotients, also with log2 e, are normal f32 numbers.
/// Kernels need that, because a factor that rounds to 0 turns a masked score, -inf, into NaN.
const RANGE: RangeInclusive<f64> = 1e-18..=1e18;

/// The factor on Q·Kᵀ before the softmax, 1e-18 to 1e18. 1/√head_dim unless given.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct SoftmaxScale(f64);

impl SoftmaxScale {
    /// # Errors
    /// [`ProblemError::SoftmaxScale`] outside 1e-18 to 1e18. A negative scale is refused because the row maximum is
    /// taken before scaling: negate Q instead. A scale of 0 is refused because a masked score, -inf, would become NaN:
    /// use Q of zeros instead.
    pub fn new(given: f64) -> Result<SoftmaxScale, ProblemError> {
        if RANGE.contains(&given) {
            Ok(SoftmaxScale(given))
        } else {
            Err(ProblemError::SoftmaxScale { given })
        }
    }

    /// 1/√head_dim, for a head dimension of at least 1.
    pub(crate) fn of_head_dim(head_dim: usize) -> SoftmaxScale {
        SoftmaxScale((head_dim as f64).sqrt().recip())
    }

    /// The factor itself, for natural exponentials: exp(score · scale).
    pub fn natural(self) -> f64 {
        self.0
    }

    /// scale · log2(e), for base-2 exponentials: exp2(score · scale · log2 e).
    pub fn log2(self) -> f64 {
        self.0 * LOG2_E
    }
}

/// Soft cap c, 1e-18 to 1e18: a scaled score s becomes c · tanh(s / c), which bounds it to ±c.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct SoftCap(f64);

impl SoftCap {
    /// # Errors
    /// [`ProblemError::SoftCap`] outside 1e-18 to 1e18.
    pub fn new(given: f64) -> Result<SoftCap, ProblemError> {
        if RANGE.contains(&given) { Ok(SoftCap(given)) } else { Err(ProblemError::SoftCap { given }) }
    }

    /// The bound c.
    pub fn bound(self) -> f64 {
        self.0
    }

    /// c · tanh(s / c).
    pub fn apply(self, score: f64) -> f64 {
        self.0 * (score / self.0).tanh()
    }

    /// The derivative of [`SoftCap::apply`] where it gave `capped`: 1 − (capped / c)².
    pub fn derivative(self, capped: f64) -> f64 {
        1.0 - (capped / self.0).powi(2)
    }
}

/// Applies the soft cap in units of the cap c: `product`, of a query and a key, becomes tanh(product · softmax_scale /
/// c), which is the score divided by c. `into_cap` is softmax_scale / c.
#[track_caller]
pub fn softcap<R: Real>(product: R, into_cap: R) -> R {
    (product * into_cap).tanh()
}

/// A number that is printed with a power of ten instead of many zeros.
pub(crate) struct Number(pub(crate) f64);

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Number(x) = *self;
        if x == 0.0 || (1e-3..1e6).contains(&x.abs()) { x.fmt(f) } else { write!(f, "{x:e}") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        let shown = |x| Number(x).to_string();
        assert_eq!([0.0, -1.0, 0.125, 1e300, -1e-30].map(shown), ["0", "-1", "0.125", "1e300", "-1e-30"]);
        assert_eq!([f64::NAN, f64::INFINITY].map(shown), ["NaN", "inf"]);
        assert_eq!(format!("{:.6}", Number(0.125)), "0.125000");
    }

    #[test]
    fn bad_numbers_are_rejected() {
        for given in [0.0, -1.0, f64::INFINITY, f64::NEG_INFINITY, 1e-19, 1e19] {
            assert_eq!(SoftmaxScale::new(given), Err(ProblemError::SoftmaxScale { given }));
            assert_eq!(SoftCap::new(given), Err(ProblemError::SoftCap { given }));
        }
        assert!(SoftmaxScale::new(f64::NAN).is_err());
        assert!(SoftCap::new(f64::NAN).is_err());
    }

    #[test]
    fn what_is_accepted_is_normal_in_f32() {
        for scale in [1e-18, 1.0, 1e18] {
            let scale = SoftmaxScale::new(scale).unwrap();
            assert!((scale.log2() as f32).is_normal());
            for cap in [1e-18, 1.0, 1e18] {
                let cap = SoftCap::new(cap).unwrap();
                assert!(((scale.natural() / cap.bound()) as f32).is_normal());
                assert!(((cap.bound() * LOG2_E) as f32).is_normal());
            }
        }
    }

    #[test]
    fn base_two_and_natural_scales_agree() {
        let scale = SoftmaxScale::of_head_dim(64);
        assert_eq!(scale.natural(), 0.125);
        let score = 3.7;
        assert!(((score * scale.natural()).exp() - (score * scale.log2()).exp2()).abs() < 1e-14);
    }

    #[test]
    fn the_cap_bounds_and_its_derivative_is_the_slope() {
        let cap = SoftCap::new(5.0).unwrap();
        assert!(cap.apply(1e6) <= 5.0 && cap.apply(-1e6) >= -5.0);
        let (s, h) = (2.0, 1e-6);
        let slope = (cap.apply(s + h) - cap.apply(s - h)) / (2.0 * h);
        assert!((cap.derivative(cap.apply(s)) - slope).abs() < 1e-9);
    }
}
