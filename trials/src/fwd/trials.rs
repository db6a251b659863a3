//! Problems for the forward kernels: the features of which their code is made, each with each.

use std::collections::HashSet;

use fa3_sched::forward::{CtaTile, Loads, PlanOptions, Precision, TileRow};
use fa3_sched::{Longest, Order, Scheduler};
use fa3_types::{Dtype, Mask, ProblemSpec};

use super::scores::Scores;
use super::shapes::{INPUTS, PIPELINES, dealt, dtype, laid_out, others};
use super::{Launch, Layout, dense, device, initial, judged, results, with_tile};
use super::{fp8, listed};
use crate::family::{Bits, Trial};
use crate::{Case, Dist, Poison, Values, chunks, covering};

/// (consumer warpgroups, whether they take turns).
pub(super) const CONSUMERS: [(u32, bool); 5] = [(1, false), (2, false), (2, true), (3, false), (3, true)];
const LOADS: [Loads; 2] = [Loads::Producer, Loads::Consumers];
/// Slots for K and V: each in turn, two in flight, more than are in flight.
const STAGES: [u32; 3] = [1, 2, 3];
/// Keys of a block: those of one step of PV, and of two and of three.
const KEYS: [u32; 3] = [16, 32, 48];
/// Columns of Q and K, and of V and O: one panel of 64, one and a half, several of either.
const COLUMNS: [(u32, u32); 4] = [(64, 64), (96, 96), (192, 64), (64, 128)];
/// Columns that the problem has fewer than the tile.
const PADDING: [u32; 3] = [0, 8, 24];
pub(super) const MASKS: [Mask; 6] = [
    Mask::None,
    Mask::Causal,
    Mask::Window { left: Some(37), right: Some(21) },
    Mask::Window { left: Some(50), right: None },
    Mask::Window { left: None, right: Some(13) },
    chunks(45, Some(0)),
];
pub(super) const SCHEDULERS: [Scheduler; 3] =
    [Scheduler::OneTile, Scheduler::StaticPersistent, Scheduler::DynamicPersistent];
pub(super) const SOFTCAPS: [Option<f64>; 2] = [None, Some(3.0)];
/// Whether query heads have sinks.
pub(super) const SINKS: [bool; 2] = [false, true];
const DTYPES: [Dtype; 2] = [Dtype::F16, Dtype::Bf16];
pub(super) const ORDERS: [Order; 3] = [
    Order::Linear,
    Order::LongestFirst { section: 2, longest: Longest::First },
    Order::LongestFirst { section: 1, longest: Longest::Last },
];
/// (sequences, query heads, key/value heads): alone, of one, of groups that are no power of two. Many heads need not
/// have many rows.
pub(super) const HEADS: [(usize, usize, usize); 4] = [(2, 1, 1), (1, 3, 1), (1, 6, 2), (1, 5, 5)];
const DISTS: [Dist; 4] = [Dist::Normal, Dist::Increasing, Dist::Decreasing, Dist::OneHot];

/// Lengths of Q and of K, in terms of a tile of m x n.
pub(super) type Lengths = fn(usize, usize) -> (usize, usize);

/// One of each; one query and several blocks; just less and more than tiles; rows without keys under a causal mask.
pub(super) const LENGTHS: [Lengths; 5] = [
    |_, _| (1, 1),
    |_, n| (1, 3 * n + 7),
    |m, n| (m - 3, 2 * n + 1),
    |m, n| (m + 9, 3 * n + n / 2),
    |m, _| (m + 30, 29),
];

/// How many factors are features of a kernel's code. Three levels of them meet, of the others two.
const FEATURES: usize = 10;

/// Levels of all factors, those of the kernel's code first.
const LEVELS: [usize; 17] = [
    PIPELINES.len(),
    CONSUMERS.len(),
    MASKS.len(),
    COLUMNS.len(),
    STAGES.len(),
    KEYS.len(),
    SCHEDULERS.len(),
    LOADS.len(),
    SOFTCAPS.len(),
    DTYPES.len(),
    HEADS.len(),
    Layout::ALL.len(),
    ORDERS.len(),
    LENGTHS.len(),
    DISTS.len(),
    PADDING.len(),
    SINKS.len(),
];

