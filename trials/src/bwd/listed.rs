//! Problems whose lengths lie in device memory: packed sequences (varlen), and dense sequences with seqused.

use fa3_sched::backward::{ADDED_ROWS, AddOrder, Division};
use fa3_types::{Mask, ProblemSpec};

use super::BwdCase;
use super::trials::{BOUNDS, DISTS, DIVISIONS, DTYPES, Divided, HEADS, PADDING, SINKS, SOFTCAPS, tiles};
use crate::fwd::listed::{GIVEN, Given, LAYOUTS, LENGTHS, few_of_many, problem};
use crate::fwd::{Layout, device};
use crate::{Case, Levels, Poison, Trial, covering_cases};

/// Pipeline stages of Q and dO in the dK/dV kernel, and of K and V in the dQ kernel.
const STAGES: [(u32, [u32; 2]); 2] = [(1, [2, 1]), (2, [2, 2])];
/// Rows of a dQ tile, and keys of its blocks.
const DQ_TILES: [(u32, u32); 2] = [(64, 16), (128, 32)];
/// The covering array: each pair of levels of two factors occurs in some case.
pub(super) fn trials(seed: u64) -> Vec<Trial> {
    covering_cases(|levels| of_features(levels, seed))
}

fn of_features(levels: &mut Levels, seed: u64) -> Trial {
    let (division, mask, given) = (levels.pick(&DIVISIONS), levels.pick(&BOUNDS), levels.pick(&GIVEN));
    // Lengths around the size of a KV tile and of a block of rows.
    let (lengths, (_, heads_q, heads_kv)) = (levels.pick(&LENGTHS)(64, 64), levels.pick(&HEADS));
    let heads = few_of_many((heads_q, heads_kv), &lengths);
    let (layout, softcap) = (levels.pick(&LAYOUTS), levels.pick(&SOFTCAPS));
    let (dtype, dist, padding) = (levels.pick(&DTYPES), levels.pick(&DISTS), levels.pick(&PADDING));
    let (head_dim, head_dim_v) = levels.pick(&[(64, 64), (64, 32)]);
    let (stages, dq) = (levels.pick(&STAGES), levels.pick(&DQ_TILES));
    // Rows of a block of the dK/dV kernel if there is a dQ kernel. They divide the rows of a dQ tile.
    let (rows, sink) = (levels.pick(&[16, 32]), levels.pick(&SINKS));
    let options = tiles(division, stages, dq, rows, [head_dim, head_dim_v]);
    let of_gradients = if layout == Layout::Interleaved { Layout::HeadsFirst } else { Layout::Contiguous };
    let [layout, of_gradients] = [layout, of_gradients].map(|layout| given.layout(layout));
    let change = |spec: ProblemSpec| {
        let spec = spec.head_dim_v((head_dim_v - padding) as usize);
        let mut spec = layout.of(spec).mask(mask);
        (spec.softcap, spec.sink) = (softcap, sink);
        spec
    };
    let head_dim = (head_dim - padding) as usize;
    let problem = problem(given, dtype, heads, head_dim, &lengths, change);
    let name = format!("{given:?}, {layout:?}, {dist:?}");
    let case = Case { name, problem, dist, poison: Poison::BeyondEnd, seed };
    let dlse = padding != PADDING[1];
    BwdCase { case, layout: of_gradients, dlse, slack: 1.0 }.trial(&device(3), &options)
}

/// Problems with several tiles per CTA, to run under many schedules. Every other problem has sinks.
pub(super) fn small() -> Vec<Trial> {
    let masks = [Mask::None, Mask::Causal, Mask::Window { left: Some(40), right: Some(3) }];
    let trial = |(index, division): (usize, Divided)| {
        let options = tiles(division, STAGES[index % 2], DQ_TILES[0], 16, [64, 64]);
        let given = GIVEN[index % GIVEN.len()];
        let lengths = [(100, 150), (0, 70), (70, 0), (130, 300), (1, 1)];
        let change = |spec: ProblemSpec| {
            let spec = spec.mask(masks[index % 3]);
            if index % 2 == 0 { spec.sink() } else { spec }
        };
        let problem = problem(given, DTYPES[1], (2, 1), 64, &lengths, change);
        let name = format!("small, {given:?}");
        let case = Case { name, problem, dist: DISTS[0], poison: Poison::BeyondEnd, seed: 4 };
        let case = BwdCase { case, layout: Layout::Contiguous, dlse: true, slack: 1.0 };
        case.trial(&device(2), &options)
    };
    DIVISIONS.into_iter().enumerate().map(trial).collect()
}

/// Packed sequences of these lengths with the smallest tiles, on `sms` SMs.
pub(super) fn tiny(division: Divided, mask: Mask, lengths: &[(usize, usize)], sms: u32) -> Trial {
    let options = tiles(division, STAGES[1], DQ_TILES[0], 16, [64, 64]);
    let problem = problem(Given::PackedInPart, DTYPES[1], (2, 1), 64, lengths, |spec| spec.mask(mask));
    let case = Case { name: "small".to_owned(), problem, dist: DISTS[0], poison: Poison::BeyondEnd, seed: 4 };
    BwdCase { case, layout: Layout::Contiguous, dlse: true, slack: 1.0 }.trial(&device(sms), &options)
}

/// Two heads with sinks in `count` packed sequences. The dsink kernel is the fifth step, after the kernels that write
/// two tables.
pub(super) fn with_sinks((count, lengths): (usize, (usize, usize))) -> Trial {
    let division = (128, Division::Keys, Some((ADDED_ROWS, AddOrder::LastKeysFirst)));
    let change = |spec: ProblemSpec| spec.causal().sink();
    let problem = problem(Given::Packed, DTYPES[1], (2, 1), 64, &vec![lengths; count], change);
    let case = Case::normal("sinks", problem, 4);
    let options = tiles(division, STAGES[1], DQ_TILES[0], 16, [64, 64]);
    BwdCase { case, layout: Layout::Contiguous, dlse: true, slack: 1.0 }.trial(&device(2), &options)
}
