//! Problems for the forward kernels: a covering array of the features of their code.

use std::collections::HashSet;

use fa3_sched::forward::{CtaTile, Loads, PlanOptions, Precision, TileRow};
use fa3_sched::{Longest, Order, Scheduler};
use fa3_types::{Dtype, Mask, ProblemSpec};

use super::scores::Scores;
use super::shapes::{INPUTS, PIPELINES, dealt, dtype, laid_out, others};
use super::{
    LSE_FORMS, Launch, Layout, check_max_logits, dense, device, initial, judged, outputs, with_tile,
};
use super::{fp8, functions, listed};
use crate::{Bits, Case, Dist, Levels, Poison, Trial, Values, chunks, covering_cases};

/// Number of consumer warpgroups, and whether they run ping-pong.
pub(super) const CONSUMERS: [(u32, bool); 5] = [(1, false), (2, false), (2, true), (3, false), (3, true)];
pub(super) const MASKS: [Mask; 6] = [
    Mask::None,
    Mask::Causal,
    Mask::Window { left: Some(37), right: Some(21) },
    Mask::Window { left: Some(50), right: None },
    Mask::Window { left: None, right: Some(13) },
    chunks(45, Some(0)),
];
/// Some of [`MASKS`], for kernels that share the code of masks with others: no bound, a bound on one side, bounds on
/// both sides, and chunks.
pub(super) const BOUNDS: [Mask; 4] = [MASKS[0], MASKS[1], MASKS[2], MASKS[5]];
pub(super) const SCHEDULERS: [Scheduler; 3] =
    [Scheduler::OneTile, Scheduler::StaticPersistent, Scheduler::DynamicPersistent];
pub(super) const SOFTCAPS: [Option<f64>; 2] = [None, Some(3.0)];
/// Whether query heads have sinks.
pub(super) const SINKS: [bool; 2] = [false, true];
pub(super) const ORDERS: [Order; 3] = [
    Order::Linear,
    Order::LongestFirst { section: 2, longest: Longest::First },
    Order::LongestFirst { section: 1, longest: Longest::Last },
];
/// (sequences, query heads, key/value heads): MHA, MQA, and GQA with a group size that is not a power of two.
pub(super) const HEADS: [(usize, usize, usize); 4] = [(2, 1, 1), (1, 3, 1), (1, 6, 2), (1, 5, 5)];
/// Lengths of Q and of K, for a tile of m rows and n keys.
pub(super) type Lengths = fn(usize, usize) -> (usize, usize);

/// One row and one key; one query and several blocks; just below and above a multiple of the tile; fully masked rows
/// under a causal mask.
pub(super) const LENGTHS: [Lengths; 5] = [
    |_, _| (1, 1),
    |_, n| (1, 3 * n + 7),
    |m, n| (m - 3, 2 * n + 1),
    |m, n| (m + 9, 3 * n + n / 2),
    |m, _| (m + 30, 29),
];

/// Levels of the factors that cluster kernels restrict.
struct Choices<'a> {
    masks: &'a [Mask],
    schedulers: &'a [Scheduler],
    loads: &'a [Loads],
    heads: &'a [(usize, usize, usize)],
    orders: &'a [Order],
    lengths: &'a [Lengths],
    sms: u32,
}

const ALL: Choices<'_> = Choices {
    masks: &MASKS,
    schedulers: &SCHEDULERS,
    loads: &[Loads::Producer, Loads::Consumers],
    heads: &HEADS,
    orders: &ORDERS,
    lengths: &LENGTHS,
    sms: 3,
};

/// Levels for kernels in clusters of two, on two SMs: no mask, static persistent CTAs, a producer, linear tile order,
/// and lengths that give an even number of tiles per head.
const PAIRED: Choices<'_> = Choices {
    masks: MASKS.split_at(1).0,
    schedulers: &[Scheduler::StaticPersistent],
    loads: &[Loads::Producer],
    heads: HEADS.split_at(2).0,
    orders: ORDERS.split_at(1).0,
    lengths: LENGTHS.split_at(3).1,
    sms: 2,
};

