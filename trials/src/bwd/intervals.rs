//! Gradients under masks of intervals: kinds of masks with the features of kernels, each with each.

use fa3_sched::backward::{ADDED_ROWS, AddOrder, Division, DkvTile, DqTile, PlanOptions};
use fa3_types::Dtype;

use super::BwdCase;
use super::trials::{DTYPES, Divided, HEADS, SINKS, SOFTCAPS, tiles, tiny};
use crate::family::Trial;
use crate::fwd::intervals::OWN;
use crate::fwd::{Layout, dense, device};
use crate::intervals::Kind;
use crate::mutate::Target;
use crate::{Case, covering};

/// As of other masks, but for additions in order.
const DIVISIONS: [Divided; 5] = [
    (64, Division::Keys, None),
    (128, Division::Keys, None),
    (64, Division::Gradients, None),
    (128, Division::Keys, Some((ADDED_ROWS, AddOrder::Any))),
    (128, Division::Keys, Some((2 * ADDED_ROWS, AddOrder::Any))),
];
/// Rows of a block of the dK/dV kernel.
const ROWS: [u32; 2] = [16, 48];
/// Rows of a dQ tile, and keys of its blocks.
const DQ_TILES: [(u32, u32); 2] = [(64, 48), (128, 16)];
/// Lengths of Q and of K.
const LENGTHS: [(usize, usize); 4] = [(1, 150), (147, 9), (200, 300), (137, 90)];

/// Fewer SMs than there are tiles, and so many that each block of rows is a part of its tile.
const SMS: [u32; 2] = [2, 100];

const LEVELS: [usize; 11] = [
    Kind::ALL.len(),
    DIVISIONS.len(),
    LENGTHS.len(),
    HEADS.len(),
    OWN.len(),
    ROWS.len(),
    DQ_TILES.len(),
    SOFTCAPS.len(),
    DTYPES.len(),
    SINKS.len(),
    SMS.len(),
];

/// The covering array, and the tiles that plans choose.
pub(crate) fn trials(seed: u64) -> Vec<Trial> {
    let chosen = [(64, false), (128, true), (256, false)].map(|(head_dim, deterministic)| {
        let spec = dense(Dtype::Bf16, 1, (250, 240), (2, 1), head_dim);
        let case = Case::normal("chosen tiles", Kind::SinkAndWindow.of(spec, false, true), seed);
        let options = PlanOptions::default();
        let options = if deterministic { options.deterministic() } else { options };
        BwdCase { case, layout: Layout::Contiguous, dlse: true, slack: 1.0 }.trial(&device(2), &options)
    });
    covering(&LEVELS, 0).iter().map(|row| of_levels(row, seed)).chain(chosen).collect()
}

fn of_levels(row: &[usize], seed: u64) -> Trial {
    let &[kind, division, lengths, heads, own, rows, dq, softcap, dtype, sink, sms] = row else {
        unreachable!("a row has a level for each factor");
    };
    let (tile_n, division, added) = DIVISIONS[division];
    let (tile_m, adds_dq) = added.map_or((ROWS[rows], None), |(rows, order)| (rows, Some(order)));
    // Blocks of 128 rows need two.
    let kv_stages = if tile_m == 2 * ADDED_ROWS { 2 } else { 1 };
    let (head_dim, head_dim_v) = (64, 64);
    let dkv = DkvTile { head_dim, head_dim_v, tile_n, tile_m, stages: 2, kv_stages, division, adds_dq };
    let (tile_m, tile_n) = DQ_TILES[dq];
    let dq = DqTile { head_dim, head_dim_v, tile_m, tile_n, k_stages: 2, v_stages: 1 };
    let (batch, heads_q, heads_kv) = HEADS[heads];
    let mut spec = dense(DTYPES[dtype], batch, LENGTHS[lengths], (heads_q, heads_kv), 64);
    (spec.softcap, spec.sink) = (SOFTCAPS[softcap], SINKS[sink]);
    let layout = Layout::ALL[kind % Layout::ALL.len()];
    let (per_sequence, per_head) = OWN[own];
    let problem = Kind::ALL[kind].of(layout.of(spec), per_sequence, per_head);
    let case = Case::normal(&format!("{:?}", Kind::ALL[kind]), problem, seed);
    BwdCase { case, layout, dlse: dtype == 0, slack: 1.0 }.trial(&device(SMS[sms]), &tiles(dkv, dq))
}

/// The kernels that find blocks of rows, split tiles, and add up their parts: tiles with and without parts, the last of
/// which has keys to spare. The kernel with products is that of other masks.
///
/// # Panics
/// If one cannot be built.
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

/// Kernels that add to dQ, and that do not, with several tiles for a CTA, some of which no row sees.
pub(crate) fn small() -> Vec<Trial> {
    let trials = [(DIVISIONS[1], Kind::Documents), (DIVISIONS[4], Kind::Holes)].map(|(division, kind)| {
        let (case, options) = tiny(division, [2, 2, 1], fa3_types::Mask::None, (200, 300), (2, 1));
        let problem = kind.of(dense(Dtype::Bf16, 1, (200, 300), (2, 1), 64), false, false);
        BwdCase { case: Case::normal("small", problem, 4), ..case }.trial(&device(1), &options)
    });
    trials.into()
}
