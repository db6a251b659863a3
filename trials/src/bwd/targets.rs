//! Mutation targets of the backward pass, each on small problems with several tiles for a CTA and more blocks than
//! there are stages.

use fa3_cuda::kernels::bwd::buffers;
use fa3_sched::backward::{ADDED_ROWS, AddOrder, Division};
use fa3_sim::Rule;
use fa3_types::{Dtype, Mask};

use super::equivalent::{
    ADDING, BUSY_HALVES, CLEARED, DIVIDED, DQ, HALVES, IDLE_HALVES, IN_ORDER, KEYS, LISTED, NUMBERS, ROUND,
    SINK, STATS,
};
use super::listed;
use super::trials::{Divided, tiny, with_sinks};
use crate::Case;
use crate::Trial;
use crate::fwd::{dense, device};
use crate::mutate::Target;

/// The kernel of the statistics, with what it clears, the one that rounds sums, the dQ kernel, that of dsink, and the
/// dK/dV kernel.
///
/// # Panics
/// If one cannot be built.
pub(crate) fn targets() -> Vec<Target> {
    let (in_order, sums) = (stats(AddOrder::LastKeysFirst), stats(AddOrder::Any));
    let beside = (64, Division::Keys, None);
    let dq = [(90, 60), (70, 110), (20, 10)].map(|lengths| trial(beside, Mask::Causal, lengths, (2, 1), 1));
    vec![
        Target::of_step("bwd stats", &in_order, 0, STATS).also_equivalent(CLEARED).with_bounds(),
        Target::of_step("bwd stats, sums", &sums, 0, STATS).with_bounds(),
        Target::of_step("bwd round", &sums, 2, ROUND).with_bounds(),
        Target::of_step("bwd dq", &dq, 2, DQ),
        Target::of_step("bwd sink", &SINKS.map(with_sinks), 2, SINK).with_bounds(),
        Target::of_step("bwd sink, listed", &SINKS.map(listed::with_sinks), 4, SINK).with_bounds(),
        keys(),
        divided(),
        adding(),
        adding_in_order(),
        halves(),
        halves_in_order(),
        Target::of_step("bwd stats, listed", &listed(), 2, STATS),
        Target::of_step("bwd dkv, listed", &listed(), 3, KEYS).also_equivalent(LISTED),
    ]
}

/// Packed sequences, some of which have no rows or no keys, with a kernel of dQ. Bounds that are off by one are not
/// among their mutants: the trials compare gradients of rows that are in use, not in use, and nobody's.
fn listed() -> Vec<Trial> {
    let division = (128, Division::Keys, None);
    let lengths: [&[(usize, usize)]; 2] =
        [&[(44, 300), (0, 40), (10, 520)], &[(33, 20), (20, 0), (81, 150), (1, 1)]];
    lengths.map(|lengths| listed::tiny(division, Mask::None, lengths, 1)).into()
}

/// Sequences, and rows and keys of each: more blocks than a CTA has warps; a block that is not full after one that is.
const SINKS: [(usize, (usize, usize)); 2] = [(34, (3, 5)), (1, (70, 5))];

fn keys() -> Target {
    let division = (128, Division::Keys, None);
    let trials = [(44, 300), (10, 520)].map(|lengths| trial(division, Mask::None, lengths, (1, 1), 1));
    Target::of_step("bwd dkv, keys", &trials, 1, KEYS)
}

fn divided() -> Target {
    let division = (64, Division::Gradients, None);
    let trials = [(44, 120), (30, 130)].map(|lengths| trial(division, Mask::None, lengths, (2, 1), 1));
    Target::of_step("bwd dkv, divided", &trials, 1, DIVIDED)
}

fn adding() -> Target {
    let division = adds(ADDED_ROWS, AddOrder::Any);
    let trials = [(70, 256), (250, 140)].map(|lengths| trial(division, Mask::None, lengths, (1, 1), 1));
    Target::of_step("bwd dkv, adding", &trials, 1, ADDING).also_noticed(EMPTY_SLOTS)
}

fn adding_in_order() -> Target {
    let trial = |(lengths, left, heads, sms)| {
        trial(adds(ADDED_ROWS, AddOrder::LastKeysFirst), window(left), lengths, (heads, 1), sms)
    };
    // The last one has two CTAs, and tiles that add to some rows and write dQ of others.
    let problems = [((70, 100), 98, 1, 1), ((250, 140), 138, 1, 1), ((188, 300), 50, 2, 2)];
    let target = Target::of_step("bwd dkv, adding in order", &problems.map(trial), 1, ADDING);
    target.also_equivalent(IN_ORDER).also_equivalent(NUMBERS).also_noticed(EMPTY_SLOTS).also_noticed(READY)
}

