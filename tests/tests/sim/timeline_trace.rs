//! Traces of kernels: every action of every warp, equal under every schedule.

use fa3_ir::lang::{B32, Frag, TileShape, gemm};
use fa3_ir::{ArgValue, Elem, FenceInst, Kernel, Launch, LoadOptions, Role, TensorView, WgmmaType};
use fa3_sim::trace::{Action, Gate, Trace};
use fa3_sim::{Costs, Engine, Memory, Mode, Outcome, Policy, Simulation, Timeline};

use crate::runs::{assert_clean, policies};

/// Runs a kernel under every policy. Each run must have no finding and the same trace.
fn run(kernel: &Kernel, grid: u32, args: &dyn Fn(&mut Memory) -> Vec<ArgValue>) -> (Outcome, Trace) {
    let outcome = |policy| {
        let mut memory = Memory::new();
        let args = args(&mut memory);
        let simulation =
            Simulation::new(kernel).grid([grid, 1, 1]).args(args).policy(policy).mode(Mode::Fast);
        let outcome = simulation.trace(true).run(&mut memory).unwrap();
        assert_clean(&outcome);
        outcome
    };
    let eager = outcome(Policy::Eager);
    let trace = eager.trace.clone().unwrap();
    for policy in policies().skip(1) {
        assert_eq!(outcome(policy).trace.as_ref(), Some(&trace), "{policy:?}");
    }
    (eager, trace)
}

/// The CTA-wide barrier.
const ALL: Gate = Gate::Barrier { cta: 0, id: 0, generation: 0 };

/// The actions of a warp after the CTA-wide barrier, without plain instructions.
fn actions(trace: &Trace, warp: usize) -> Vec<&Action> {
    let all = trace.warps[warp].records.iter().map(|record| &record.action);
    let begins = all.clone().position(|action| *action == Action::Await(ALL)).map_or(0, |index| index + 1);
    all.skip(begins).filter(|action| !matches!(action, Action::Issue { .. })).collect()
}

/// A warp loads two tiles. A warpgroup multiplies them and signals the warp.
#[test]
fn roles_meet_at_gates() {
    let shape = TileShape::new(Elem::Bf16, 64, 64);
    let kernel = Kernel::build("meet", Launch::threads(160), |b| {
        let map = b.tile_map("x", shape);
        let arrived = b.mbarriers("arrived", 1, 1);
        let done = b.barrier("done", 160);
        let tiles = [b.tile("a", shape), b.tile("b", shape)];
        b.init_mbarriers();
        b.role(Role::new("multiplier", 0..4), || {
            b.mbarrier_wait(arrived, 0);
            let mut sum = Frag::zeros(b, 64);
            gemm(tiles[0], tiles[1].t(), &mut sum).wait();
            b.arrive(done);
        });
        b.role(Role::new("loader", 4..5), || {
            b.once_per_warp(|| {
                b.mbarrier_arrive_expect(arrived, 2 * shape.bytes());
                tiles
                    .iter()
                    .for_each(|&tile| b.load_tile(tile, &map, (0, 0), arrived, LoadOptions::default()));
            });
            b.sync(done);
        });
    });
    let (outcome, trace) = run(&kernel, 1, &|memory| {
        let x = memory.alloc_from("x", &[0; 64 * 64 * 2]);
        vec![ArgValue::Tensor(TensorView::contiguous(x.address(), &[64, 64], Elem::Bf16))]
    });

    let offset = kernel.smem.regions.iter().find(|region| region.name == "arrived").unwrap().offset;
    let data = Gate::Mbarrier { cta: 0, offset, phase: 0 };
    let told = Gate::Barrier { cta: 0, id: 1, generation: 0 };
    let signal = |gate| Action::Signal { gate, count: 1 };
    let product = Action::Product { ty: WgmmaType::Bf16, n: 64, a_in_registers: false };
    let mut expected = vec![Action::Await(data)];
    expected.extend(vec![product; 4]);
    expected.extend([Action::Commit, Action::Wait { pending: 0 }, signal(told)]);
    for warp in 0..4 {
        let role = (trace.warps[warp].role.as_str(), trace.warps[warp].warp as usize);
        assert_eq!(role, ("multiplier", warp));
        assert_eq!(actions(&trace, warp), expected.iter().collect::<Vec<_>>());
    }
    let load = Action::Load { bytes: shape.bytes(), signals: vec![data] };
    let expected = [signal(data), load.clone(), load, signal(told), Action::Await(told)];
    assert_eq!(trace.warps[4].role, "loader");
    assert_eq!(actions(&trace, 4), expected.iter().collect::<Vec<_>>());

    let products: Vec<Option<String>> =
        trace.products.values().map(|factors| factors.as_ref().map(ToString::to_string)).collect();
    assert_eq!(products, [Some("A Bᵀ".to_owned())]);
    let timeline = Timeline::new(&trace, &Costs::HOPPER);
    assert_eq!((outcome.counters.products, outcome.counters.loads.bytes), (4, 2 * u64::from(shape.bytes())));
    let [core, loads] = [Engine::TensorCore, Engine::Loads]
        .map(|engine| timeline.engines.iter().find(|track| track.engine == engine).unwrap().busy);
    assert_eq!(core, 32 * outcome.counters.products);
    assert_eq!(loads, 2 * u64::from(shape.bytes()).div_ceil(Costs::HOPPER.load_bytes));
    let names: Vec<&str> = timeline.roles.iter().map(|track| track.name.as_str()).collect();
    assert_eq!(names, ["multiplier", "loader"]);
}

