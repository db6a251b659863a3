//! 2^x for a softmax: x ≤ 0, or NaN.

/// Computes 2^x to 2 ulp for −126 ≤ x ≤ 0. Below −126 the result is 0, as 2^x would be subnormal. NaN gives NaN. The
/// function has no branches or calls, so that a loop over it becomes vector code.
#[inline(always)]
pub(super) fn exp2(x: f32) -> f32 {
    // Adding 1.5 · 2²³ rounds x to an integer n, which is in the low bits of the sum.
    const SHIFT: f32 = 12_582_912.0;
    let shifted = x + SHIFT;
    let f = x - (shifted - SHIFT); // in [-0.5, 0.5]
    // Σ (f ln 2)^k / k! up to k = 7. The remainder is below 0.5⁸ ln(2)⁸ / 8! ≈ 5e-9, a tenth of an ulp.
    let mut p = 1.525_273_4e-5;
    for c in [1.540_353e-4, 1.333_355_8e-3, 9.618_129e-3, 5.550_411e-2, 2.402_265e-1, 6.931_472e-1, 1.0] {
        p = p * f + c;
    }
    let power = f32::from_bits(p.to_bits().wrapping_add(shifted.to_bits() << 23));
    let power = if x < -126.0 { 0.0 } else { power };
    if x.is_nan() { f32::NAN } else { power }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The distance between adjacent f32 numbers at 2^x.
    fn ulp(x: f32) -> f64 {
        f64::from(f32::EPSILON) * f64::from(x).floor().exp2()
    }

    #[test]
    fn two_ulp_over_the_whole_range() {
        for i in 0..=1_260_000 {
            let x = i as f32 * -1e-4;
            let error = (f64::from(exp2(x)) - f64::from(x).exp2()).abs() / ulp(x);
            assert!(error <= 2.0, "2^{x} is {error} ulp off");
        }
    }

    #[test]
    fn ends() {
        assert_eq!([0.0, -0.0, -1.0, -126.0].map(exp2), [1.0, 1.0, 0.5, f32::MIN_POSITIVE]);
        assert_eq!([-126.1, -1e30, f32::NEG_INFINITY].map(exp2), [0.0; 3]);
    }

    #[test]
    fn nan_stays_nan_whatever_its_bits() {
        for bits in [0x7FC0_0000, 0x7FC0_0001, 0x7F80_0001, 0x7FFF_FFFF, 0xFFC0_0000, 0xFFFF_FFFF] {
            assert!(exp2(f32::from_bits(bits)).is_nan(), "{bits:#x}");
        }
    }
}