fn halves() -> Target {
    let division = adds(2 * ADDED_ROWS, AddOrder::Any);
    let problems = [(100, 600), (128, 512), (400, 200)];
    let trials = problems.map(|lengths| trial(division, Mask::None, lengths, (1, 1), 1));
    let target = Target::of_step("bwd dkv, halves", &trials, 1, HALVES);
    target.also_equivalent(BUSY_HALVES).also_equivalent(NUMBERS).also_noticed(EMPTY_SLOTS)
}

fn halves_in_order() -> Target {
    let trial = |(lengths, left, heads, sms)| {
        trial(adds(2 * ADDED_ROWS, AddOrder::LastKeysFirst), window(left), lengths, (heads, heads), sms)
    };
    let problems = [
        ((130, 100), 98, 1, 1),
        // No row sees the last tile. A CTA may have it right after the first, which adds: which one has it, is left to
        // the schedule.
        ((100, 384), 40, 1, 2),
        ((100, 384), 40, 2, 2),
        ((100, 384), 40, 3, 2),
        // After such a tile come those of two more heads.
        ((130, 384), 126, 3, 1),
        // Tiles add to some rows and write dQ of others; CTAs wait for each other.
        ((400, 300), 50, 1, 2),
        ((400, 300), 50, 2, 3),
        ((188, 300), 50, 2, 2),
    ];
    let target = Target::of_step("bwd dkv, halves in order", &problems.map(trial), 1, HALVES);
    target
        .also_equivalent(IDLE_HALVES)
        .also_equivalent(IN_ORDER)
        .also_noticed(EMPTY_SLOTS)
        .also_noticed(READY)
}

fn adds(rows: u32, order: AddOrder) -> Divided {
    (128, Division::Keys, Some((rows, order)))
}

/// Rows see so many keys before their own position, and all after it: rows at the end see the fewest.
fn window(left: u32) -> Mask {
    Mask::window(Some(left), None)
}

fn trial(division: Divided, mask: Mask, lengths: (usize, usize), heads: (usize, usize), sms: u32) -> Trial {
    let (case, options) = tiny(division, [2, 2, 1], mask, lengths, heads);
    case.trial(&device(sms), &options)
}

/// Problems for the kernels that go through rows. The last row is in each of the four rows of a thread, and in both
/// halves of a fragment. The number of rows is odd, so that the last pair has one more; without dLSE it is even.
fn stats(order: AddOrder) -> Vec<Trial> {
    let trial = |lengths| {
        let (mut tiny, options) = tiny(adds(ADDED_ROWS, order), [2, 2, 1], Mask::Causal, lengths, (2, 1));
        // So few columns that some lanes have none.
        let problem = dense(Dtype::Bf16, 1, lengths, (2, 1), 40).causal().known();
        tiny.case = Case::normal("few columns", problem.expect("the lengths are valid"), 4);
        tiny.trial(&device(1), &options)
    };
    // The first rows see no key. No tile visits the first blocks of them.
    let mut trials: Vec<Trial> = [(133, 20), (155, 20), (169, 20), (181, 20)].map(trial).into();
    if order == AddOrder::LastKeysFirst {
        // There are no keys, and no tiles.
        trials.extend([1, 5, 21, 37, 53].map(|rows| trial((rows, 0))));
    }
    // Every row sees a key: where none is seen, dLSE does not matter.
    let mut without_dlse = trial((64, 64));
    without_dlse.before[buffers::DLSE.0].clear();
    trials.push(without_dlse);
    trials
}

/// Mbarriers notice who does not wait for a slot without tiles, or of which nobody reads the tile. Named barriers
/// notice who does not wait for a turn. Memory does not.
const EMPTY_SLOTS: &[(&str, &[Rule])] = &[
    ("full wait: deleted", &[Rule::M4, Rule::Deadlock]),
    ("full wait: after the first read", &[Rule::M4, Rule::Deadlock]),
    ("barrier after products: deleted", &[Rule::B2, Rule::Deadlock]),
];

/// Who does not wait for a turn to add overtakes another CTA's copy.
const READY: &[(&str, &[Rule])] =
    &[("full wait: deleted", &[Rule::T4]), ("full wait: after the first read", &[Rule::T4])];
