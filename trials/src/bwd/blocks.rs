//! Gradients under lists of blocks: a covering array of lists and kernel features.

use fa3_sched::backward::{DqTile, PlanOptions};
use fa3_types::BlockSide::{self, Of64, Of128};
use fa3_types::{Dtype, Mask};

use super::BwdCase;
use super::equivalent::{ADDING, DQ, FENCES, KEYS, NEXT_NUMBER};
use super::intervals::DIVISIONS;
use super::random::SLACK;
use super::trials::{DTYPES, Divided, SINKS, SOFTCAPS, tiles, tiny};
use crate::fwd::blocks::Listed;
use crate::fwd::intervals::OWN;
use crate::fwd::{Layout, dense, device};
use crate::mutate::{ASKED, Equivalent, Target, UNASKED};
use crate::values::Rng;
use crate::{Case, Levels, Trial, covering_cases};

const LISTED: [Listed; 3] = [Listed::Last, Listed::Diagonal, Listed::Some];
const MASKS: [Mask; 3] = [Mask::None, Mask::Causal, Mask::Window { left: Some(150), right: Some(21) }];

/// Divisions, and the sides of blocks that they take. The last ones have a list for each consumer.
const SIDES: [(Divided, BlockSide); 7] = [
    (DIVISIONS[0], Of128),
    (DIVISIONS[1], Of128),
    (DIVISIONS[2], Of128),
    (DIVISIONS[3], Of128),
    (DIVISIONS[4], Of128),
    (DIVISIONS[1], Of64),
    (DIVISIONS[3], Of64),
];

/// The covering array, and cases with the tile sizes that the planner chooses.
pub(crate) fn trials(seed: u64) -> Vec<Trial> {
    // The third case has more blocks of rows than a warp has lanes.
    let chosen = [
        (64, false, (140, 150), Of128),
        (128, true, (130, 140), Of128),
        (8, true, (4110, 10), Of128),
        (64, false, (140, 150), Of64),
        (128, true, (130, 140), Of64),
    ];
    let chosen = chosen.map(|(head_dim, deterministic, lengths, side)| {
        let spec = dense(Dtype::Bf16, 1, lengths, (1, 1), head_dim);
        let case = Case::normal("chosen tiles", Listed::Some.of_side(side, spec, (false, true)), seed);
        let options = PlanOptions::default();
        let options = if deterministic { options.deterministic() } else { options };
        BwdCase { case, layout: Layout::Contiguous, dlse: true, slack: 1.0 }.trial(&device(2), &options)
    });
    covering_cases(|levels| of_features(levels, seed)).into_iter().chain(chosen).collect()
}

fn of_features(levels: &mut Levels, seed: u64) -> Trial {
    let (listed, (division, side)) = (levels.pick(&LISTED), levels.pick(&SIDES));
    let lengths = levels.pick(&[(1, 400), (260, 150)]);
    let ((batch, heads_q, heads_kv), own) = (levels.pick(&[(2, 2, 1), (1, 1, 1)]), levels.pick(&OWN));
    // Rows of a block of the dK/dV kernel; rows of a dQ tile and keys of its blocks.
    let (rows, dq) = (levels.pick(&[16, 64]), levels.pick(&[(64, 64), (128, 32)]));
    let (softcap, dtype, sink) = (levels.pick(&SOFTCAPS), levels.pick(&DTYPES), levels.pick(&SINKS));
    let (sms, mask, layout) = (levels.pick(&[2, 100]), levels.pick(&MASKS), levels.pick(&Layout::ALL));
    let options = tiles(division, (2, [2, 1]), dq, rows, [64, 64]);
    let mut spec = dense(dtype, batch, lengths, (heads_q, heads_kv), 64).mask(mask);
    (spec.softcap, spec.sink) = (softcap, sink);
    let problem = listed.of_side(side, layout.of(spec), own);
    let case = Case::normal(&format!("{listed:?}, {mask}"), problem, seed);
    BwdCase { case, layout, dlse: dtype == DTYPES[0], slack: 1.0 }.trial(&device(sms), &options)
}