/// The covering arrays of features, every tile of the planner's table, and scores of every distribution.
pub(crate) fn trials(seed: u64) -> Vec<Trial> {
    let mut trials = covering_cases(|levels| of_features(levels, &ALL, seed));
    trials.extend(covering_cases(|levels| in_pairs(of_features(levels, &PAIRED, seed))));
    let mut tiles: Vec<CtaTile> = Vec::new();
    for shape in TileRow::table().iter().map(|row| row.tile) {
        let inputs = INPUTS.into_iter().filter(|_| shape.precision.is_fp8());
        let others: Vec<CtaTile> = inputs.map(|inputs| shape.of_inputs(inputs)).collect();
        tiles.extend(if others.is_empty() { vec![shape] } else { others });
    }
    let mut known = HashSet::new();
    tiles.retain(|shape| known.insert(*shape));
    trials.extend(tiles.into_iter().map(|shape| of_table(shape, seed)));
    trials.extend(fp8::trials(seed));
    trials.extend(listed::trials(seed));
    trials.extend(functions::trials(seed));
    trials.extend(covering_cases(|levels| {
        let (scores, head_dim) = (levels.pick(&Scores::ALL), levels.pick(&[64, 128, 256]));
        let dtype = levels.pick(&[Dtype::F16, Dtype::Bf16, Dtype::E4m3]);
        let mask = levels.pick(&[Mask::None, Mask::Causal]);
        of_scores(scores, dense(dtype, 1, (100, 1500), (1, 1), head_dim).mask(mask), seed)
    }));
    trials
}

/// Returns the trial, after a check that its kernel runs in clusters of two.
fn in_pairs(trial: Trial) -> Trial {
    assert_eq!(trial.program.steps[0].kernel.launch.cluster, 2, "{} runs in clusters", trial.name);
    trial
}

/// A trial of a tile and a problem. The factors that select the kernel's code are picked first.
fn of_features(levels: &mut Levels, choices: &Choices<'_>, seed: u64) -> Trial {
    let (pipeline, (consumers, ping_pong)) = (levels.pick(&PIPELINES), levels.pick(&CONSUMERS));
    let mask = levels.pick(choices.masks);
    // head_dim and head_dim_v: one panel of 64 columns, one and a half panels, and several panels of K or of V.
    let (head_dim, head_dim_v) = levels.pick(&[(64, 64), (96, 96), (192, 64), (64, 128)]);
    // Pipeline stages of K and V: one; as many as are in flight; and one more.
    let stages = levels.pick(&[1, 2, 3]);
    // Keys per block: one step of PV, two steps, three steps.
    let tile_n = levels.pick(&[16, 32, 48]);
    let (scheduler, loads) = (levels.pick(choices.schedulers), levels.pick(choices.loads));
    let (softcap, dtype) = (levels.pick(&SOFTCAPS), levels.pick(&[Dtype::F16, Dtype::Bf16]));
    let ((batch, heads_q, heads_kv), layout) = (levels.pick(choices.heads), levels.pick(&Layout::ALL));
    let (order, lengths) = (levels.pick(choices.orders), levels.pick(choices.lengths));
    let dist = levels.pick(&[Dist::Normal, Dist::Increasing, Dist::Decreasing, Dist::OneHot]);
    // Number of columns by which the problem's head dimension is smaller than the tile's.
    let (padding, sink) = (levels.pick(&[0, 8, 24]), levels.pick(&SINKS));
    let (lse, max_logits) = (levels.pick(&LSE_FORMS), levels.pick(&[false, true]));
    let tile_m = 64 * consumers;
    let shape = CtaTile {
        head_dim,
        head_dim_v,
        qv: false,
        tile_m,
        tile_n,
        stages,
        consumers,
        loads,
        pipeline,
        ping_pong,
        precision: Precision::Half,
    };
    let (seqlen_q, seqlen_k) = lengths(tile_m as usize, tile_n as usize);
    // Problems of more than four heads need only one tile of rows per head.
    let seqlen_q = if heads_q > 4 { seqlen_q.min(tile_m as usize - 1) } else { seqlen_q };
    let columns = |columns: u32| (columns - padding) as usize;
    let spec = dense(dtype, batch, (seqlen_q, seqlen_k), (heads_q, heads_kv), columns(head_dim));
    let mut spec = spec.head_dim_v(columns(head_dim_v)).mask(mask);
    (spec.softcap, spec.sink, spec.lse) = (softcap, sink, lse);
    spec.max_logits = max_logits;
    let problem = layout.of(spec).known().expect("all levels are valid");
    let options = with_tile(shape).order(order).scheduler(dealt(&shape, scheduler)).clusters(true);
    let case = Case { name: format!("{layout:?}, {dist:?}"), problem, dist, poison: Poison::None, seed };
    trial(case, choices.sms, &options)
}

