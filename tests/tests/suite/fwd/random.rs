//! Random dense problems with random options.

use fa3_sched::forward::{CtaTile, PlanOptions, Precision};
use fa3_sched::{Longest, Order, Scheduler};
use fa3_sim::{Mode, Policy};
use fa3_tests::fwd::{Launch, device, judged, shapes, with_tile};
use fa3_tests::strategies;
use fa3_types::{KnownProblem, Mask};
use proptest::prelude::*;
use proptest::sample::select;
use proptest::strategy::ValueTree;

fn order() -> impl Strategy<Value = Order> {
    let longest = select(vec![Longest::First, Longest::Last]);
    prop_oneof![
        Just(Order::Linear),
        (1u32..9, longest).prop_map(|(section, longest)| Order::LongestFirst { section, longest }),
    ]
}

fn scheduler() -> impl Strategy<Value = Scheduler> {
    select(vec![Scheduler::OneTile, Scheduler::StaticPersistent, Scheduler::DynamicPersistent])
}

/// The planner's tile (`None`), or any tile that is large enough for the problem.
fn tile() -> impl Strategy<Value = Option<CtaTile>> {
    proptest::option::of(select(shapes::all()))
}

fn admits(tile: &CtaTile, problem: &KnownProblem) -> bool {
    let precision = Precision::of(problem);
    let may_be_transposed_before = match precision {
        Precision::Fp8(inputs) => tile.precision == Precision::Fp8(inputs.transposed()),
        Precision::Half | Precision::Converted { .. } => false,
    };
    (tile.precision == precision || may_be_transposed_before)
        && problem.head_dim() <= tile.head_dim as usize
        && problem.head_dim_v() <= tile.head_dim_v as usize
}

proptest! {
    #![proptest_config(strategies::config(40))]

    #[test]
    fn any_dense_problem_obeys_the_error_law(
        case in strategies::case(strategies::dense_problem()),
        tile in tile(),
        (order, scheduler, sms) in (order(), scheduler(), 1u32..6),
        clusters in any::<bool>(),
        policy in any::<u64>(),
    ) {
        let tile = tile.filter(|tile| admits(tile, &case.problem));
        let scheduler = tile.map_or(scheduler, |tile| shapes::dealt(&tile, scheduler));
        let options = tile.map_or_else(PlanOptions::default, with_tile);
        let options = options.order(order).scheduler(scheduler).clusters(clusters);
        let launch = Launch::new(&case.problem, &device(sms), &options).unwrap();
        let values = case.values();
        let answer = launch.simulate(&values, Policy::Random(policy), Mode::Exact);
        let answer = answer.unwrap_or_else(|fault| panic!("{}: {fault}", launch.plan));
        let judged = judged(&case, &values, &answer);
        prop_assert!(judged.is_ok(), "{}\n{}", launch.plan, judged.unwrap_err());
    }
}

/// The strategy generates problems for each kind of kernel.
#[test]
fn problems_differ() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let problems: Vec<KnownProblem> =
        (0..100).map(|_| strategies::dense_problem().new_tree(&mut runner).unwrap().current()).collect();
    let some =
        |what: fn(&KnownProblem) -> bool| problems.iter().filter(|problem| what(problem)).count() >= 10;
    assert!(some(|problem| problem.mask() == Mask::None) && some(|problem| problem.mask() != Mask::None));
    assert!(some(|problem| problem.heads().group_size() == 3));
    assert!(some(|problem| problem.o().strides != problem.o().shape.contiguous_strides()));
    assert!(some(|problem| problem.lengths(0).q > problem.lengths(0).k));
}
