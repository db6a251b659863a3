//! Problems whose lengths are data: packed sequences, and dense ones that are used in part.

use fa3_sched::backward::{ADDED_ROWS, AddOrder, Division, DkvTile, DqTile, PlanOptions};
use fa3_types::{Mask, ProblemSpec};

use super::BwdCase;
use super::trials::{DISTS, DIVISIONS, DTYPES, Divided, HEADS, MASKS, PADDING, SINKS, SOFTCAPS, tiles};
use crate::family::Trial;
use crate::fwd::listed::{GIVEN, Given, LAYOUTS, LENGTHS, problem};
use crate::fwd::{Layout, device};
use crate::{Case, Poison, covering};

/// Rows of blocks beside a dQ kernel, which divide the rows of its tile.
const ROWS: [u32; 2] = [16, 32];
/// Blocks in flight, of Q and dO in the one kernel, of K and V in the other.
const STAGES: [(u32, [u32; 2]); 2] = [(1, [2, 1]), (2, [2, 2])];
/// Rows of a dQ tile, and keys of its blocks.
const DQ_TILES: [(u32, u32); 2] = [(64, 16), (128, 32)];
/// Columns of Q and K, and of V and dO.
const COLUMNS: [(u32, u32); 2] = [(64, 64), (64, 32)];

/// Levels of all factors.
const LEVELS: [usize; 15] = [
    DIVISIONS.len(),
    MASKS.len(),
    GIVEN.len(),
    LENGTHS.len(),
    HEADS.len(),
    LAYOUTS.len(),
    SOFTCAPS.len(),
    DTYPES.len(),
    DISTS.len(),
    PADDING.len(),
    COLUMNS.len(),
    STAGES.len(),
    DQ_TILES.len(),
    ROWS.len(),
    SINKS.len(),
];

/// The covering array of all of these: any two of them meet.
pub(super) fn trials(seed: u64) -> Vec<Trial> {
    covering(&LEVELS, 0).iter().map(|row| of_levels(row, seed)).collect()
}

/// A trial with these levels.
fn of_levels(row: &[usize], seed: u64) -> Trial {
    let &[division, mask, given, lengths, heads, layout, softcap, ref rest @ ..] = row else {
        unreachable!("a row has a level for each factor");
    };
    let &[dtype, dist, padding, columns, stages, dq, rows, sink] = rest else {
        unreachable!("a row has a level for each factor");
    };
    let (head_dim, head_dim_v) = COLUMNS[columns];
    let options =
        options(DIVISIONS[division], STAGES[stages], DQ_TILES[dq], ROWS[rows], [head_dim, head_dim_v]);
    let (given, (_, heads_q, heads_kv)) = (GIVEN[given], HEADS[heads]);
    let (layout, of_gradients) = (given.layout(LAYOUTS[layout]), given.layout(LAYOUTS[layout / 2]));
    let change = |spec: ProblemSpec| {
        let spec = spec.head_dim_v((head_dim_v - PADDING[padding]) as usize);
        let mut spec = layout.of(spec).mask(MASKS[mask]);
        (spec.softcap, spec.sink) = (SOFTCAPS[softcap], SINKS[sink]);
        spec
    };
    // Around the tile of keys and the block of rows.
    let lengths = LENGTHS[lengths](64, 64);
    let head_dim = (head_dim - PADDING[padding]) as usize;
    let problem = problem(given, DTYPES[dtype], (heads_q, heads_kv), head_dim, &lengths, change);
    let name = format!("{given:?}, {layout:?}, {:?}", DISTS[dist]);
    let case = Case { name, problem, dist: DISTS[dist], poison: Poison::BeyondEnd, seed };
    BwdCase { case, layout: of_gradients, dlse: padding != 1, slack: 1.0 }.trial(&device(3), &options)
}

/// Several tiles a CTA, to run under many schedules. Every other problem has sinks.
pub(super) fn small() -> Vec<Trial> {
    let masks = [Mask::None, Mask::Causal, Mask::Window { left: Some(40), right: Some(3) }];
    let trial = |(index, division): (usize, Divided)| {
        let options = options(division, STAGES[index % 2], DQ_TILES[0], 16, [64, 64]);
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

/// Packed sequences of these lengths with the smallest tiles, on one SM.
pub(super) fn tiny(division: Divided, mask: Mask, lengths: &[(usize, usize)], sms: u32) -> Trial {
    let options = options(division, STAGES[1], DQ_TILES[0], 16, [64, 64]);
    let problem = problem(Given::PackedInPart, DTYPES[1], (2, 1), 64, lengths, |spec| spec.mask(mask));
    let case = Case { name: "small".to_owned(), problem, dist: DISTS[0], poison: Poison::BeyondEnd, seed: 4 };
    BwdCase { case, layout: Layout::Contiguous, dlse: true, slack: 1.0 }.trial(&device(sms), &options)
}

/// Two heads with sinks in so many packed sequences. The step of dsink is the fifth one, after those of two tables.
pub(super) fn with_sinks((count, lengths): (usize, (usize, usize))) -> Trial {
    let division = (128, Division::Keys, Some((ADDED_ROWS, AddOrder::LastKeysFirst)));
    let change = |spec: ProblemSpec| spec.causal().sink();
    let problem = problem(Given::Packed, DTYPES[1], (2, 1), 64, &vec![lengths; count], change);
    let case = Case::normal("sinks", problem, 4);
    let options = options(division, STAGES[1], DQ_TILES[0], 16, [64, 64]);
    BwdCase { case, layout: Layout::Contiguous, dlse: true, slack: 1.0 }.trial(&device(2), &options)
}

/// Plans with these tiles.
fn options(
    (tile_n, division, added): Divided,
    (stages, [k_stages, v_stages]): (u32, [u32; 2]),
    (dq_rows, dq_keys): (u32, u32),
    rows: u32,
    [head_dim, head_dim_v]: [u32; 2],
) -> PlanOptions {
    let (tile_m, adds_dq) = added.map_or((rows, None), |(rows, order)| (rows, Some(order)));
    // Blocks of 128 rows need two.
    let kv_stages = if tile_m == 2 * ADDED_ROWS { 2 } else { v_stages };
    let dkv = DkvTile { head_dim, head_dim_v, tile_n, tile_m, stages, kv_stages, division, adds_dq };
    let dq = DqTile { head_dim, head_dim_v, tile_m: dq_rows, tile_n: dq_keys, k_stages, v_stages };
    tiles(dkv, dq)
}
