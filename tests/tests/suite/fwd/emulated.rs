//! The emulator of 8-bit arithmetic gives what the kernels give.

use fa3_quant::{Accumulation, Fp8Attention};
use fa3_ref::norms::ErrorNorms;
use fa3_sched::forward::PlanOptions;
use fa3_sim::{Mode, Policy};
use fa3_tests::{Case, Dist, Poison, emulated};
use fa3_types::{Dtype, Mask, ProblemSpec, Shape};

use super::launch;

/// Cases whose keys have few different scores: P of equal scores are rounded alike, so that what is summed up, and
/// relative to which score, is seen in all digits. The last case broke a law whose baseline went the other way.
fn cases() -> Vec<Case> {
    let shapes = [(31, 159, 16), (189, 129, 64)].map(|(seqlen_q, seqlen_k, head_dim)| {
        let q = Shape { batch: 1, seqlen: seqlen_q, heads: 4, head_dim };
        (q, Shape { seqlen: seqlen_k, heads: 2, ..q })
    });
    let [(small_q, small_k), (q, k)] = shapes;
    let specs = [
        ProblemSpec::dense(Dtype::E4m3, q, k).softcap(3.0).mask(Mask::Window { left: Some(50), right: None }),
        ProblemSpec::dense(Dtype::E4m3, q, k).causal().block_scales(64),
        ProblemSpec::dense(Dtype::E4m3, small_q, small_k).softmax_scale(0.01).block_scales(64),
    ];
    let case = |spec: ProblemSpec| {
        let (name, problem) = ("emulated".into(), spec.known().unwrap());
        Case { name, problem, dist: Dist::OneHot, poison: Poison::BeyondEnd, seed: 5 }
    };
    specs.into_iter().map(case).collect()
}

#[test]
fn kernels_give_what_the_emulator_gives() {
    for case in cases() {
        let values = case.values();
        let launch = launch(&case.problem, &PlanOptions::default()).unwrap();
        let keys = launch.plan.tile().tile_n as usize;
        let emulator = Fp8Attention::new(Accumulation::TwoLevel { keys }, keys).with_rounded_row_sums();
        let emulated = emulated(&case, &values, emulator).unwrap();
        let given = launch.simulate(&values, Policy::Random(1), Mode::Exact).unwrap();
        let lse = ErrorNorms::of(&given.lse, &emulated.lse.mapv(f64::from));
        assert!(lse.max < 1e-4, "{}: LSE {lse}", launch.plan);
        for (&given, &emulated) in given.o.iter().zip(&emulated.o) {
            // A unit in bf16's last place, and what the tensor core loses of P V.
            let allowed = 2f32.powi(-8) * emulated.abs() + 2e-3;
            assert!((given - emulated).abs() <= allowed, "{}: {given}, not {emulated}", launch.plan);
        }
    }
}
