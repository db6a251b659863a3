use proptest::prelude::*;

use super::*;

const MIN: f32 = f32::MIN_POSITIVE;
const SUBNORMAL: f32 = f32::from_bits(0x7F_FFFF);

fn check(f: fn(f32) -> f32, table: &[(f32, f32)]) {
    for &(a, expected) in table {
        let ours = f(a);
        let same =
            ours.to_bits() == expected.to_bits() || (expected.is_nan() && ours.to_bits() == 0x7FFF_FFFF);
        assert!(same, "of {a:e}: {ours:e}, not {expected:e}");
    }
}

/// The tables of special values in the PTX ISA.
#[test]
fn special_values() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    check(
        ex2,
        &[(-inf, 0.0), (-0.0, 1.0), (0.0, 1.0), (SUBNORMAL, 1.0), (inf, inf), (nan, nan), (-127.0, 0.0)],
    );
    check(ex2, &[(-126.0, MIN), (127.0, 2f32.powi(127)), (128.0, inf), (3.0, 8.0)]);
    check(
        lg2,
        &[(-inf, nan), (-1.0, nan), (-0.0, -inf), (0.0, -inf), (SUBNORMAL, -inf), (inf, inf), (nan, nan)],
    );
    check(lg2, &[(1.0, 0.0), (8.0, 3.0), (MIN, -126.0)]);
    check(rcp, &[(-inf, -0.0), (inf, 0.0), (-0.0, -inf), (0.0, inf), (-SUBNORMAL, -inf), (nan, nan)]);
    check(rcp, &[(4.0, 0.25), (-2f32.powi(127), -0.0), (2f32.powi(126), MIN)]);
    check(
        rsqrt,
        &[(-inf, nan), (-1.0, nan), (-0.0, -inf), (0.0, inf), (SUBNORMAL, inf), (inf, 0.0), (nan, nan)],
    );
    check(rsqrt, &[(16.0, 0.25)]);
    check(
        sqrt,
        &[(-inf, nan), (-1.0, nan), (-0.0, -0.0), (-SUBNORMAL, -0.0), (0.0, 0.0), (inf, inf), (nan, nan)],
    );
    check(sqrt, &[(16.0, 4.0)]);
    check(tanh, &[(-inf, -1.0), (inf, 1.0), (-0.0, -0.0), (SUBNORMAL, SUBNORMAL), (nan, nan), (20.0, 1.0)]);
}

/// |ours − exact| in units of the last place of `ours`.
fn ulps(ours: f32, exact: f64) -> f64 {
    let ulp = f64::from(ours.abs().next_up()) - f64::from(ours.abs());
    (f64::from(ours) - exact).abs() / ulp
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// Against other f64 functions than the ones used: half an ulp of rounding and a hair.
    #[test]
    fn results_are_the_nearest(a in -120.0..120.0f32, size in 1e-30..1e30f32) {
        let wide = f64::from(size);
        prop_assert!(ulps(ex2(a), (f64::from(a) * std::f64::consts::LN_2).exp()) < 0.5001);
        prop_assert!(ulps(rcp(size), 1.0 / wide) <= 0.5);
        prop_assert!(ulps(rcp(-size), -1.0 / wide) <= 0.5);
        prop_assert!(ulps(sqrt(size), wide.powf(0.5)) < 0.5001);
        prop_assert!(ulps(rsqrt(size), wide.powf(-0.5)) < 0.5001);
        let log = wide.ln() / std::f64::consts::LN_2;
        prop_assert!(ulps(lg2(size), log) < 0.5001 || log.abs() < 1e-3);
        let e = (2.0 * f64::from(a)).exp();
        prop_assert!(ulps(tanh(a), (e - 1.0) / (e + 1.0)) < 0.5001 || a.abs() < 1e-3);
    }
}
