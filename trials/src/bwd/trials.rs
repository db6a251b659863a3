//! Problems for the backward kernels: a covering array of the features of their code.

use fa3_sched::DeviceLimits;
use fa3_sched::backward::{ADDED_ROWS, AddOrder, Division, DkvTile, DqTile, PlanOptions};
use fa3_types::{Dtype, Mask};

use super::{BwdCase, functions, listed};
use crate::fwd::{Layout, dense, device};
use crate::{Case, Dist, Levels, Poison, Trial, chunks, covering_cases};

/// A dK/dV tile: its number of keys and the dimension that its warpgroups split. If it adds to dQ, also the rows of a
/// block and the order of additions.
pub(super) type Divided = (u32, Division, Option<(u32, AddOrder)>);

pub(super) const DIVISIONS: [Divided; 7] = [
    (64, Division::Keys, None),
    (128, Division::Keys, None),
    (64, Division::Gradients, None),
    (128, Division::Keys, Some((ADDED_ROWS, AddOrder::Any))),
    (128, Division::Keys, Some((2 * ADDED_ROWS, AddOrder::Any))),
    (128, Division::Keys, Some((ADDED_ROWS, AddOrder::LastKeysFirst))),
    (128, Division::Keys, Some((2 * ADDED_ROWS, AddOrder::LastKeysFirst))),
];
/// Pipeline stages of Q and dO in the dK/dV kernel, then of K and V in the dQ kernel. The dK/dV kernel has as many
/// stages of KV tiles as the dQ kernel has of V.
const STAGES: [(u32, [u32; 2]); 3] = [(1, [2, 1]), (2, [2, 2]), (3, [3, 2])];
/// Number of columns by which the problem's head dimension is smaller than the tile's.
pub(super) const PADDING: [u32; 3] = [0, 8, 24];
/// Masks that bound the left side, the right side, or both, by small and by large numbers.
pub(super) const MASKS: [Mask; 6] = [
    Mask::None,
    Mask::Causal,
    Mask::Window { left: Some(37), right: Some(21) },
    Mask::Window { left: Some(50), right: None },
    Mask::Window { left: None, right: Some(13) },
    chunks(45, Some(20)),
];
/// Some of [`MASKS`], for kernels that share the code of masks with others: no bound, a bound on one side, bounds on
/// both sides, and chunks.
pub(super) const BOUNDS: [Mask; 4] = [MASKS[0], MASKS[1], MASKS[2], MASKS[5]];
pub(super) const SOFTCAPS: [Option<f64>; 2] = [None, Some(3.0)];
pub(super) const DTYPES: [Dtype; 2] = [Dtype::F16, Dtype::Bf16];
/// (sequences, query heads, key/value heads).
pub(super) const HEADS: [(usize, usize, usize); 4] = [(2, 1, 1), (1, 3, 1), (1, 4, 2), (1, 3, 3)];
/// Whether query heads have sinks.
pub(super) const SINKS: [bool; 2] = [false, true];
/// Distribution of the scores.
pub(super) const DISTS: [Dist; 4] = [Dist::Normal, Dist::Increasing, Dist::Decreasing, Dist::Low];
/// The covering array of features, and cases with the tile sizes that the planner chooses.
pub(crate) fn trials(seed: u64) -> Vec<Trial> {
    let features = covering_cases(|levels| of_features(levels, seed)).into_iter();
    let chosen = [(64, 64), (128, 128), (256, 256), (192, 128), (40, 72)];
    let chosen = chosen.into_iter().flat_map(|dims| {
        let adding = [AddOrder::Any, AddOrder::LastKeysFirst].map(|order| {
            let dims = [dims.0 as u32, dims.1 as u32];
            let tile = DkvTile::choose_adding(dims, order, &DeviceLimits::h100_sxm());
            tile.map(|tile| PlanOptions::default().dkv(tile))
        });
        let ways = [Some(PlanOptions::default())].into_iter().chain(adding);
        ways.flatten().map(move |options| of_choice(dims, &options, seed))
    });
    features.chain(chosen).chain(listed::trials(seed)).chain(functions::trials(seed)).collect()
}

/// A trial of a tile and a problem. The factors that select the kernels' code come first.
fn of_features(levels: &mut Levels, seed: u64) -> Trial {
    let division @ (.., added) = levels.pick(&DIVISIONS);
    let rows = levels.pick(&[16, 32, 48]);
    let (stages, [k_stages, v_stages]) = levels.pick(&STAGES);
    // Rows of a dQ tile, and keys of its blocks.
    let dq = levels.pick(&[(64, 16), (64, 48), (128, 32), (128, 16)]);
    let (mask, softcap) = (levels.pick(&MASKS), levels.pick(&SOFTCAPS));
    let (head_dim, head_dim_v) = levels.pick(&[(64, 64), (96, 32), (64, 128), (192, 64)]);
    let (dtype, (batch, heads_q, heads_kv)) = (levels.pick(&DTYPES), levels.pick(&HEADS));
    let layout = levels.pick(&Layout::ALL);
    // Lengths of Q and of K: one row and one key; one query with several KV blocks, and the reverse; more than a tile;
    // rows that see no key, and keys that no row sees; an odd number of rows.
    let lengths = levels.pick(&[(1, 1), (1, 150), (147, 9), (137, 200), (180, 60), (60, 190)]);
    let (dist, padding) = (levels.pick(&DISTS), levels.pick(&PADDING));
    let dlse = levels.pick(&[false, true]);
    // Fewer and more SMs than tiles.
    let (sms, sink) = (levels.pick(&[2, 100]), levels.pick(&SINKS));
    // With a wider head, dQ does not fit in registers beside dK and dV, and the tiles fill shared memory.
    let (stages, most) = match added {
        None => ((stages, [k_stages, v_stages]), 256),
        Some((rows, _)) => ((stages.min(2), [k_stages, 1]), if rows == 2 * ADDED_ROWS { 64 } else { 128 }),
    };
    let [head_dim, head_dim_v] = [head_dim, head_dim_v].map(|dim: u32| dim.min(most));
    let options = tiles(division, stages, dq, rows, [head_dim, head_dim_v]);
    let columns = |columns: u32| (columns - padding) as usize;
    let spec = dense(dtype, batch, lengths, (heads_q, heads_kv), columns(head_dim));
    let mut spec = spec.head_dim_v(columns(head_dim_v)).mask(mask);
    (spec.softcap, spec.sink) = (softcap, sink);
    let problem = layout.of(spec).known().expect("all levels are valid");
    let case = Case { name: format!("{dist:?}"), problem, dist, poison: Poison::None, seed };
    BwdCase { case, layout, dlse, slack: 1.0 }.trial(&device(sms), &options)
}

