//! The buffers through which kernels of a backward program pass data.

use fa3_ir::{BufferId, BufferRole, Elem, Program};
use fa3_sched::backward::{ADDED_ROWS, DkvTile, DqBy, Plan, PlanKind, STATS_ROWS};
use fa3_types::Intervals;

use super::line_sums::BlockSums;
use super::params::LineSumsParams;
use super::read_sums::{GROUP, GroupSums};
use crate::kernels::params::Host;
use crate::kernels::parts::intervals::interval_rows;
use crate::kernels::parts::key_tiles::KeyTiles;
use crate::kernels::parts::summaries::Summaries;
use crate::kernels::{Spec, packed};

/// The buffers through which kernels of a backward program pass data.
#[derive(Clone, Copy)]
pub(super) struct Scratch {
    /// Row statistics: -LSE and -D of each query row.
    pub(super) stats: BufferId,
    /// The dQ accumulators, if tiles add to dQ.
    pub(super) dq_accum: Option<BufferId>,
    /// Sums of gradients of the elements of tables that rows read, if these are asked for.
    pub(super) read_sums: Option<BufferId>,
    /// Sums of keys and of diagonals, if these are asked for.
    pub(super) lines: Option<LineBuffers>,
    /// Semaphores, if tiles add in order. They say which tile has added last to each block of accumulators.
    pub(super) last_added: Option<BufferId>,
    /// The tables of sequences (varlen).
    pub(super) tables: Option<Tables>,
    /// The buffers under a mask of intervals.
    pub(super) intervals: Option<IntervalBuffers>,
}

/// The sums of keys and of diagonals: of the groups of rows, and of heads.
#[derive(Clone, Copy)]
pub(super) struct LineBuffers {
    pub(super) of_groups: BufferId,
    pub(super) of_heads: BufferId,
}

impl LineBuffers {
    /// The arguments for sums of groups.
    pub(super) fn params(&self, plan: &Plan) -> LineSumsParams<Host> {
        LineSumsParams { address: self.of_groups, groups: groups(plan), blocks: line_blocks(plan) }
    }
}

/// Number of blocks of keys of the dQ kernel in a sequence that has all rows of K, as a packed one may.
fn line_blocks(plan: &Plan) -> u32 {
    (plan.problem().forward().k().shape.seqlen as u32).div_ceil(dq_keys(plan))
}

/// Keys of a block of the dQ kernel, if there is one.
pub(super) fn dq_keys(plan: &Plan) -> u32 {
    match plan.dq() {
        DqBy::Kernel(part) => part.tile.tile_n,
        DqBy::Additions | DqBy::AdditionsInOrder => ADDED_ROWS,
    }
}

/// The largest number of lines of a sequence: of keys, or of diagonals. A packed sequence may have all rows.
pub(super) fn most_lines(plan: &Plan) -> u32 {
    let forward = plan.problem().forward();
    (forward.q().shape.seqlen + forward.k().shape.seqlen) as u32
}

/// The buffers under a mask of intervals.
#[derive(Clone, Copy)]
pub(super) struct IntervalBuffers {
    /// Intervals of rows.
    pub(super) rows: BufferId,
    /// Summaries of the intervals of blocks of rows, where rows have bounds.
    pub(super) summaries: Option<BufferId>,
    /// The buffers of split tiles, where rows have bounds, if sequences have one length.
    pub(super) splits: Option<SplitBuffers>,
}

/// The buffers of tiles of keys that may be split.
#[derive(Clone, Copy)]
pub(super) struct SplitBuffers {
    /// The blocks of rows that see each tile of keys, and the split of tiles.
    pub(super) tiles: [BufferId; 2],
    /// dK and dV of the parts of split tiles.
    pub(super) parts: [BufferId; 2],
}

/// The tables of sequences.
#[derive(Clone, Copy)]
pub(super) struct Tables {
    /// The table of blocks of rows.
    pub(super) rows: BufferId,
    /// The table of tiles of keys.
    pub(super) keys: BufferId,
    /// The position of the first row of each sequence in padded arrays.
    pub(super) firsts: BufferId,
}

/// Number of pairs of query rows of a head that have statistics. At least 1, because a tensor map needs an address.
pub(super) fn pairs(plan: &Plan) -> u32 {
    match plan.kind() {
        PlanKind::Dense(tiles) => tiles.lens().q.div_ceil(2).max(1),
        PlanKind::Varlen(tiles) => tiles.places() / 2,
    }
}

/// Number of blocks of [`ADDED_ROWS`] rows of a head that have dQ accumulators. They cover all blocks of the dK/dV
/// kernel, whose last block may reach beyond the last row.
pub(super) fn accum_blocks(plan: &Plan) -> u32 {
    match plan.kind() {
        PlanKind::Dense(tiles) => tiles.lens().q.next_multiple_of(plan.dkv().tile.tile_m) / ADDED_ROWS,
        PlanKind::Varlen(tiles) => tiles.places() / ADDED_ROWS,
    }
}

/// Number of blocks of [`STATS_ROWS`] rows of a head in padded arrays. `None` if sequences have one length.
pub(super) fn padded_blocks(plan: &Plan) -> Option<u32> {
    match plan.kind() {
        PlanKind::Dense(_) => None,
        PlanKind::Varlen(tiles) => Some(tiles.places() / STATS_ROWS),
    }
}

