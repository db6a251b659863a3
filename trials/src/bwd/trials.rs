//! Problems for the backward kernels: the features of which their code is made, each with each.

use fa3_sched::DeviceLimits;
use fa3_sched::backward::{ADDED_ROWS, AddOrder, Division, DkvTile, DqTile, PlanOptions};
use fa3_types::{Dtype, Mask};

use super::{BwdCase, listed};
use crate::family::Trial;
use crate::fwd::{Layout, dense, device};
use crate::{Case, Dist, Poison, chunks, covering};

/// Keys of a dK/dV tile, what warpgroups share out, and rows of its blocks and the order if they add to
/// dQ.
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
/// Rows of its blocks.
const ROWS: [u32; 3] = [16, 32, 48];
/// Blocks in flight, of Q and dO in the one kernel, of K and V in the other. The one has as many tiles of K and V in
/// flight as the other has blocks of V.
const STAGES: [(u32, [u32; 2]); 3] = [(1, [2, 1]), (2, [2, 2]), (3, [3, 2])];
/// Rows of a dQ tile, and keys of its blocks.
const DQ_TILES: [(u32, u32); 4] = [(64, 16), (64, 48), (128, 32), (128, 16)];
/// Columns of Q and K, and of V and dO.
const COLUMNS: [(u32, u32); 4] = [(64, 64), (96, 32), (64, 128), (192, 64)];
/// Columns that the problem has fewer than the tile.
pub(super) const PADDING: [u32; 3] = [0, 8, 24];
/// Every side of a mask, near and far.
pub const MASKS: [Mask; 6] = [
    Mask::None,
    Mask::Causal,
    Mask::Window { left: Some(37), right: Some(21) },
    Mask::Window { left: Some(50), right: None },
    Mask::Window { left: None, right: Some(13) },
    chunks(45, Some(20)),
];
pub(super) const SOFTCAPS: [Option<f64>; 2] = [None, Some(3.0)];
pub(super) const DTYPES: [Dtype; 2] = [Dtype::F16, Dtype::Bf16];
/// (sequences, query heads, key/value heads).
pub(super) const HEADS: [(usize, usize, usize); 4] = [(2, 1, 1), (1, 3, 1), (1, 4, 2), (1, 3, 3)];
const DLSE: [bool; 2] = [false, true];
/// Whether query heads have sinks.
pub(super) const SINKS: [bool; 2] = [false, true];
/// The kind of scores.
pub const DISTS: [Dist; 4] = [Dist::Normal, Dist::Increasing, Dist::Decreasing, Dist::Low];
/// Fewer SMs than there are tiles, and more.
const SMS: [u32; 2] = [2, 100];

/// Lengths of Q and of K: one of each; one query and several blocks of keys, and the other way round; more than a tile;
/// rows that see no key and keys that no row sees; an odd number of rows.
const LENGTHS: [(usize, usize); 6] = [(1, 1), (1, 150), (147, 9), (137, 200), (180, 60), (60, 190)];

/// Levels of all factors, those of the kernels' code first.
const LEVELS: [usize; 16] = [
    DIVISIONS.len(),
    ROWS.len(),
    STAGES.len(),
    DQ_TILES.len(),
    MASKS.len(),
    SOFTCAPS.len(),
    COLUMNS.len(),
    DTYPES.len(),
    HEADS.len(),
    Layout::ALL.len(),
    LENGTHS.len(),
    DISTS.len(),
    PADDING.len(),
    DLSE.len(),
    SMS.len(),
    SINKS.len(),
];

/// The covering array of features, and the tiles that plans choose.
pub(super) fn trials(seed: u64) -> Vec<Trial> {
    let features = covering(&LEVELS, 0);
    let features = features.iter().map(|row| of_levels(row, seed));
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
    features.chain(chosen).chain(listed::trials(seed)).collect()
}

/// A trial with these levels.
fn of_levels(row: &[usize], seed: u64) -> Trial {
    let &[division, rows, stages, dq, mask, softcap, columns, dtype, heads, ref rest @ ..] = row else {
        unreachable!("a row has a level for each feature");
    };
    let &[layout, lengths, dist, padding, dlse, sms, sink] = rest else {
        unreachable!("a row has a level for each factor");
    };
    let ((tile_n, division, added), (stages, [k_stages, v_stages])) = (DIVISIONS[division], STAGES[stages]);
    let (head_dim, head_dim_v) = COLUMNS[columns];
    // With more, dQ does not fit into registers beside dK and dV, and shared memory is full.
    let halves = added.is_some_and(|(rows, _)| rows == 2 * ADDED_ROWS);
    let most = if halves { 64 } else { 128 };
    let kv_stages = match added {
        None => v_stages,
        Some(_) => 1 + u32::from(halves),
    };
    let [head_dim, head_dim_v] =
        [head_dim, head_dim_v].map(|dim| if added.is_some() { dim.min(most) } else { dim });
    let stages = if added.is_some() { stages.min(2) } else { stages };
    let (rows, adds_dq) = added.map_or((ROWS[rows], None), |(rows, order)| (rows, Some(order)));
    let dkv = DkvTile { head_dim, head_dim_v, tile_n, tile_m: rows, stages, kv_stages, division, adds_dq };
    let (tile_m, tile_n) = DQ_TILES[dq];
    let dq = DqTile { head_dim, head_dim_v, tile_m, tile_n, k_stages, v_stages };
    let (batch, heads_q, heads_kv) = HEADS[heads];
    let columns = |columns: u32| (columns - PADDING[padding]) as usize;
    let spec = dense(DTYPES[dtype], batch, LENGTHS[lengths], (heads_q, heads_kv), columns(head_dim));
    let mut spec = spec.head_dim_v(columns(head_dim_v)).mask(MASKS[mask]);
    (spec.softcap, spec.sink) = (SOFTCAPS[softcap], SINKS[sink]);
    let layout = Layout::ALL[layout];
    let problem = layout.of(spec).known().expect("all levels are valid");
    let name = format!("{:?}", DISTS[dist]);
    let case = Case { name, problem, dist: DISTS[dist], poison: Poison::None, seed };
    let options = tiles(dkv, dq);
    BwdCase { case, layout, dlse: DLSE[dlse], slack: 1.0 }.trial(&device(SMS[sms]), &options)
}