/// One warp copies by cp.async, with groups and with an mbarrier. Then it reads, shuffles and writes.
#[test]
fn results_and_copies_are_waited_for() {
    let kernel = Kernel::build("copies", Launch::threads(32), |b| {
        let (x, y) = (b.param_pointer("x", Elem::U32), b.param_pointer("y", Elem::U32));
        let region = b.region("x", 1024, 128);
        let arrived = b.mbarriers("arrived", 1, 32);
        b.init_mbarriers();
        let tid = b.tid();
        let to = tid.mad(16, b.address(region));
        let from = tid.mad_wide(16, x);
        b.copy_async(to, from, 16);
        b.copy_async_commit();
        b.copy_async_wait(0);
        b.copy_async(to.at(512), from.at(512), 16);
        b.mbarrier_arrive_copied(arrived);
        b.mbarrier_wait(arrived, 0);
        let other = b.load::<B32>(to.at(512)).shfl_bfly(1);
        b.store(tid.mad_wide(4, y), other);
    });
    let (_, trace) = run(&kernel, 1, &|memory| {
        let (x, y) = (memory.alloc_from("x", &[1; 1024]), memory.alloc("y", 128));
        [x, y].map(|buffer| ArgValue::Pointer(buffer.address())).to_vec()
    });
    let offset = kernel.smem.regions.iter().find(|region| region.name == "arrived").unwrap().offset;
    let gate = Gate::Mbarrier { cta: 0, offset, phase: 0 };
    let expected = [
        Action::CopyAsync { bytes: 512 },
        Action::CopyAsyncCommit,
        Action::CopyAsyncWait { pending: 0 },
        Action::CopyAsync { bytes: 512 },
        Action::CopyAsyncSignal { gate, count: 32 },
        Action::Await(gate),
        // The warp reads one word of every 16 bytes, so a wavefront serves four lanes.
        Action::Shared { wavefronts: 4, loads: true },
        Action::Use,
        Action::Shared { wavefronts: 1, loads: true },
        Action::Use,
        Action::Global { bytes: 128, loads: false },
    ];
    assert_eq!(actions(&trace, 0), expected.iter().collect::<Vec<_>>());
}

/// Two CTAs of a cluster synchronize, and one of them stores in bulk. The first of three clusters is traced.
#[test]
fn clusters_meet_and_stores_are_waited_for() {
    let kernel = Kernel::build("stores", Launch::threads(32).cluster(2), |b| {
        let y = b.param_pointer("y", Elem::U32);
        let region = b.region("y", 512, 128);
        let (tid, cta) = (b.tid(), b.cta_x());
        b.store_vector::<B32, 4>(tid.mad(16, b.address(region)), [0, 1, 2, 3]);
        b.fence(FenceInst::ProxyAsyncShared);
        b.cluster_sync();
        let row = cta.mad_wide(512, y);
        b.once_per_warp(|| {
            b.bulk_store(row, region, 512);
            b.bulk_commit();
            b.bulk_wait_read(0);
        });
    });
    let (outcome, trace) = run(&kernel, 6, &|memory| {
        let y = memory.alloc("y", 6 * 512);
        vec![ArgValue::Pointer(y.address())]
    });
    assert_eq!(outcome.counters.stores.count, 6);
    let gate = Gate::Cluster { generation: 0 };
    let expected = [
        Action::Shared { wavefronts: 4, loads: false },
        Action::Signal { gate, count: 1 },
        Action::Await(gate),
        Action::Store { bytes: 512 },
        Action::StoreCommit,
        Action::StoreWait { pending: 0, read: true },
    ];
    assert_eq!(trace.warps.iter().map(|warp| warp.cta).collect::<Vec<_>>(), [0, 1]);
    for warp in 0..2 {
        assert_eq!(actions(&trace, warp), expected.iter().collect::<Vec<_>>());
    }
}