/// Levels of the same factors for kernels that run in clusters: those have no mask, static persistent CTAs, a producer,
/// linear order, and an even number of tiles a head, as the last two lengths of few heads give it.
const PAIRED: [usize; 17] = {
    let mut levels = LEVELS;
    [levels[MASK], levels[SCHEDULER], levels[LOADING], levels[ORDER]] = [1; 4];
    [levels[HEAD_COUNTS], levels[LENGTH]] = [2; 2];
    levels
};

/// Head dimensions and element types of problems with scores of every kind.
const HEAD_DIMS: [usize; 3] = [64, 128, 256];
const DTYPES_WITH_FP8: [Dtype; 3] = [Dtype::F16, Dtype::Bf16, Dtype::E4m3];

/// Levels of kinds of scores, head dimensions, element types and two masks, each of which meets each of the others.
const SCORES: [usize; 4] = [Scores::ALL.len(), HEAD_DIMS.len(), DTYPES_WITH_FP8.len(), 2];

/// The places of those factors in [`LEVELS`].
const MASK: usize = 2;
const SCHEDULER: usize = 6;
const LOADING: usize = 7;
const HEAD_COUNTS: usize = 10;
const ORDER: usize = 12;
const LENGTH: usize = 13;

/// The covering arrays of features, every tile of the table, and scores of every kind.
pub(super) fn trials(seed: u64) -> Vec<Trial> {
    let mut trials: Vec<Trial> =
        covering(&LEVELS, FEATURES).iter().map(|row| of_features(row, 3, seed)).collect();
    trials.extend(paired(seed));
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
    trials.extend(covering(&SCORES, 0).into_iter().map(|row| {
        let [scores, head_dim, dtype, mask] = [row[0], row[1], row[2], row[3]];
        let spec = dense(DTYPES_WITH_FP8[dtype], 1, (130, 1500), (1, 1), HEAD_DIMS[head_dim]);
        of_scores(Scores::ALL[scores], spec.mask([Mask::None, Mask::Causal][mask]), seed)
    }));
    trials
}

/// Kernels that run in clusters of two, on two SMs.
fn paired(seed: u64) -> impl Iterator<Item = Trial> {
    covering(&PAIRED, 0).into_iter().map(move |mut row| {
        // Static persistent CTAs; the last two lengths.
        row[SCHEDULER] = 1;
        row[LENGTH] += LENGTHS.len() - 2;
        in_pairs(of_features(&row, 2, seed))
    })
}

/// The trial, whose kernel runs in clusters of two.
fn in_pairs(trial: Trial) -> Trial {
    assert_eq!(trial.program.steps[0].kernel.launch.cluster, 2, "{} runs in clusters", trial.name);
    trial
}

/// A trial with these levels, on so many SMs.
fn of_features(row: &[usize], sms: u32, seed: u64) -> Trial {
    let &[pipeline, consumers, mask, columns, stages, keys, scheduler, loads, softcap, dtype, ref rest @ ..] =
        row
    else {
        unreachable!("a row has a level for each feature");
    };
    let &[heads, layout, order, lengths, dist, padding, sink] = rest else {
        unreachable!("a row has a level for each factor");
    };
    let (pipeline, (consumers, ping_pong)) = (PIPELINES[pipeline], CONSUMERS[consumers]);
    let (head_dim, head_dim_v) = COLUMNS[columns];
    let shape = CtaTile {
        head_dim,
        head_dim_v,
        qv: false,
        tile_m: 64 * consumers,
        tile_n: KEYS[keys],
        stages: STAGES[stages],
        consumers,
        loads: LOADS[loads],
        pipeline,
        ping_pong,
        precision: Precision::Half,
    };
    let (seqlen_q, seqlen_k) = LENGTHS[lengths](shape.tile_m as usize, shape.tile_n as usize);
    let (batch, heads_q, heads_kv) = HEADS[heads];
    // More than four heads need not have several tiles of rows each.
    let seqlen_q = if heads_q > 4 { seqlen_q.min(shape.tile_m as usize - 1) } else { seqlen_q };
    let columns = |columns: u32| (columns - PADDING[padding]) as usize;
    let spec = dense(DTYPES[dtype], batch, (seqlen_q, seqlen_k), (heads_q, heads_kv), columns(head_dim));
    let mut spec = spec.head_dim_v(columns(head_dim_v)).mask(MASKS[mask]);
    (spec.softcap, spec.sink) = (SOFTCAPS[softcap], SINKS[sink]);
    let problem = Layout::ALL[layout].of(spec).known().expect("all levels are valid");
    let scheduler = dealt(&shape, SCHEDULERS[scheduler]);
    let options = with_tile(shape).order(ORDERS[order]).scheduler(scheduler).clusters(true);
    let name = format!("{:?}, {:?}", Layout::ALL[layout], DISTS[dist]);
    let case = Case { name, problem, dist: DISTS[dist], poison: Poison::None, seed };
    trial(case, sms, &options)
}