/// A random problem with the tile sizes that the planner chooses. Seeds that are equal modulo `kernels` share their
/// kernels, so that many problems need few of them.
///
/// # Panics
/// If the planner refuses the problem.
pub fn random(seed: u64, kernels: u64) -> Trial {
    let (mut of_kernel, mut rng) = (Rng::new((seed % kernels) ^ 0xb10b), Rng::new(seed ^ 0xb10b << 32));
    let dims = [(64, 64), (128, 128), (96, 96), (192, 128), (40, 72), (256, 256)];
    let (head_dim, head_dim_v) = dims[of_kernel.below(6)];
    let (mask, softcap) = (MASKS[of_kernel.below(3)], SOFTCAPS[of_kernel.below(2)]);
    let (dtype, sink) = (DTYPES[of_kernel.below(2)], SINKS[of_kernel.below(2)]);
    let options = PlanOptions::default();
    let options = if of_kernel.below(2) == 0 { options.deterministic() } else { options };
    let (batch, heads_kv, group) = (1 + rng.below(2), 1 + rng.below(2), 1 + rng.below(3));
    let most = if rng.below(5) == 0 { 6000 } else { 700 };
    let lengths = (32 + rng.below(most), 32 + rng.below(700));
    let spec = dense(dtype, batch, lengths, (heads_kv * group, heads_kv), head_dim);
    let [layout, of_gradients] = [0, 0].map(|_| Layout::ALL[rng.below(4)]);
    let mut spec = layout.of(spec.head_dim_v(head_dim_v).mask(mask));
    (spec.softcap, spec.sink) = (softcap, sink);
    let side = [Of64, Of128][of_kernel.below(2)];
    let problem = Listed::Random(seed).of_side(side, spec, OWN[rng.below(3)]);
    let case = Case::normal(&format!("random {seed}"), problem, seed);
    let dlse = rng.below(2) == 0;
    BwdCase { case, layout: of_gradients, dlse, slack: SLACK }.trial(&device(132), &options)
}

/// Kernels with and without dQ additions, with several tiles per CTA. No row lists the keys of some tiles.
pub(crate) fn small() -> Vec<Trial> {
    let trials = [
        (SIDES[1], Listed::Some),
        (SIDES[3], Listed::First),
        (SIDES[4], Listed::Last),
        (SIDES[5], Listed::Some),
        (SIDES[6], Listed::Diagonal),
    ];
    trials.map(|(division, listed)| tiny_trial(division, listed, (200, 300), (2, 1))).into()
}

/// The kernels that find listed blocks of rows, and kernels whose consumers have lists of their own.
///
/// # Panics
/// If a kernel cannot be built.
pub(crate) fn targets() -> Vec<Target> {
    let target = |name, division, (heads, problems): (_, [_; 3]), step, equivalent| {
        let trials = problems.map(|(listed, lengths)| tiny_trial(division, listed, lengths, heads));
        Target::of_step(name, &trials, step, equivalent).also_noticed(UNASKED)
    };
    let problems = [(Listed::Some, (300, 200)), (Listed::Last, (150, 400)), (Listed::Diagonal, (300, 300))];
    let small = [(Listed::Some, (160, 150)), (Listed::All, (280, 150)), (Listed::Last, (150, 300))];
    let one = target("bwd dkv, listed blocks", SIDES[1], ((6, 3), problems), 1, KEYS);
    let own = target("bwd dkv, adding, a list for each consumer", SIDES[6], ((2, 1), small), 1, ADDING);
    let of_dq = target("bwd dq, a list for each consumer", SIDES[5], ((2, 1), small), 2, DQ);
    vec![
        one.with("number", COLUMN).also_equivalent(SAME),
        own.also_equivalent(OWN_ADDING).also_equivalent(ASKED),
        of_dq.also_equivalent(OWN_DQ),
    ]
}

/// The file that finds listed blocks of rows.
const COLUMN: &[&str] = &["parts/block_column.rs"];

/// Equivalent mutants of these lines.
const SAME: &[Equivalent] = &[
    ("wgmma.fence", 3, FENCES),
    (
        "number: shuffle leaves each lane its own",
        4,
        "all lanes of the warp have the same number, and the shuffle tells the compiler so",
    ),
    (
        "number: select, min or max gives the first",
        1,
        "without a mask the blocks of a tile begin with the first",
    ),
    (
        "number: select, min or max gives the second",
        1,
        "one block of rows at the end is not full, and so the last",
    ),
];

/// Further equivalent mutants of consumers that add dQ, if each has its own list.
const OWN_ADDING: &[Equivalent] = &[
    ("empty wait: deleted", 1, PASSED),
    ("mbarrier: full for empty, or empty for full", 2, PASSED),
    ("further product overwrites", 3, "it is the first product of a block's dQ, before which dQ is 0"),
];

const PASSED: &str = "a block's rows are loaded once both consumers have given back the rows of two blocks before, \
                      behind dS, and dS of a block that is passed over is not stored";

/// Further equivalent mutants of the dQ kernel, if each consumer has its own list.
const OWN_DQ: &[Equivalent] = &[
    ("further product overwrites", 1, "it is the first product of a tile's last keys, before which dQ is 0"),
    ("bar.warp.sync: after the arrival", 1, NEXT_NUMBER),
];

/// A problem with the smallest tiles that divide listed blocks.
fn tiny_trial(
    (division, side): (Divided, BlockSide),
    listed: Listed,
    lengths: (usize, usize),
    heads: (usize, usize),
) -> Trial {
    let (case, options) = tiny(division, [2, 2, 1], Mask::None, lengths, heads);
    // Two consumers, which have lists of their own if blocks have 64 rows.
    let options = options.dq.map_or(options, |tile| options.dq(DqTile { tile_m: 128, ..tile }));
    let problem = listed.of_side(side, dense(Dtype::Bf16, 1, lengths, heads, 64), (false, true));
    BwdCase { case: Case::normal("small", problem, 4), ..case }.trial(&device(1), &options)
}
