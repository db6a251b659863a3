//! Approximations by the special-function unit.
//!
//! NVIDIA documents error bounds, not bits. Every function here gives the binary32 that is nearest to the result in
//! f64. This is more accurate than the hardware, and differs from it in the last bits. A test that compares the two
//! must allow for the bounds below.
//!
//! `.ftz` operations treat subnormal numbers as zeros of their sign, and return such zeros instead of subnormal
//! results.

use super::float::canonical;

/// `x`, or a zero with the sign of `x` if `x` is subnormal.
#[inline]
fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0.0f32.copysign(x) } else { x }
}

#[inline]
fn flushed(a: f32, f: impl Fn(f64) -> f64) -> f32 {
    canonical(flush(f(flush(a).into()) as f32))
}

/// `ex2.approx.ftz.f32`: 2^a; on hardware within 2 ulp.
pub fn ex2(a: f32) -> f32 {
    flushed(a, f64::exp2)
}

/// `lg2.approx.ftz.f32`: log₂ a; on hardware within 2⁻²², absolutely where 0.5 < a < 2, relatively elsewhere.
pub fn lg2(a: f32) -> f32 {
    flushed(a, f64::log2)
}

/// `rcp.approx.ftz.f32`: 1 / a; on hardware within 1 ulp.
pub fn rcp(a: f32) -> f32 {
    flushed(a, f64::recip)
}

/// `rsqrt.approx.ftz.f32`: 1 / √a; on hardware within 2⁻²²·⁹ relatively.
pub fn rsqrt(a: f32) -> f32 {
    flushed(a, |a| a.sqrt().recip())
}

/// `sqrt.approx.ftz.f32`: √a; on hardware within 2⁻²³ relatively.
pub fn sqrt(a: f32) -> f32 {
    flushed(a, f64::sqrt)
}

/// `tanh.approx.f32`: tanh a, subnormals kept; on hardware within 2⁻¹¹ relatively.
pub fn tanh(a: f32) -> f32 {
    canonical(f64::from(a).tanh() as f32)
}

#[cfg(test)]
mod tests;