/// Number of groups of [`GROUP`] rows of a head that have sums. They cover all tiles of the dQ kernel, whose last tile
/// may reach beyond the last row.
pub(super) fn groups(plan: &Plan) -> u32 {
    let rows = match (plan.kind(), plan.dq()) {
        (PlanKind::Dense(tiles), DqBy::Kernel(part)) => tiles.lens().q.next_multiple_of(part.tile.tile_m),
        (PlanKind::Dense(tiles), DqBy::Additions | DqBy::AdditionsInOrder) => tiles.lens().q,
        (PlanKind::Varlen(tiles), _) => tiles.places(),
    };
    rows.div_ceil(GROUP)
}

/// Adds the arrays of lengths for varlen sequences, and then the buffers through which kernels pass data.
pub(super) fn declare(program: &mut Program<Spec>, plan: &Plan) -> Scratch {
    let [batch, heads, _] = plan.problem().forward().lse_shape().map(|extent| extent as u32);
    // In padded arrays, the rows of all sequences of a table lie one after another, as in one sequence.
    let batch = if plan.dense().is_some() { batch } else { 1 };
    if let PlanKind::Varlen(tiles) = plan.kind() {
        packed::arrays(program, tiles.stats().table());
    }
    // The four numbers of rows 2i and 2i + 1: -LSE · log₂e of both rows, then -D of both.
    let stats = program.buffer("stats", Elem::F32, &[batch, heads, pairs(plan), 4], BufferRole::Scratch);
    let tile = plan.dkv().tile;
    let blocks = [batch, heads, accum_blocks(plan)];
    let dq_accum = tile.adds_dq.map(|_| {
        // If there is a single tile of keys, it is the only one to add: it writes dQ, and needs no accumulator.
        let is_alone =
            tile.adds_in_order() && plan.dense().is_some_and(|tiles| tiles.lens().k <= tile.tile_n);
        let rows = if is_alone { 0 } else { ADDED_ROWS };
        let numbers = [blocks.as_slice(), &[rows, tile.head_dim]].concat();
        program.buffer("sums", Elem::F32, &numbers, BufferRole::Scratch)
    });
    let last_added =
        tile.adds_in_order().then(|| program.buffer("last_added", Elem::U32, &blocks, BufferRole::Scratch));
    let learned = plan.problem().forward().score().filter(|form| !form.summed_gradients().is_empty());
    let read_sums = learned.map(|form| {
        let count = GroupSums::of(form.expr(), form.summed_gradients()).count;
        program.buffer("read_sums", Elem::F32, &[batch, heads, groups(plan), count], BufferRole::Scratch)
    });
    let of_block = learned.map(|form| BlockSums::of(form.expr(), form.summed_gradients(), dq_keys(plan)));
    let lines = of_block.filter(|sums| !sums.reads.is_empty()).map(|sums| {
        let mut scratch = |name, dims: &[u32]| program.buffer(name, Elem::F32, dims, BufferRole::Scratch);
        let pairs = plan.problem().forward().batch() as u32 * heads;
        LineBuffers {
            of_groups: scratch("line_sums", &[batch * heads, groups(plan), line_blocks(plan), sums.count]),
            of_heads: scratch("lines", &[sums.reads.len() as u32, pairs, most_lines(plan)]),
        }
    });
    let tables = match plan.kind() {
        PlanKind::Dense(_) => None,
        PlanKind::Varlen(tiles) => {
            let [rows, keys] = [tiles.stats(), tiles.dkv()].map(|tiles| tiles.table());
            let mut words = |name, words| program.buffer(name, Elem::U32, &[words], BufferRole::Scratch);
            Some(Tables {
                rows: words("row_table", rows.words()),
                keys: words("key_table", keys.words()),
                firsts: words("first_places", rows.count() + 1),
            })
        }
    };
    let forward = plan.problem().forward();
    let intervals = forward.mask().intervals().map(|form| interval_buffers(program, plan, form));
    Scratch { stats, dq_accum, read_sums, lines, last_added, tables, intervals }
}

/// Adds the buffers under a mask of intervals.
fn interval_buffers(program: &mut Program<Spec>, plan: &Plan, form: Intervals) -> IntervalBuffers {
    let q = plan.problem().forward().q().shape;
    let rows = interval_rows(program, form, q);
    let DkvTile { head_dim, head_dim_v, tile_n, .. } = plan.dkv().tile;
    let mut scratch = |name, elem, dims: &[u32]| program.buffer(name, elem, dims, BufferRole::Scratch);
    let bounds = plan.problem().forward().mask().bounds();
    let summaries =
        bounds.map(|form| scratch("summaries", Elem::U32, &Summaries::dims(form, q, padded_blocks(plan))));
    let splits = plan.dense().and_then(|numbered| numbered.splits().zip(Some(numbered)));
    let splits = splits.map(|(splits, numbered)| {
        let [blocks, list] = KeyTiles::dims(numbered.dkv().num_tiles(), &splits);
        let tiles = [("blocks_of_keys", blocks), ("splits", list)]
            .map(|(name, dims)| scratch(name, Elem::U32, &dims));
        let parts = [("dk_of_parts", head_dim), ("dv_of_parts", head_dim_v)]
            .map(|(name, cols)| scratch(name, Elem::F32, &[splits.most_parts(), tile_n, cols]));
        SplitBuffers { tiles, parts }
    });
    IntervalBuffers { rows, summaries, splits }
}
