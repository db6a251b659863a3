//! The cycle model on kernels: tensor core utilization, and properties that do not depend on the schedule of the run.

use fa3_cuda::kernels::ladder::{GemmSize, gemm, gemm_cluster, gemm_pipeline, gemm_simple};
use fa3_cuda::kernels::{Spec, bwd};
use fa3_ir::{Elem, Kernel, Program};
use fa3_sched::DeviceLimits;
use fa3_sched::backward::{AddOrder, DkvTile, Plan, PlanOptions};
use fa3_sim::trace::{Action, Gate};
use fa3_sim::{Costs, Engine, Mode, Policy, ProgramSimulation, Timeline, Trace};
use fa3_tests::ladder::small_rungs;
use fa3_types::{BackwardSpec, Dtype, ProblemSpec, Shape};

/// Trace of the first cluster of a program's step, on buffers of zeros.
fn trace_of(program: &Program<Kernel>, step: usize, policy: Policy) -> Trace {
    let zeros: Vec<Vec<u8>> = program.buffers.iter().map(|buffer| vec![0; buffer.bytes()]).collect();
    let simulation = ProgramSimulation::new(program).policy(policy).mode(Mode::Skeleton).trace(true);
    simulation.run(&zeros).unwrap().steps.remove(step).trace.unwrap()
}

/// Trace of a program's only step.
fn trace(program: &Program<Kernel>, policy: Policy) -> Trace {
    trace_of(program, 0, policy)
}

/// The share of time in which the tensor core is busy.
fn busy(program: &Program<Spec>) -> f64 {
    busy_in(&trace(&program.map(Spec::kernel), Policy::Eager))
}

fn busy_in(trace: &Trace) -> f64 {
    let timeline = Timeline::new(trace, &Costs::HOPPER);
    println!("{timeline}");
    timeline.utilisation(0, Engine::TensorCore)
}

/// The utilization of kernels with tiles of 128 x 256, a producer and two consumers, alone and in clusters of two. They
/// are compared with kernels with tiles of 64 x 128 and one warpgroup, with and without prefetching.
#[test]
fn specialised_warps_keep_the_tensor_core_busy() {
    let size = |m, n| GemmSize { m, n, k: 4096 };
    let specialised = busy(&gemm::program(Elem::Bf16, size(128, 256), 1));
    let paired = busy(&gemm_cluster::program(Elem::Bf16, size(256, 256), 2));
    let ahead = busy(&gemm_pipeline::program(Elem::Bf16, size(64, 128)));
    let in_turn = busy(&gemm_simple::program(Elem::Bf16, size(64, 128)));
    assert!(specialised > 0.85 && paired > 0.85, "{specialised} {paired}");
    assert!(in_turn < 0.25, "{in_turn}");
    assert!(in_turn < ahead && ahead < specialised, "{in_turn} {ahead} {specialised}");
}

/// All runs of a kernel without a dynamic scheduler have the same signals and computations.
#[test]
fn traces_do_not_depend_on_the_schedule() {
    for rung in small_rungs(1) {
        let eager = trace(&rung.program, Policy::Eager);
        for policy in [Policy::Lazy, Policy::Random(1), Policy::Random(2)] {
            assert!(trace(&rung.program, policy) == eager, "{}: {policy:?}", rung.name);
        }
        let timeline = Timeline::new(&eager, &Costs::HOPPER);
        let products = rung.program.steps[0].kernel.name.starts_with("gemm");
        assert_eq!(timeline.utilisation(0, Engine::TensorCore) > 0.0, products, "{}", rung.name);
    }
}

/// Trace of the dK/dV kernel with dQ additions in any order, on the first KV tile of a problem with `seqlen` rows.
fn adding(head_dim: usize, seqlen: usize) -> Trace {
    let limits = DeviceLimits::h100_sxm();
    let q = Shape { batch: 1, seqlen, heads: 1, head_dim };
    let forward = ProblemSpec::dense(Dtype::Bf16, q, Shape { seqlen: 128, ..q });
    let problem = BackwardSpec::contiguous(forward).validate().unwrap();
    let tile = DkvTile::choose_adding([head_dim as u32; 2], AddOrder::Any, &limits).unwrap();
    let plan = Plan::with(&problem, &limits, &PlanOptions::default().dkv(tile)).unwrap();
    trace_of(&bwd::program(&plan).map(Spec::kernel), 1, Policy::Eager)
}

/// The trace without the named barriers of ping-pong, which are all named barriers of this kernel.
fn without_turns(mut trace: Trace) -> Trace {
    for warp in &mut trace.warps {
        warp.records.retain(|record| {
            let (Action::Await(gate) | Action::Signal { gate, .. }) = record.action else { return true };
            !matches!(gate, Gate::Barrier { id: 1.., .. })
        });
    }
    trace
}

/// While one consumer of the dK/dV kernel computes P and dS, the other multiplies. According to the model, two
/// consumers without ping-pong overlap in the same way at head_dim 128.
#[test]
fn turns_keep_the_tensor_core_busy_in_the_backward_pass() {
    let [narrow, wide] = [64, 128].map(|head_dim| {
        let trace = adding(head_dim, 1024);
        [busy_in(&trace), busy_in(&without_turns(trace))]
    });
    assert!(narrow[0] > 0.64 && narrow[0] > 1.1 * narrow[1], "{narrow:?}");
    assert!(wide[0] > 0.82 && wide[0] > 0.98 * wide[1], "{wide:?}");
}
