//! The emulator of FP8 arithmetic matches the kernels.

use fa3_quant::{Accumulation, Fp8Attention};
use fa3_ref::norms::ErrorNorms;
use fa3_sched::forward::PlanOptions;
use fa3_sim::{Mode, Policy};
use fa3_tests::{Case, Dist, Poison, emulated};
use fa3_types::{Dtype, Mask, ProblemSpec, Shape};

use super::launch;

/// Cases with few distinct scores. P of equal scores is rounded in the same way, so that all digits show the order of
/// summation and the reference maximum. The last case once broke the law, because the law's baseline visited the blocks
/// in the other direction.
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
            // The allowed difference is one bf16 ulp, and the error of the tensor core in P V.
            let allowed = 2f32.powi(-8) * emulated.abs() + 2e-3;
            assert!((given - emulated).abs() <= allowed, "{}: {given}, not {emulated}", launch.plan);
        }
    }
}
