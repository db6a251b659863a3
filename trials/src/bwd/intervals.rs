//! Gradients under interval masks: a covering array of mask kinds and kernel features.

use fa3_sched::backward::{ADDED_ROWS, AddOrder, Division, PlanOptions};
use fa3_types::Dtype;

use super::BwdCase;
use super::trials::{BOUNDS, DTYPES, Divided, HEADS, SINKS, SOFTCAPS, tiles, tiny};
use crate::fwd::functions::{FUNCTIONS, function};
use crate::fwd::intervals::OWN;
use crate::fwd::listed::{self, GIVEN, Given, LAYOUTS, LENGTHS, few_of_many};
use crate::fwd::{Layout, dense, device};
use crate::intervals::Kind;
use crate::mutate::Target;
use crate::{Case, Dist, Levels, Poison, Trial, covering_cases};

/// Divisions of the work among consumers, as for other masks, but without deterministic dQ additions.
pub(super) const DIVISIONS: [Divided; 5] = [
    (64, Division::Keys, None),
    (128, Division::Keys, None),
    (64, Division::Gradients, None),
    (128, Division::Keys, Some((ADDED_ROWS, AddOrder::Any))),
    (128, Division::Keys, Some((2 * ADDED_ROWS, AddOrder::Any))),
];

/// A function whose exp(S) overflows in rows beyond the end, which have no LSE.
const LARGE: &str = "s + slope[h] * (k - q) + 150";

/// The covering array, and cases with the tile sizes that the planner chooses.
pub(crate) fn trials(seed: u64) -> Vec<Trial> {
    let chosen = [(64, false), (128, true), (256, false)].map(|(head_dim, deterministic)| {
        let spec = dense(Dtype::Bf16, 1, (250, 240), (2, 1), head_dim);
        let case = Case::normal("chosen tiles", Kind::SinkAndWindow.of(spec, false, true), seed);
        let options = PlanOptions::default();
        let options = if deterministic { options.deterministic() } else { options };
        BwdCase { case, layout: Layout::Contiguous, dlse: true, slack: 1.0 }.trial(&device(2), &options)
    });
    let of_sequences = covering_cases(|levels| of_sequences(levels, seed));
    let dense = covering_cases(|levels| of_features(levels, seed)).into_iter();
    dense.chain(of_sequences).chain(chosen).collect()
}

fn of_features(levels: &mut Levels, seed: u64) -> Trial {
    let (kind, division) = (levels.pick(Kind::WITH_GRADIENTS), levels.pick(&DIVISIONS));
    let lengths = levels.pick(&[(1, 150), (147, 9), (137, 200), (137, 90)]);
    let ((batch, heads_q, heads_kv), own) = (levels.pick(&HEADS), levels.pick(&OWN));
    // Rows of a block of the dK/dV kernel; rows of a dQ tile and keys of its blocks.
    let (rows, dq) = (levels.pick(&[16, 48]), levels.pick(&[(64, 48), (128, 16)]));
    let (softcap, dtype, sink) = (levels.pick(&SOFTCAPS), levels.pick(&DTYPES), levels.pick(&SINKS));
    // Fewer SMs than tiles, or enough SMs for each block of rows to be a split of its own.
    let (sms, mask) = (levels.pick(&[2, 100]), levels.pick(&BOUNDS));
    let text = levels.pick(&[None, Some(LARGE), Some(FUNCTIONS[2])]);
    let options = tiles(division, (2, [2, 1]), dq, rows, [64, 64]);
    let mut spec = dense(dtype, batch, lengths, (heads_q, heads_kv), 64).mask(mask);
    (spec.softcap, spec.sink) = (softcap, sink);
    let layout = Layout::ALL[kind as usize % Layout::ALL.len()];
    let problem = kind.of(layout.of(spec), own.0, own.1);
    let problem = match text {
        Some(text) => problem.with_score(&function(text)),
        None => problem,
    };
    let case = Case::normal(&format!("{kind:?}, {mask}"), problem, seed);
    BwdCase { case, layout, dlse: dtype == DTYPES[0], slack: 1.0 }.trial(&device(sms), &options)
}

