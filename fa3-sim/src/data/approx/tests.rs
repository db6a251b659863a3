use proptest::prelude::*;

use super::*;

/// |ours − exact| in ulp of `ours`.
fn ulps(ours: f32, exact: f64) -> f64 {
    let ulp = f64::from(ours.abs().next_up()) - f64::from(ours.abs());
    (f64::from(ours) - exact).abs() / ulp
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// Results are compared with other f64 functions than the implementation uses, within half an ulp and a small
    /// margin.
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
