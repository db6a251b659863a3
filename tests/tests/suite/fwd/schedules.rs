//! Choices that must not change results: the tile scheduler, the tile order, the number of CTAs, other sequences in the
//! batch, an earlier launch, and a producer.

use fa3_cuda::kernels::fwd::buffers;
use fa3_ir::BufferRole;
use fa3_ref::Forward;
use fa3_sched::forward::{CtaTile, Loads, Pipeline, PlanError};
use fa3_sched::{Longest, Order, Scheduler};
use fa3_sim::{Mode, Policy, Simulation};
use fa3_tests::fwd::{Fault, Launch, Layout, dense, device, initial, results, with_tile};
use fa3_tests::memory::Memory;
use fa3_tests::reshape::alone;
use fa3_tests::{Case, pairs};
use fa3_types::{Dtype, KnownProblem, Mask};
use ndarray::Axis;
use rayon::prelude::*;

use super::launch;
use fa3_tests::fwd::shapes::{TINY, TINY_FP8, dtype};

pub(crate) const SCHEDULERS: [Scheduler; 3] =
    [Scheduler::OneTile, Scheduler::StaticPersistent, Scheduler::DynamicPersistent];

fn same(x: &Forward<f32>, y: &Forward<f32>) -> bool {
    let bits = |x: f32| x.to_bits();
    x.o.mapv(bits) == y.o.mapv(bits) && x.lse.mapv(bits) == y.lse.mapv(bits)
}

fn run(launch: &Launch, problem: &KnownProblem, policy: Policy, mode: Mode) -> Forward<f32> {
    let answer = launch.simulate(&Case::normal("schedules", problem.clone(), 4).values(), policy, mode);
    answer.unwrap_or_else(|fault| panic!("{}: {fault}", launch.plan))
}

/// Tiles of four kinds, which run under many schedules.
fn kinds() -> [CtaTile; 4] {
    let two = CtaTile { tile_m: 128, consumers: 2, tile_n: 32, ping_pong: true, ..TINY };
    [
        TINY,
        two,
        CtaTile { pipeline: Pipeline::Serial, ..two },
        CtaTile { pipeline: Pipeline::ThreeStage, ping_pong: false, ..two },
    ]
}

/// The tiles of [`kinds`], and e4m3 tiles.
fn kinds_and_fp8() -> impl Iterator<Item = CtaTile> {
    let two = CtaTile { tile_m: 128, consumers: 2, ping_pong: true, ..TINY_FP8 };
    kinds().into_iter().chain([two, CtaTile { pipeline: Pipeline::Serial, stages: 1, ..TINY_FP8 }])
}

#[test]
fn who_computes_a_tile_does_not_matter() {
    let orders = [
        Order::Linear,
        Order::LongestFirst { section: 1, longest: Longest::Last },
        Order::LongestFirst { section: 4, longest: Longest::First },
    ];
    kinds_and_fp8().collect::<Vec<_>>().into_par_iter().for_each(|tile| {
        let problem = dense(dtype(&tile), 2, (150, 140), (3, 1), 64).causal().known().unwrap();
        let mut first = None;
        for (scheduler, order) in pairs(SCHEDULERS, orders) {
            for (sms, policy) in [(1, Policy::Eager), (5, Policy::Random(4))] {
                let options = with_tile(tile).scheduler(scheduler).order(order);
                let launch = Launch::new(&problem, &device(sms), &options).unwrap();
                let answer = run(&launch, &problem, policy, Mode::Fast);
                let first = first.get_or_insert_with(|| answer.clone());
                assert!(same(first, &answer), "{sms} sms: {}", launch.plan);
            }
        }
    });
}

