//! Arithmetic on binary32 and on the 16-bit formats, rounded once, to nearest even, subnormals kept.
//!
//! `f32::mul_add` calls libm unless the compiler may assume a CPU with that instruction. The functions here become
//! vector code on any CPU.

use super::convert::{NAN, bf16_of_f32, f16_of_f32, f32_of_bf16, f32_of_f16};

/// `x`, or the canonical NaN if `x` is NaN.
#[inline]
pub fn canonical(x: f32) -> f32 {
    if x.is_nan() { NAN } else { x }
}

/// a · b + c, rounded once.
///
/// The product is exact in f64, and the sum is rounded to odd there. The bits beyond the 24 bits of the result then say
/// only on which side of a tie the sum lies (Boldo and Melquiond, IEEE Transactions on Computers 57(4), 2008).
#[inline]
pub fn fma(a: f32, b: f32, c: f32) -> f32 {
    sum_to_odd(f64::from(a) * f64::from(b), f64::from(c)) as f32
}

/// x + y, rounded to odd: of the two neighbours of an inexact sum, the neighbour whose last bit is one.
#[inline]
fn sum_to_odd(x: f64, y: f64) -> f64 {
    // Knuth's TwoSum: sum + error = x + y.
    let sum = x + y;
    let from_y = sum - x;
    let error = (x - (sum - from_y)) + (y - from_y);
    // If the sum is infinite or NaN, the error is not greater than zero.
    let is_inexact = error.abs() > 0.0;
    let bits = sum.to_bits();
    let away_from_zero = (error > 0.0) == (sum > 0.0);
    let neighbour = if away_from_zero { bits.wrapping_add(1) } else { bits.wrapping_sub(1) };
    f64::from_bits(if is_inexact && bits & 1 == 0 { neighbour } else { bits })
}

/// The smaller; if one is NaN, the other; −0 is below +0.
#[inline]
pub fn min(a: f32, b: f32) -> f32 {
    if a.is_nan() || b < a || (b == a && b.is_sign_negative()) { canonical(b) } else { a }
}

/// The larger; if one is NaN, the other; −0 is below +0.
#[inline]
pub fn max(a: f32, b: f32) -> f32 {
    if a.is_nan() || b > a || (b == a && b.is_sign_positive()) { canonical(b) } else { a }
}

/// The smaller; NaN if either is NaN.
#[inline]
pub fn min_nan(a: f32, b: f32) -> f32 {
    if a.is_nan() || b.is_nan() { NAN } else { min(a, b) }
}

/// The larger; NaN if either is NaN.
#[inline]
pub fn max_nan(a: f32, b: f32) -> f32 {
    if a.is_nan() || b.is_nan() { NAN } else { max(a, b) }
}

/// A 16-bit format: how its codes become binary32 and back.
pub trait Half {
    /// The number of a code.
    fn widen(code: u16) -> f32;
    /// The code nearest to a number.
    fn narrow(x: f32) -> u16;

    /// One addition, subtraction or multiplication, or a minimum or maximum, computed in binary32. The 24 bits of
    /// binary32 are at least twice the format's bits and two more, enough for two roundings to be as good as one.
    #[inline]
    fn binary(a: u16, b: u16, f: impl Fn(f32, f32) -> f32) -> u16 {
        Self::narrow(f(Self::widen(a), Self::widen(b)))
    }

    /// a · b + c, rounded once.
    #[inline]
    fn fma(a: u16, b: u16, c: u16) -> u16 {
        let [a, b, c] = [a, b, c].map(|code| f64::from(Self::widen(code)));
        Self::narrow(to_odd(sum_to_odd(a * b, c)))
    }
}

/// `x` rounded to odd: of the two binary32 around an inexact `x`, the one whose last bit is one.
#[inline]
fn to_odd(x: f64) -> f32 {
    let nearest = x as f32;
    let bits = nearest.to_bits();
    let too_small = f64::from(nearest).abs() < x.abs();
    let neighbour = if too_small { bits.wrapping_add(1) } else { bits.wrapping_sub(1) };
    let is_inexact = x.is_finite() && f64::from(nearest) != x;
    f32::from_bits(if is_inexact && bits & 1 == 0 { neighbour } else { bits })
}

/// IEEE binary16.
pub enum F16 {}

impl Half for F16 {
    #[inline]
    fn widen(code: u16) -> f32 {
        f32_of_f16(code)
    }
    #[inline]
    fn narrow(x: f32) -> u16 {
        f16_of_f32(x)
    }
}

/// bfloat16.
pub enum Bf16 {}

impl Half for Bf16 {
    #[inline]
    fn widen(code: u16) -> f32 {
        f32_of_bf16(code)
    }
    #[inline]
    fn narrow(x: f32) -> u16 {
        bf16_of_f32(x)
    }
}

#[cfg(test)]
mod tests;