/// A problem with several tiles of the size that the planner chooses for these head dimensions.
fn of_choice((head_dim, head_dim_v): (usize, usize), options: &PlanOptions, seed: u64) -> Trial {
    let spec = dense(Dtype::Bf16, 1, (150, 140), (2, 1), head_dim).head_dim_v(head_dim_v).causal();
    let problem = spec.known().expect("the head dimensions are valid");
    let case = Case::normal("chosen tiles", problem, seed);
    BwdCase { case, layout: Layout::Contiguous, dlse: true, slack: 1.0 }.trial(&device(2), options)
}

/// One problem for every division, with few rows and keys per tile, several blocks, and several tiles per CTA.
pub(crate) fn small() -> Vec<Trial> {
    let masks = [Mask::None, Mask::Causal, Mask::Window { left: Some(40), right: Some(3) }];
    let trial = |(index, division): (usize, Divided)| {
        let (stages, [k_stages, v_stages]) = STAGES[index % 3];
        let lengths = match division.2 {
            None => (70, 100),
            Some((_, AddOrder::Any)) => (200, 100),
            // Three KV tiles wait for each other.
            Some((_, AddOrder::LastKeysFirst)) => (200, 300),
        };
        let (case, options) = tiny(division, [stages, k_stages, v_stages], masks[index % 3], lengths, (2, 1));
        case.trial(&device(2), &options)
    };
    // No row sees the last KV tiles of a section, which has one or two heads.
    let idle = |division: &Divided| {
        let mask = Mask::Window { left: Some(40), right: None };
        let (case, options) = tiny(*division, [2, 2, 1], mask, (100, 400), (4, 4));
        case.trial(&device(1), &options)
    };
    let adding = DIVISIONS.iter().filter(|(.., added)| added.is_some());
    let equal = DIVISIONS.into_iter().enumerate().map(trial).chain(adding.map(idle));
    let sinks = [(34, (3, 5)), (1, (70, 5))].map(with_sinks);
    equal.chain(sinks).chain(listed::small()).chain(functions::small()).collect()
}

/// Two heads with sinks in `batch` sequences. The dsink kernel is the third step.
pub(super) fn with_sinks((batch, lengths): (usize, (usize, usize))) -> Trial {
    let division = (128, Division::Keys, Some((ADDED_ROWS, AddOrder::LastKeysFirst)));
    let (mut tiny, options) = tiny(division, [2, 2, 1], Mask::Causal, lengths, (2, 1));
    let problem = dense(Dtype::Bf16, batch, lengths, (2, 1), 64).causal().sink().known();
    tiny.case = Case::normal("sinks", problem.expect("the lengths are valid"), 4);
    tiny.trial(&device(2), &options)
}

/// A case with head dimension 64 and the smallest tiles.
pub(super) fn tiny(
    division: Divided,
    [stages, k_stages, v_stages]: [u32; 3],
    mask: Mask,
    lengths: (usize, usize),
    heads: (usize, usize),
) -> (BwdCase, PlanOptions) {
    let options = tiles(division, (stages, [k_stages, v_stages]), (64, 16), 16, [64, 64]);
    let spec = dense(Dtype::Bf16, 1, lengths, heads, 64).mask(mask);
    let case = Case::normal("small", spec.known().expect("the lengths are valid"), 4);
    (BwdCase { case, layout: Layout::Contiguous, dlse: true, slack: 1.0 }, options)
}

/// Plan options with these tiles. The rows of a dQ tile are used only if the dK/dV tile does not add to dQ, because
/// otherwise there is no dQ kernel.
pub(super) fn tiles(
    (tile_n, division, added): Divided,
    (stages, [k_stages, v_stages]): (u32, [u32; 2]),
    (dq_rows, dq_keys): (u32, u32),
    rows: u32,
    [head_dim, head_dim_v]: [u32; 2],
) -> PlanOptions {
    let (tile_m, adds_dq) = added.map_or((rows, None), |(rows, order)| (rows, Some(order)));
    // Blocks of 128 rows need two stages.
    let kv_stages = if tile_m == 2 * ADDED_ROWS { 2 } else { v_stages };
    let dkv = DkvTile { head_dim, head_dim_v, tile_n, tile_m, stages, kv_stages, division, adds_dq };
    let dq = DqTile { head_dim, head_dim_v, tile_m: dq_rows, tile_n: dq_keys, k_stages, v_stages };
    let options = PlanOptions::default().dkv(dkv);
    if adds_dq.is_some() { options } else { options.dq(dq) }
}
