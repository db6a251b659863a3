//! Real numbers in which a function of a score is evaluated.

use crate::Real;

/// The operations of real numbers in expressions over a score, beside [`Real`]'s: f64 in the oracle, f32 on the CPU,
/// and [`Dual`](crate::Dual) numbers of both for derivatives.
pub trait ScoreReal: Real<Int = u32, Bool = bool> {
    /// The real number nearest to `index`.
    fn of_index(index: i32) -> Self;

    /// self / divisor.
    fn div(self, divisor: Self) -> Self;

    /// The logarithm in base 2.
    fn log2(self) -> Self;

    /// The square root.
    fn sqrt(self) -> Self;

    /// The absolute value.
    fn abs(self) -> Self;

    /// The largest integer that is not above self.
    fn floor(self) -> Self;

    /// The smaller number; NaN if either is NaN.
    fn min(self, other: Self) -> Self;

    /// The larger number; NaN if either is NaN.
    fn max(self, other: Self) -> Self;

    /// self ≤ other; false if either is NaN.
    fn le(self, other: Self) -> bool;
}

macro_rules! reals {
    ($($float:ident)+) => {$(
        impl ScoreReal for $float {
            fn of_index(index: i32) -> $float {
                index as $float
            }

            fn div(self, divisor: $float) -> $float {
                self / divisor
            }

            fn log2(self) -> $float {
                $float::log2(self)
            }

            fn sqrt(self) -> $float {
                $float::sqrt(self)
            }

            fn abs(self) -> $float {
                $float::abs(self)
            }

            fn floor(self) -> $float {
                $float::floor(self)
            }

            fn min(self, other: $float) -> $float {
                if self <= other || self.is_nan() { self } else { other }
            }

            fn max(self, other: $float) -> $float {
                if self >= other || self.is_nan() { self } else { other }
            }

            fn le(self, other: $float) -> bool {
                self <= other
            }
        }
    )+};
}

reals!(f32 f64);
