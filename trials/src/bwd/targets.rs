//! Mutation targets of the backward pass. Their problems are small, with several tiles per CTA and more blocks than
//! pipeline stages.

use fa3_cuda::kernels::bwd::buffers;
use fa3_sched::backward::{ADDED_ROWS, AddOrder, Division};
use fa3_sim::Rule;
use fa3_types::{Dtype, Mask};

use super::equivalent::{
    ADDING, BUSY_HALVES, CLEARED, DIVIDED, DQ, HALVES, IDLE_HALVES, IN_ORDER, KEYS, LISTED, NUMBERS, ROUND,
    SINK, STATS,
};
use super::trials::{Divided, tiny, with_sinks};
use super::{functions, listed};
use crate::Case;
use crate::Trial;
use crate::fwd::{dense, device};
use crate::mutate::Target;

/// The mutation targets: the preprocess kernel (with and without clearing dQ), the kernel that rounds dQ, the dQ
/// kernel, the dsink kernel and the dK/dV kernel.
///
/// # Panics
/// If a kernel cannot be built.
pub(crate) fn targets() -> Vec<Target> {
    let (in_order, sums) = (stats(AddOrder::LastKeysFirst), stats(AddOrder::Any));
    let beside = (64, Division::Keys, None);
    let dq = [(90, 60), (70, 110), (20, 10)].map(|lengths| trial(beside, Mask::Causal, lengths, (2, 1), 1));
    let mut targets = vec![
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
    ];
    targets.extend(functions::targets());
    targets
}

/// Packed sequences with a separate dQ kernel; some sequences have no rows or no keys. Operators on bounds are not
/// tried: the trials check gradients of valid rows, of rows beyond seqused, and of rows outside every sequence.
fn listed() -> Vec<Trial> {
    let division = (128, Division::Keys, None);
    let lengths: [&[(usize, usize)]; 2] =
        [&[(44, 300), (0, 40), (10, 520)], &[(33, 20), (20, 0), (81, 150), (1, 1)]];
    lengths.map(|lengths| listed::tiny(division, Mask::None, lengths, 1)).into()
}

/// Number of sequences, with the rows and keys of each. In the first problem a CTA has more blocks than warps. In the
/// second a partial block follows a full one.
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
    // The last problem has two CTAs, and tiles that add to dQ of some rows and store dQ of others.
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
        // No row sees the last tile. The CTA of the first tile, which adds to dQ, may get the last tile next: the
        // schedule decides.
        ((100, 384), 40, 1, 2),
        ((100, 384), 40, 2, 2),
        ((100, 384), 40, 3, 2),
        // Tiles of two more heads follow the tile that no row sees.
        ((130, 384), 126, 3, 1),
        // Tiles add to dQ of some rows and store dQ of others, and CTAs wait for each other.
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

/// A window of `left` keys before each row's position and all keys after it. The last rows see the fewest keys.
fn window(left: u32) -> Mask {
    Mask::window(Some(left), None)
}

fn trial(division: Divided, mask: Mask, lengths: (usize, usize), heads: (usize, usize), sms: u32) -> Trial {
    let (case, options) = tiny(division, [2, 2, 1], mask, lengths, heads);
    case.trial(&device(sms), &options)
}

/// Problems for kernels that iterate over rows. Over the problems, the last row falls on each of a thread's four rows
/// and on both halves of a fragment. With dLSE, numbers of rows are odd, so that the last pair is incomplete.
fn stats(order: AddOrder) -> Vec<Trial> {
    let trial = |lengths| {
        let (mut tiny, options) = tiny(adds(ADDED_ROWS, order), [2, 2, 1], Mask::Causal, lengths, (2, 1));
        // With 40 columns some lanes have no column.
        let problem = dense(Dtype::Bf16, 1, lengths, (2, 1), 40).causal().known();
        tiny.case = Case::normal("few columns", problem.expect("the lengths are valid"), 4);
        tiny.trial(&device(1), &options)
    };
    // The first rows see no key, and no tile visits their blocks.
    let mut trials: Vec<Trial> = [(133, 20), (155, 20), (169, 20), (181, 20)].map(trial).into();
    if order == AddOrder::LastKeysFirst {
        // There are no keys, and so no tiles.
        trials.extend([1, 5, 21, 37, 53].map(|rows| trial((rows, 0))));
    }
    // Every row sees a key: dLSE of a fully masked row is ignored.
    let mut without_dlse = trial((64, 64));
    without_dlse.before[buffers::DLSE.0].clear();
    trials.push(without_dlse);
    trials
}

/// A warp may skip the wait for a stage that carries no tile, or whose tile is not read: memory stays correct, and only
/// the mbarrier rules notice it. Only the named-barrier rules notice a warp that skips the wait for its turn.
const EMPTY_SLOTS: &[(&str, &[Rule])] = &[
    ("full wait: deleted", &[Rule::M4, Rule::Deadlock]),
    ("full wait: after the first read", &[Rule::M4, Rule::Deadlock]),
    ("barrier after products: deleted", &[Rule::B2, Rule::Deadlock]),
];

/// Rule T4 notices a CTA that does not wait for its turn to add, and so overtakes another CTA's copy.
const READY: &[(&str, &[Rule])] =
    &[("full wait: deleted", &[Rule::T4]), ("full wait: after the first read", &[Rule::T4])];
