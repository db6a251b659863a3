//! Gradients under lists of blocks: a covering array of lists and kernel features.

use fa3_sched::backward::PlanOptions;
use fa3_types::{Dtype, Mask};

use super::BwdCase;
use super::equivalent::{FENCES, KEYS};
use super::intervals::DIVISIONS;
use super::random::SLACK;
use super::trials::{DTYPES, Divided, SINKS, SOFTCAPS, tiles, tiny};
use crate::fwd::blocks::Listed;
use crate::fwd::intervals::OWN;
use crate::fwd::{Layout, dense, device};
use crate::mutate::{Equivalent, Target, UNASKED};
use crate::values::Rng;
use crate::{Case, Levels, Trial, covering_cases};

const LISTED: [Listed; 3] = [Listed::Last, Listed::Diagonal, Listed::Some];
const MASKS: [Mask; 3] = [Mask::None, Mask::Causal, Mask::Window { left: Some(150), right: Some(21) }];

/// The covering array, and cases with the tile sizes that the planner chooses.
pub(crate) fn trials(seed: u64) -> Vec<Trial> {
    // The last case has more blocks of rows than a warp has lanes.
    let chosen = [(64, false, (140, 150)), (128, true, (130, 140)), (8, true, (4110, 10))];
    let chosen = chosen.map(|(head_dim, deterministic, lengths)| {
        let spec = dense(Dtype::Bf16, 1, lengths, (1, 1), head_dim);
        let case = Case::normal("chosen tiles", Listed::Some.of(spec, (false, true)), seed);
        let options = PlanOptions::default();
        let options = if deterministic { options.deterministic() } else { options };
        BwdCase { case, layout: Layout::Contiguous, dlse: true, slack: 1.0 }.trial(&device(2), &options)
    });
    covering_cases(0, |levels| of_features(levels, seed)).into_iter().chain(chosen).collect()
}

fn of_features(levels: &mut Levels, seed: u64) -> Trial {
    let (listed, division) = (levels.pick(&LISTED), levels.pick(&DIVISIONS));
    let lengths = levels.pick(&[(1, 400), (260, 150)]);
    let ((batch, heads_q, heads_kv), own) = (levels.pick(&[(2, 2, 1), (1, 1, 1)]), levels.pick(&OWN));
    // Rows of a block of the dK/dV kernel; rows of a dQ tile and keys of its blocks.
    let (rows, dq) = (levels.pick(&[16, 64]), levels.pick(&[(64, 32), (128, 64)]));
    let (softcap, dtype, sink) = (levels.pick(&SOFTCAPS), levels.pick(&DTYPES), levels.pick(&SINKS));
    let (sms, mask, layout) = (levels.pick(&[2, 100]), levels.pick(&MASKS), levels.pick(&Layout::ALL));
    let options = tiles(division, (2, [2, 1]), dq, rows, [64, 64]);
    let mut spec = dense(dtype, batch, lengths, (heads_q, heads_kv), 64).mask(mask);
    (spec.softcap, spec.sink) = (softcap, sink);
    let case = Case::normal(&format!("{listed:?}, {mask}"), listed.of(layout.of(spec), own), seed);
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
    let problem = Listed::Random(seed).of(spec, OWN[rng.below(3)]);
    let case = Case::normal(&format!("random {seed}"), problem, seed);
    let dlse = rng.below(2) == 0;
    BwdCase { case, layout: of_gradients, dlse, slack: SLACK }.trial(&device(132), &options)
}

/// Kernels with and without dQ additions, with several tiles per CTA. No row lists the keys of some tiles.
pub(crate) fn small() -> Vec<Trial> {
    let trials = [(DIVISIONS[1], Listed::Some), (DIVISIONS[3], Listed::First), (DIVISIONS[4], Listed::Last)];
    trials.map(|(division, listed)| tiny_trial(division, listed, (200, 300), (2, 1))).into()
}

/// The kernel that finds listed blocks of rows.
///
/// # Panics
/// If the kernel cannot be built.
pub(crate) fn targets() -> Vec<Target> {
    let problems = [(Listed::Some, (300, 200)), (Listed::Last, (150, 400)), (Listed::Diagonal, (300, 300))];
    let trials = problems.map(|(listed, lengths)| tiny_trial(DIVISIONS[1], listed, lengths, (6, 3)));
    let target = Target::of_step("bwd dkv, listed blocks", &trials, 1, KEYS).with("number", COLUMN);
    vec![target.also_equivalent(SAME).also_noticed(UNASKED)]
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

/// A problem with the smallest tiles that divide listed blocks.
fn tiny_trial(division: Divided, listed: Listed, lengths: (usize, usize), heads: (usize, usize)) -> Trial {
    let (case, options) = tiny(division, [2, 2, 1], Mask::None, lengths, heads);
    let problem = listed.of(dense(Dtype::Bf16, 1, lengths, heads, 64), (false, true));
    BwdCase { case: Case::normal("small", problem, 4), ..case }.trial(&device(1), &options)
}