/// Kernels whose consumers load for themselves have the results of warp-specialized kernels, for any number of stages,
/// under many schedules. `FA3_SEEDS` sets the number of schedules.
#[test]
fn who_loads_does_not_matter() {
    let seeds = std::env::var("FA3_SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(2);
    let tiles = kinds().into_iter().flat_map(|tile| [1, 2, 5].map(|stages| CtaTile { stages, ..tile }));
    let tiles: Vec<CtaTile> = tiles.collect();
    tiles.into_par_iter().enumerate().for_each(|(index, tile)| {
        let masks = [Mask::None, Mask::Causal, Mask::Window { left: Some(40), right: Some(3) }];
        // One block; many blocks; fully masked tiles.
        for lengths in [(70, 9), (150, 140), (200, 33)] {
            let spec = dense(Dtype::F16, 1, lengths, (3, 1), 64).mask(masks[(index + index / 3) % 3]);
            let problem = spec.known().unwrap();
            let launch = |loads| {
                let options = with_tile(CtaTile { loads, ..tile }).scheduler(Scheduler::StaticPersistent);
                Launch::new(&problem, &device(2), &options).unwrap()
            };
            let first = run(&launch(Loads::Producer), &problem, Policy::Eager, Mode::Fast);
            let launch = launch(Loads::Consumers);
            assert_eq!(launch.program.steps[0].kernel.roles.len(), 1);
            for policy in (0..seeds).map(Policy::Random).chain([Policy::Eager, Policy::Lazy]) {
                let again = run(&launch, &problem, policy, Mode::Fast);
                assert!(same(&first, &again), "another result under {policy:?}: {}", launch.plan);
            }
        }
    });
}

/// A kernel without a producer has no dynamic scheduler: the planner does not choose it, and refuses it as an option.
#[test]
fn without_a_producer_tiles_are_dealt_out() {
    let problem = dense(Dtype::F16, 2, (150, 140), (3, 1), 64).causal().known().unwrap();
    let open = with_tile(CtaTile { loads: Loads::Consumers, ..TINY });
    let plan = launch(&problem, &open).unwrap().plan;
    assert_eq!(plan.scheduler(), Scheduler::StaticPersistent);
    let scheduler = Scheduler::DynamicPersistent;
    let refused = launch(&problem, &open.scheduler(scheduler)).err().unwrap();
    assert!(matches!(refused, Fault::Plan(PlanError::NoProducer { scheduler: s }) if s == scheduler));
}

/// Each head of each sequence has the same bits as in a problem of its own.
#[test]
fn other_sequences_do_not_matter() {
    pairs(kinds_and_fp8(), Layout::ALL).into_par_iter().for_each(|(tile, layout)| {
        let spec = dense(dtype(&tile), 2, (90, 70), (4, 2), 64).mask(Mask::window(Some(60), Some(11)));
        let problem = layout.of(spec).known().unwrap();
        let values = Case::normal("together", problem.clone(), 4).values();
        let options = with_tile(tile).scheduler(Scheduler::DynamicPersistent);
        let together = launch(&problem, &options).unwrap();
        let together = run(&together, &problem, Policy::Random(1), Mode::Fast);
        for (batch, head) in pairs(0..2, 0..4) {
            let (problem, values) = alone(&problem, &values, batch, head);
            let launch = launch(&problem, &with_tile(tile)).unwrap();
            let answer = launch.simulate(&values, Policy::Eager, Mode::Fast).unwrap();
            let bits = |x: &Forward<f32>, batch: usize, head: usize| -> Vec<u32> {
                let o = x.o.index_axis(Axis(0), batch).index_axis_move(Axis(1), head);
                let lse = x.lse.index_axis(Axis(0), batch).index_axis_move(Axis(0), head);
                o.iter().chain(&lse).map(|x| x.to_bits()).collect()
            };
            assert_eq!(bits(&together, batch, head), bits(&answer, 0, 0), "{}", launch.plan);
        }
    });
}

/// Three launches share memory and tile counter. The CTAs that fetch the last tile reset the counter to zero. Each
/// launch may begin (PDL) while the previous launch still writes this memory, including the counter.
#[test]
fn launches_follow_each_other() {
    for (sms, tile) in pairs([1, 3, 8, 18], kinds_and_fp8()) {
        let spec = dense(dtype(&tile), 2, (150, 140), (3, 3), 64).causal();
        let problem = Layout::Gaps.of(spec).known().unwrap();
        let values = Case::normal("again", problem.clone(), 4).values();
        let options = with_tile(tile).scheduler(Scheduler::DynamicPersistent);
        let launch = Launch::new(&problem, &device(sms), &options).unwrap();
        let program = &launch.program;
        let ticket = program.find(buffers::TILE_COUNTER).expect("the scheduler is dynamic");
        assert_eq!(program.buffers[ticket.0].role, BufferRole::TileCounter);
        let before = initial(&problem, program, &values);
        let mut memory = fa3_sim::Memory::new();
        let memories: Vec<_> = program
            .buffers
            .iter()
            .zip(&before)
            .map(|(array, bytes)| memory.alloc_from(array.name, bytes))
            .collect();
        let addresses: Vec<u64> = memories.iter().map(|buffer| buffer.address()).collect();
        let mut first: Option<Forward<f32>> = None;
        for policy in [Policy::Eager, Policy::Lazy, Policy::Random(sms.into())] {
            let step = &program.steps[0];
            let args = step.bind(&step.kernel.params, &addresses).unwrap();
            let simulation = Simulation::new(&step.kernel).grid(step.grid).args(args);
            let simulation = simulation.predecessor_writes(memories.clone());
            let outcome = simulation.policy(policy).mode(Mode::Fast).run(&mut memory).unwrap();
            assert!(outcome.is_clean(), "{}", outcome.findings[0]);
            let arrays: Vec<Vec<u8>> = memories.iter().map(|&buffer| memory.read(buffer)).collect();
            Memory::new(program, &arrays).check_rest(&before).unwrap();
            let answer = results(&problem, program, &arrays);
            let first = first.get_or_insert_with(|| answer.clone());
            assert!(same(first, &answer), "{policy:?} {}", launch.plan);
        }
    }
}