/// Sequences whose lengths are data. Code that they share with dense ones is covered there.
fn of_sequences(levels: &mut Levels, seed: u64) -> Trial {
    let (kind, division, given) =
        (levels.pick(Kind::WITH_GRADIENTS), levels.pick(&DIVISIONS), levels.pick(&GIVEN));
    // Lengths around the size of a KV tile and of a block of rows.
    let (lengths, (_, heads_q, heads_kv)) = (levels.pick(&LENGTHS)(64, 64), levels.pick(&HEADS));
    let heads = few_of_many((heads_q, heads_kv), &lengths);
    let (own, layout, sink) = (levels.pick(&OWN), levels.pick(&LAYOUTS), levels.pick(&SINKS));
    // Rows of a block of the dK/dV kernel, which divide the rows of a dQ tile.
    let (rows, dq) = (levels.pick(&[16, 32]), levels.pick(&[(64, 48), (128, 16)]));
    let mask = levels.pick(&BOUNDS);
    let options = tiles(division, (2, [2, 1]), dq, rows, [64, 64]);
    let layout = given.layout(layout);
    let (spec, rows) = listed::spec(given, DTYPES[1], heads, 64, &lengths);
    let spec = layout.of(spec.mask(mask));
    let spec = if sink { spec.sink() } else { spec };
    let problem = kind.of_sequences(spec, rows, own.0, own.1);
    let name = format!("{kind:?}, {mask}, {given:?}");
    let case = Case { name, problem, dist: Dist::Normal, poison: Poison::BeyondEnd, seed };
    let of_gradients = given.layout(Layout::Contiguous);
    BwdCase { case, layout: of_gradients, dlse: sink, slack: 1.0 }.trial(&device(3), &options)
}

/// The kernels that find blocks of rows, that split tiles, and that reduce the splits. Some tiles have splits, some
/// have none, and the last tile is partial. The kernel with the matrix products also serves other masks, whose targets
/// test it.
///
/// # Panics
/// If a kernel cannot be built.
pub(crate) fn targets() -> Vec<Target> {
    let trials = [(2, Kind::SinkAndWindow), (3, Kind::Meeting), (5, Kind::Random)].map(|(sms, kind)| {
        let division = (64, Division::Keys, None);
        let lengths = (300, 200);
        let (case, options) = tiny(division, [2, 2, 1], fa3_types::Mask::None, lengths, (2, 1));
        let problem = kind.of(dense(Dtype::Bf16, 1, lengths, (2, 1), 64), false, true);
        BwdCase { case: Case::normal("split", problem, 4), ..case }.trial(&device(sms), &options)
    });
    vec![
        Target::of_step("bwd seeing", &trials, 1, &[]),
        Target::of_step("bwd splits", &trials, 2, &[]),
        Target::of_step("bwd join", &trials, 4, &[]),
    ]
}

/// Kernels with and without dQ additions, with several tiles per CTA. No row sees some of the tiles.
pub(crate) fn small() -> Vec<Trial> {
    let trials = [(DIVISIONS[1], Kind::Documents), (DIVISIONS[4], Kind::Holes)].map(|(division, kind)| {
        let (case, options) = tiny(division, [2, 2, 1], fa3_types::Mask::None, (200, 300), (2, 1));
        let problem = kind.of(dense(Dtype::Bf16, 1, (200, 300), (2, 1), 64), false, false);
        BwdCase { case: Case::normal("small", problem, 4), ..case }.trial(&device(1), &options)
    });
    let packed = [(DIVISIONS[1], Kind::Documents), (DIVISIONS[4], Kind::Holes)].map(|(division, kind)| {
        let options = tiles(division, (2, [2, 1]), (64, 48), 16, [64, 64]);
        let (spec, rows) = listed::spec(
            Given::PackedInPart,
            DTYPES[1],
            (2, 1),
            64,
            &[(100, 150), (0, 70), (70, 0), (130, 300)],
        );
        let case = Case::normal("small, packed", kind.of_sequences(spec, rows, false, true), 4);
        BwdCase { case, layout: Layout::Contiguous, dlse: true, slack: 1.0 }.trial(&device(1), &options)
    });
    trials.into_iter().chain(packed).collect()
}