/// The tiles that plans choose for these head dimensions, on several of them.
fn of_choice((head_dim, head_dim_v): (usize, usize), options: &PlanOptions, seed: u64) -> Trial {
    let spec = dense(Dtype::Bf16, 1, (150, 140), (2, 1), head_dim).head_dim_v(head_dim_v).causal();
    let problem = spec.known().expect("the head dimensions are valid");
    let case = Case::normal("chosen tiles", problem, seed);
    BwdCase { case, layout: Layout::Contiguous, dlse: true, slack: 1.0 }.trial(&device(2), options)
}

/// Tiles with few rows and keys, of all divisions, with several blocks and tiles for a CTA.
pub(super) fn small() -> Vec<Trial> {
    let masks = [Mask::None, Mask::Causal, Mask::Window { left: Some(40), right: Some(3) }];
    let trial = |(index, division): (usize, Divided)| {
        let (stages, [k_stages, v_stages]) = STAGES[index % 3];
        let lengths = match division.2 {
            None => (70, 100),
            Some((_, AddOrder::Any)) => (200, 100),
            // Three tiles of keys wait for each other.
            Some((_, AddOrder::LastKeysFirst)) => (200, 300),
        };
        let (case, options) = tiny(division, [stages, k_stages, v_stages], masks[index % 3], lengths, (2, 1));
        case.trial(&device(2), &options)
    };
    // Sections of one or two heads, at the end of which tiles of keys are seen by no row.
    let idle = |division: &Divided| {
        let mask = Mask::Window { left: Some(40), right: None };
        let (case, options) = tiny(*division, [2, 2, 1], mask, (100, 400), (4, 4));
        case.trial(&device(1), &options)
    };
    let adding = DIVISIONS.iter().filter(|(.., added)| added.is_some());
    let equal = DIVISIONS.into_iter().enumerate().map(trial).chain(adding.map(idle));
    let sinks = [(34, (3, 5)), (1, (70, 5))].map(with_sinks);
    equal.chain(sinks).chain(listed::small()).collect()
}

/// Two heads with sinks in so many sequences. The step of dsink is the third one.
pub(super) fn with_sinks((batch, lengths): (usize, (usize, usize))) -> Trial {
    let division = (128, Division::Keys, Some((ADDED_ROWS, AddOrder::LastKeysFirst)));
    let (mut tiny, options) = tiny(division, [2, 2, 1], Mask::Causal, lengths, (2, 1));
    let problem = dense(Dtype::Bf16, batch, lengths, (2, 1), 64).causal().sink().known();
    tiny.case = Case::normal("sinks", problem.expect("the lengths are valid"), 4);
    tiny.trial(&device(2), &options)
}

/// A case with head dimension 64, and the smallest tiles.
pub(super) fn tiny(
    (tile_n, division, added): Divided,
    [stages, k_stages, v_stages]: [u32; 3],
    mask: Mask,
    lengths: (usize, usize),
    heads: (usize, usize),
) -> (BwdCase, PlanOptions) {
    let (head_dim, head_dim_v) = (64, 64);
    let (tile_m, adds_dq) = added.map_or((16, None), |(rows, order)| (rows, Some(order)));
    // Blocks of 128 rows need two.
    let kv_stages = if tile_m == 2 * ADDED_ROWS { 2 } else { v_stages };
    let dkv = DkvTile { head_dim, head_dim_v, tile_n, tile_m, stages, kv_stages, division, adds_dq };
    let dq = DqTile { head_dim, head_dim_v, tile_m: 64, tile_n: 16, k_stages, v_stages };
    let spec = dense(Dtype::Bf16, 1, lengths, heads, 64).mask(mask);
    let case = Case::normal("small", spec.known().expect("the lengths are valid"), 4);
    (BwdCase { case, layout: Layout::Contiguous, dlse: true, slack: 1.0 }, tiles(dkv, dq))
}

/// Plans with these tiles. One that adds to dQ leaves no other kernel of dQ.
pub(super) fn tiles(dkv: DkvTile, dq: DqTile) -> PlanOptions {
    let options = PlanOptions::default().dkv(dkv);
    if dkv.adds_dq.is_some() { options } else { options.dq(dq) }
}
