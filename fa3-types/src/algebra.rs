//! Numbers for code that is written once and runs on the host and in a kernel under construction.
//!
//! Code that the oracle, the CPU, the simulator and a kernel must share is one generic function over [`Int`] or
//! [`Real`]. Rust's numbers run the function; values of a kernel builder record the same arithmetic as instructions.
//!
//! ```
//! use std::num::Wrapping;
//!
//! use fa3_types::ScoreReal;
//!
//! // ALiBi: a score loses `slope` for every key between it and the query.
//! fn alibi<R: ScoreReal>(score: R, slope: R, query: R::Index, key: R::Index) -> R {
//!     score - slope * R::of_index(query - key)
//! }
//! assert_eq!(alibi(1.0_f64, 0.5, Wrapping(7), Wrapping(4)), -0.5);
//! assert_eq!(alibi(1.0_f32, 0.5, Wrapping(7), Wrapping(4)), -0.5);
//! ```
//!
//! Such functions have no Rust control flow that depends on values; they call [`Int::select`] and [`Real::select`].

use std::ops::{Add, BitAnd, BitOr, Mul, Neg, Sub};

/// An unsigned 32-bit integer, on the host or in a kernel under construction.
///
/// Generic functions subtract with [`Int::sub_sat`], so that no difference is below zero. They divide by numbers that
/// the host knows with shifts and multiplications. For lengths below 2³¹ every result is in 0 ≤ x < 2³².
pub trait Int: Copy + Add<Output = Self> + Mul<Output = Self> {
    /// The result of a comparison.
    type Bool: Copy + BitAnd<Output = Self::Bool> + BitOr<Output = Self::Bool>;

    /// The constant `value`. It takes `self`, because a kernel's value knows which kernel it belongs to.
    fn lit(self, value: u32) -> Self;

    /// max(self − other, 0).
    fn sub_sat(self, other: Self) -> Self;

    /// The smaller of `self` and `limit`.
    fn at_most(self, limit: Self) -> Self;

    /// The larger of `self` and `limit`.
    fn at_least(self, limit: Self) -> Self;

    /// The upper 32 bits of the 64-bit product.
    fn mul_hi(self, other: Self) -> Self;

    /// ⌊self / divisor⌋ for a divisor above 0 that the host does not know, and self below 2²⁴. A kernel takes about 15
    /// instructions for it.
    fn div(self, divisor: Self) -> Self;

    /// self / 2^bits, rounded down, for `bits` below 32.
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

impl Int for u32 {
    type Bool = bool;

    fn lit(self, value: u32) -> u32 {
        value
    }

    fn sub_sat(self, other: u32) -> u32 {
        self.saturating_sub(other)
    }

    fn at_most(self, limit: u32) -> u32 {
        Ord::min(self, limit)
    }

    fn at_least(self, limit: u32) -> u32 {
        Ord::max(self, limit)
    }

    fn mul_hi(self, other: u32) -> u32 {
        ((u64::from(self) * u64::from(other)) >> 32) as u32
    }

    fn div(self, divisor: u32) -> u32 {
        self / divisor
    }

    fn shr(self, bits: u32) -> u32 {
        self >> bits
    }

    fn lt(self, other: u32) -> bool {
        self < other
    }

    fn le(self, other: u32) -> bool {
        self <= other
    }

    fn eq(self, other: u32) -> bool {
        self == other
    }

    fn select(condition: bool, yes: u32, no: u32) -> u32 {
        if condition { yes } else { no }
    }
}

/// A real number: f64 in the oracle, f32 on the CPU, a register in a kernel under construction.
pub trait Real:
    Copy + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Neg<Output = Self>
{
    /// The result of a comparison.
    type Bool: Copy + BitAnd<Output = Self::Bool> + BitOr<Output = Self::Bool>;

    /// The constant `value`, rounded. It takes `self`, because a kernel's value knows which kernel it belongs to.
    fn lit(self, value: f64) -> Self;

    /// self · factor + addend, rounded once.
    fn fma(self, factor: Self, addend: Self) -> Self;

    /// 2 to the power of self. In a kernel, an approximation to 2 ulp that flushes subnormals.
    fn exp2(self) -> Self;

    /// The hyperbolic tangent. In a kernel, from an exponential and a reciprocal, with an error of some 2⁻²².
    fn tanh(self) -> Self;

    /// self < other; false if either is NaN.
    fn lt(self, other: Self) -> Self::Bool;

    /// `yes` where `condition` holds, `no` elsewhere.
    fn select(condition: Self::Bool, yes: Self, no: Self) -> Self;
}

macro_rules! reals {
    ($($float:ident)+) => {$(
        impl Real for $float {
            type Bool = bool;

            fn lit(self, value: f64) -> $float {
                value as $float
            }

            fn fma(self, factor: $float, addend: $float) -> $float {
                self.mul_add(factor, addend)
            }

            fn exp2(self) -> $float {
                $float::exp2(self)
            }

            fn tanh(self) -> $float {
                $float::tanh(self)
            }

            fn lt(self, other: $float) -> bool {
                self < other
            }

            fn select(condition: bool, yes: $float, no: $float) -> $float {
                if condition { yes } else { no }
            }
        }
    )+};
}

reals!(f32 f64);