/// A tile of the table on two tiles of rows and three blocks of keys.
fn of_table(shape: CtaTile, seed: u64) -> Trial {
    let lengths = (shape.tile_m as usize + 9, 2 * shape.tile_n as usize + 5);
    let spec = dense(dtype(&shape), 1, lengths, (1, 1), shape.head_dim as usize);
    let spec = laid_out(&shape, spec.head_dim_v(shape.head_dim_v as usize));
    let problem = spec.causal().known();
    let problem = problem.expect("a tile's own head dimensions are valid");
    trial(Case::normal("a tile of the table", problem, seed), 3, &with_tile(shape))
}

/// Many blocks of keys whose scores are like this, in the table's tile.
fn of_scores(scores: Scores, spec: ProblemSpec, seed: u64) -> Trial {
    let problem = spec.known().expect("the lengths and dimensions are valid");
    let case = Case::normal(&format!("{scores:?}"), problem, seed);
    let values = scores.values(case.values(), &case.problem);
    trial_of(case, values, 3, &PlanOptions::default())
}

/// Tiles of every kind with several blocks and tiles of rows; some of them in clusters, too.
pub(super) fn small() -> Vec<Trial> {
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
        // Three tiles a head, of which one of each makes a pair.
        let rows = 2 * shape.tile_m as usize + 5;
        in_pairs(of_two_heads(&shape, rows, Mask::None, 2, &options))
    });
    small.chain(pairs).chain(fp8::small()).chain(listed::small()).collect()
}

/// Two heads of Q with so many rows, on one of K and V with several blocks.
fn of_two_heads(shape: &CtaTile, rows: usize, mask: Mask, sms: u32, options: &PlanOptions) -> Trial {
    let lengths = (rows, 3 * shape.tile_n as usize + 9);
    let spec = dense(Dtype::Bf16, 1, lengths, (2, 1), shape.head_dim as usize);
    let problem = spec.head_dim_v(shape.head_dim_v as usize).mask(mask).known();
    let case = Case::normal("small", problem.expect("a tile's own head dimensions are valid"), 4);
    trial(case, sms, options)
}

/// The case on a device of so many SMs.
pub(super) fn trial(case: Case, sms: u32, options: &PlanOptions) -> Trial {
    let values = case.values();
    trial_of(case, values, sms, options)
}

/// The case with these values, on a device of so many SMs.
fn trial_of(case: Case, values: Values, sms: u32, options: &PlanOptions) -> Trial {
    let launch = Launch::new(&case.problem, &device(sms), options);
    let Launch { plan, program, .. } = launch.unwrap_or_else(|fault| panic!("{}: {fault}", case.problem));
    Trial {
        name: format!("{plan}, {}", case.name),
        before: initial(&case.problem, &program, &values),
        program: program.clone(),
        bits: Bits::Approximations,
        judge: Box::new(move |_, after| {
            let answer = results(&case.problem, &program, after).map_err(|fault| fault.to_string())?;
            judged(&case, &values, &answer).map(|_| ())
        }),
    }
}
