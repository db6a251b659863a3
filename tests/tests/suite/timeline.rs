//! The cycle model on the kernels of the ladder: who keeps the tensor core busy, and what does not depend on the
//! schedule of the run.

use fa3_cuda::kernels::Spec;
use fa3_cuda::kernels::ladder::{GemmSize, gemm, gemm_cluster, gemm_ring, gemm_simple};
use fa3_ir::{Elem, Kernel, Program};
use fa3_sim::{Costs, Engine, Mode, Policy, ProgramSimulation, Timeline, Trace};
use fa3_tests::ladder::small_rungs;

/// What the first cluster of a program's kernel does, on buffers of zeros.
fn trace(program: &Program<Kernel>, policy: Policy) -> Trace {
    let zeros: Vec<Vec<u8>> = program.buffers.iter().map(|buffer| vec![0; buffer.bytes()]).collect();
    let simulation = ProgramSimulation::new(program).policy(policy).mode(Mode::Skeleton).trace(true);
    simulation.run(&zeros).unwrap().steps.remove(0).trace.unwrap()
}

/// How busy the tensor core is.
fn busy(program: &Program<Spec>) -> f64 {
    let timeline = Timeline::new(&trace(&program.map(Spec::kernel), Policy::Eager), &Costs::HOPPER);
    println!("{timeline}");
    timeline.utilisation(0, Engine::TensorCore)
}

/// Tiles of 128 x 256 by a producer and two consumers, alone and in pairs; of 64 x 128 by one warpgroup, with loads
/// ahead and in turn.
#[test]
fn specialised_warps_keep_the_tensor_core_busy() {
    let size = |m, n| GemmSize { m, n, k: 4096 };
    let specialised = busy(&gemm::program(Elem::Bf16, size(128, 256), 1));
    let paired = busy(&gemm_cluster::program(Elem::Bf16, size(256, 256), 2));
    let ahead = busy(&gemm_ring::program(Elem::Bf16, size(64, 128)));
    let in_turn = busy(&gemm_simple::program(Elem::Bf16, size(64, 128)));
    assert!(specialised > 0.85 && paired > 0.85, "{specialised} {paired}");
    assert!(in_turn < 0.25, "{in_turn}");
    assert!(in_turn < ahead && ahead < specialised, "{in_turn} {ahead} {specialised}");
}

/// Who signals whom, and what is computed, is the same in every run of a kernel that draws nothing from counters.
#[test]
fn traces_do_not_depend_on_the_schedule() {
    for rung in small_rungs() {
        let eager = trace(&rung.program, Policy::Eager);
        for policy in [Policy::Lazy, Policy::Random(1), Policy::Random(2)] {
            assert!(trace(&rung.program, policy) == eager, "{}: {policy:?}", rung.name);
        }
        let timeline = Timeline::new(&eager, &Costs::HOPPER);
        let products = rung.program.steps[0].kernel.name.starts_with("gemm");
        assert_eq!(timeline.utilisation(0, Engine::TensorCore) > 0.0, products, "{}", rung.name);
    }
}