/// A trial of a tile of the planner's table, on two tiles of rows and three KV blocks.
fn of_table(shape: CtaTile, seed: u64) -> Trial {
    let lengths = (shape.tile_m as usize + 9, 2 * shape.tile_n as usize + 5);
    let spec = dense(dtype(&shape), 1, lengths, (1, 1), shape.head_dim as usize);
    let spec = laid_out(&shape, spec.head_dim_v(shape.head_dim_v as usize));
    let problem = spec.causal().known();
    let problem = problem.expect("a tile's own head dimensions are valid");
    trial(Case::normal("a tile of the table", problem, seed), 3, &with_tile(shape))
}

/// A trial with scores of this distribution over many KV blocks, with the tile of the planner's table.
fn of_scores(scores: Scores, spec: ProblemSpec, seed: u64) -> Trial {
    let problem = spec.known().expect("the lengths and dimensions are valid");
    let case = Case::normal(&format!("{scores:?}"), problem, seed);
    let values = scores.values(case.values(), &case.problem);
    trial_of(case, values, 3, &PlanOptions::default())
}

/// Tiles of every kind, with several blocks and several tiles of rows. Some of them also run in clusters.
pub(crate) fn small() -> Vec<Trial> {
    let masks = [Mask::None, Mask::Causal, Mask::Window { left: Some(40), right: Some(3) }];
    let small = others().into_iter().enumerate().map(|(index, shape)| {
        let scheduler = dealt(&shape, SCHEDULERS[index / 3 % 3]);
        let rows = shape.tile_m as usize + 5;
        of_two_heads(&shape, rows, masks[index % 3], 3, &with_tile(shape).scheduler(scheduler))
    });
    let loads_ahead = |shape: &CtaTile| shape.loads == Loads::Producer;
    let pairs = others().into_iter().filter(loads_ahead).step_by(5).map(|shape| {
        let options =
            with_tile(shape).scheduler(Scheduler::StaticPersistent).order(Order::Linear).clusters(true);
        // There are three tiles per head: a cluster pairs the third tile with a tile of the other head.
        let rows = 2 * shape.tile_m as usize + 5;
        in_pairs(of_two_heads(&shape, rows, Mask::None, 2, &options))
    });
    small.chain(pairs).chain(fp8::small()).chain(listed::small()).chain(functions::small()).collect()
}

/// Two query heads with `rows` rows, which share one KV head with several blocks.
pub(super) fn of_two_heads(
    shape: &CtaTile,
    rows: usize,
    mask: Mask,
    sms: u32,
    options: &PlanOptions,
) -> Trial {
    let lengths = (rows, 3 * shape.tile_n as usize + 9);
    let spec = dense(dtype(shape), 1, lengths, (2, 1), shape.head_dim as usize);
    let problem = laid_out(shape, spec.head_dim_v(shape.head_dim_v as usize).mask(mask)).known();
    let case = Case::normal("small", problem.expect("a tile's own head dimensions are valid"), 4);
    trial(case, sms, options)
}

/// Builds the trial of the case for a device of `sms` SMs.
///
/// # Panics
/// If the planner refuses the case.
pub fn trial(case: Case, sms: u32, options: &PlanOptions) -> Trial {
    let values = case.values();
    trial_of(case, values, sms, options)
}

/// Builds the trial of the case with these values, for a device of `sms` SMs.
fn trial_of(case: Case, values: Values, sms: u32, options: &PlanOptions) -> Trial {
    let launch = Launch::new(&case.problem, &device(sms), options);
    let Launch { plan, program, .. } = launch.unwrap_or_else(|fault| panic!("{}: {fault}", case.problem));
    let before = initial(&case.problem, &program, &values);
    Trial::new(format!("{plan}, {}", case.name), Bits::Approximations, program, before, move |after| {
        judged(&case, &values, &outputs(&case.problem, after))?;
        check_max_logits(&case, &values, after)
    })
}
