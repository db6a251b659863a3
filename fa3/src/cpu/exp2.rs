//! 2^x for a softmax: x ≤ 0 up to rounding, or NaN.

/// 2^x to 2 ulp for −126 ≤ x ≤ 1; 0 below, where 2^x would be subnormal; NaN for NaN. Without branches and calls,
/// so that a loop over it becomes vector code.
pub(super) fn exp2(x: f32) -> f32 {
    // Adding 1.5 · 2²³ rounds to an integer n, which stands in the low bits of the sum.
    const SHIFT: f32 = 12_582_912.0;
    let shifted = x + SHIFT;
    let f = x - (shifted - SHIFT); // in [-0.5, 0.5]
    // Taylor coefficients ln(2)^k / k!: the remainder at |f| = 0.5 is 0.5⁷ ln(2)⁷ / 7! ≈ 1.2e-7 / 1000.
    let mut p = 1.540_353_e-4;
    for c in [1.333_355_8e-3, 9.618_129e-3, 5.550_411e-2, 2.402_265e-1, 6.931_472e-1, 1.0] {
        p = p * f + c;
    }
    let power = f32::from_bits(p.to_bits().wrapping_add(shifted.to_bits() << 23));
    if x < -126.0 { 0.0 } else { power }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_ulp_over_the_whole_range() {
        for i in 0..=1_270_000 {
            let x = 1.0 - i as f32 * 1e-4;
            let exact = f64::from(x).exp2();
            let error = (f64::from(exp2(x)) - exact).abs() / exact;
            assert!(x < -126.0 || error < 2.0 * f64::from(f32::EPSILON), "2^{x}: {error}");
        }
    }

    #[test]
    fn ends() {
        assert_eq!([0.0, -0.0, -1.0, -126.0].map(exp2), [1.0, 1.0, 0.5, f32::MIN_POSITIVE]);
        assert_eq!([-126.1, -1e30, f32::NEG_INFINITY].map(exp2), [0.0; 3]);
        assert!(exp2(f32::NAN).is_nan());
    }
}
