//! Numbers in which a function of a score is evaluated.

use std::num::Wrapping;
use std::ops::{Add, Mul, Neg, Sub};

use crate::Real;

/// The operations of real numbers in expressions over a score, beside [`Real`]'s: f64 in the oracle, f32 on the CPU,
/// [`Dual`](crate::Dual) numbers of both for derivatives, and registers of a kernel under construction.
pub trait ScoreReal: Real {
    /// The integers of expressions.
    type Index: ScoreIndex<Bool = Self::Bool>;

    /// The real number nearest to `index`.
    fn of_index(index: Self::Index) -> Self;

    /// self rounded to zero, clamped to 32 bits; 0 for NaN.
    fn to_index(self) -> Self::Index;

    /// Whether `condition` does not hold.
    fn not(condition: Self::Bool) -> Self::Bool;

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
    fn le(self, other: Self) -> Self::Bool;

    /// self = other; false if either is NaN.
    fn eq(self, other: Self) -> Self::Bool;

    /// self · factor, and 0 where self is 0, even if the factor is infinite or NaN.
    fn scaled(self, factor: Self) -> Self {
        guarded(self, factor)
    }
}

/// slope · factor, and 0 for a slope of 0.
pub(super) fn guarded<R: ScoreReal>(slope: R, factor: R) -> R {
    let zero = slope.lit(0.0);
    R::select(slope.eq(zero), zero, slope * factor)
}

/// Integers of 32 bits with a sign in expressions over a score. They wrap.
pub trait ScoreIndex:
    Copy + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Neg<Output = Self>
{
    /// The result of a comparison.
    type Bool: Copy;

    /// The constant `value`. It takes `self`, because a kernel's value knows which kernel it belongs to.
    fn lit(self, value: i32) -> Self;

    /// The absolute value; −2³¹ stays itself.
    fn abs(self) -> Self;

    /// The smaller number.
    fn min(self, other: Self) -> Self;

    /// The larger number.
    fn max(self, other: Self) -> Self;

    /// ⌊self / divisor⌋, and 0 if the divisor is 0, of numbers that are at most 2³⁰.
    fn div_floor(self, divisor: Self) -> Self;

    /// self ∧ other, bit by bit.
    fn and(self, other: Self) -> Self;

    /// self ∨ other, bit by bit.
    fn or(self, other: Self) -> Self;

    /// self ⊕ other, bit by bit.
    fn xor(self, other: Self) -> Self;

    /// self · 2^bits. A shift by 32 or more, or by a negative number, shifts everything out.
    fn shl(self, bits: Self) -> Self;

    /// ⌊self / 2^bits⌋, by [`ScoreIndex::shl`]'s rule.
    fn shr(self, bits: Self) -> Self;

    /// self < other.
    fn lt(self, other: Self) -> Self::Bool;

    /// self ≤ other.
    fn le(self, other: Self) -> Self::Bool;

    /// self = other.
    fn eq(self, other: Self) -> Self::Bool;

    /// `yes` where `condition` holds, `no` elsewhere.
    fn select(condition: Self::Bool, yes: Self, no: Self) -> Self;
}

/// Real numbers of the host.
pub trait HostReal: ScoreReal<Index = Wrapping<i32>, Bool = bool> {}

impl<R: ScoreReal<Index = Wrapping<i32>, Bool = bool>> HostReal for R {}

impl ScoreIndex for Wrapping<i32> {
    type Bool = bool;

    fn lit(self, value: i32) -> Wrapping<i32> {
        Wrapping(value)
    }

    fn abs(self) -> Wrapping<i32> {
        Wrapping(self.0.wrapping_abs())
    }

    fn min(self, other: Wrapping<i32>) -> Wrapping<i32> {
        Ord::min(self, other)
    }

    fn max(self, other: Wrapping<i32>) -> Wrapping<i32> {
        Ord::max(self, other)
    }

    fn div_floor(self, divisor: Wrapping<i32>) -> Wrapping<i32> {
        let Some(quotient) = self.0.checked_div(divisor.0) else { return Wrapping(0) };
        let is_above = self.0 % divisor.0 != 0 && (self.0 < 0) != (divisor.0 < 0);
        Wrapping(quotient - i32::from(is_above))
    }

    fn and(self, other: Wrapping<i32>) -> Wrapping<i32> {
        self & other
    }

    fn or(self, other: Wrapping<i32>) -> Wrapping<i32> {
        self | other
    }

    fn xor(self, other: Wrapping<i32>) -> Wrapping<i32> {
        self ^ other
    }

    fn shl(self, bits: Wrapping<i32>) -> Wrapping<i32> {
        Wrapping(self.0.checked_shl(bits.0 as u32).unwrap_or(0))
    }

    fn shr(self, bits: Wrapping<i32>) -> Wrapping<i32> {
        Wrapping(self.0 >> (bits.0 as u32).min(31))
    }

    fn lt(self, other: Wrapping<i32>) -> bool {
        self < other
    }

    fn le(self, other: Wrapping<i32>) -> bool {
        self <= other
    }

    fn eq(self, other: Wrapping<i32>) -> bool {
        self == other
    }

    fn select(condition: bool, yes: Wrapping<i32>, no: Wrapping<i32>) -> Wrapping<i32> {
        if condition { yes } else { no }
    }
}

macro_rules! reals {
    ($($float:ident)+) => {$(
        impl ScoreReal for $float {
            type Index = Wrapping<i32>;

            fn of_index(index: Wrapping<i32>) -> $float {
                index.0 as $float
            }

            fn to_index(self) -> Wrapping<i32> {
                Wrapping(self as i32)
            }

            fn not(condition: bool) -> bool {
                !condition
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

            fn eq(self, other: $float) -> bool {
                self == other
            }
        }
    )+};
}

reals!(f32 f64);
