//! Varlen plans: lengths are data, and tiles are found through tables in device memory.
//!
//! There are two tables. The first lists blocks of query rows, for the statistics, for the sums of dQ, and for the dQ
//! kernel, if any. The second lists tiles of keys. Each row block of the first table has its own memory for statistics
//! and sums, so that blocks of different sequences never share any, whatever the lengths are.

use std::fmt;

use fa3_types::{Feature, Known, Mask, TensorDesc, TensorName};

use super::{Asked, DqBy, PlanError, STATS_ROWS, heads_between};
use crate::backward::AddOrder;
use crate::packed::{self, MemoryRows, Side, Tiles, nearest_section, section};
use crate::{Longest, Scheduler};

/// The features that kernels of varlen plans compute.
const KNOWN: Known = Known::new(
    "the backward kernels of packed sequences",
    &[
        Feature::Window,
        Feature::Chunks,
        Feature::Intervals,
        Feature::SoftCap,
        Feature::Score,
        Feature::Sinks,
        Feature::Packed,
        Feature::Used,
    ],
);

/// Plan of sequences whose lengths are data: the tiles of each kernel.
#[derive(Clone, Debug)]
pub struct VarlenPlan {
    block_rows: u32,
    stats: Tiles,
    dkv: Tiles,
    dq: Option<Tiles>,
    rows: [MemoryRows; 4],
}

impl VarlenPlan {
    /// Decides the tiles of each kernel.
    pub(super) fn new(asked: &Asked<'_>) -> Result<VarlenPlan, PlanError> {
        let &Asked { problem, dkv, dq, sms } = asked;
        let (forward, tile) = (problem.forward(), dkv.tile);
        KNOWN.check(forward)?;
        let (mask, heads) = (forward.mask(), forward.heads());
        // The order treats a mask of intervals as causal, as most masks of intervals are.
        let order_mask = if mask.intervals().is_some() { Mask::Causal } else { mask };
        // Numbers of heads are below 2³¹ in every problem.
        let [heads_q, heads_kv, group] = [heads.q(), heads.kv(), heads.group_size()].map(|x| x as u32);
        let [q, k] = Side::both(forward);
        let (block_rows, block_keys) = match dq {
            DqBy::Kernel(part) => (part.tile.tile_m, part.tile.tile_n),
            DqBy::Additions | DqBy::AdditionsInOrder => (tile.tile_m, tile.tile_n),
        };
        if !block_rows.is_multiple_of(tile.tile_m) {
            return Err(PlanError::VarlenTiles { rows: block_rows, block: tile.tile_m });
        }
        let table = |sides, tile, mask| packed::Plan::new(forward.batch(), sides, tile, mask);
        let blocks = table([q, k], [block_rows, block_keys], mask)?;
        let tiles_of_keys = table([k, q], [tile.tile_n, tile.tile_m], mask.transposed())?;
        // Sections are as large as if all sequences had the longest length, which is below 2³¹ in every problem.
        let [rows, keys] = [forward.longest().q, forward.longest().k].map(|x| x as u32);
        let (section_of_keys, longest) = match tile.adds_dq {
            Some(AddOrder::LastKeysFirst) => {
                let blocks = rows.div_ceil(tile.tile_m).saturating_mul(group);
                (nearest_section(heads_between(blocks, sms), heads_kv), Longest::Last)
            }
            Some(AddOrder::Any) | None => {
                let section = section(keys.div_ceil(tile.tile_n), [heads_kv, 1], sms);
                (section, Longest::from(order_mask.transposed()))
            }
        };
        let of_dq = match dq {
            DqBy::Kernel(part) => {
                let head_tiles = rows.div_ceil(part.tile.tile_m);
                let heads = [heads_q, section(head_tiles, [heads_q, group], sms)];
                Some(Tiles::new(blocks, heads, Longest::from(order_mask), sms)?)
            }
            DqBy::Additions | DqBy::AdditionsInOrder => None,
        };
        let rows = |name, tensor: &TensorDesc| {
            MemoryRows::of(tensor).map_err(|source| PlanError::VarlenRows { tensor: name, source })
        };
        Ok(VarlenPlan {
            block_rows,
            // Heads vary fastest: they are neighbours in memory.
            stats: Tiles::new(blocks, [heads_q, heads_q], Longest::First, sms)?,
            dkv: Tiles::new(tiles_of_keys, [heads_kv, section_of_keys], longest, sms)?,
            dq: of_dq,
            rows: [
                rows(TensorName::Q, forward.q())?,
                rows(TensorName::K, forward.k())?,
                rows(TensorName::V, forward.v())?,
                rows(TensorName::DOut, problem.dout())?,
            ],
        })
    }

    /// Query rows per block of the first table.
    pub fn block_rows(&self) -> u32 {
        self.block_rows
    }

    /// Number of rows of all blocks of the first table. Each row has memory for statistics and sums.
    pub fn places(&self) -> u32 {
        self.stats.table().capacity() * self.block_rows
    }

    /// The blocks of query rows of all heads. One or more CTAs of [`STATS_ROWS`] rows compute each block's statistics.
    pub fn stats(&self) -> &Tiles {
        &self.stats
    }

    /// Largest number of CTAs of [`STATS_ROWS`] rows; 0 if Q has no rows.
    pub fn stats_grid(&self) -> u32 {
        if self.stats.grid() == 0 { 0 } else { self.stats.most() * (self.block_rows / STATS_ROWS) }
    }

    /// The tiles of the dK/dV kernel. In their table, keys take the place of rows, and rows the place of keys.
    pub fn dkv(&self) -> &Tiles {
        &self.dkv
    }

    /// The tiles of a dQ kernel. They are found through the table of [`VarlenPlan::stats`].
    pub fn dq(&self) -> Option<&Tiles> {
        self.dq.as_ref()
    }

    /// The rows of Q, K, V and dO in memory.
    pub fn rows(&self) -> [MemoryRows; 4] {
        self.rows
    }

    /// Writes the size of the tables.
    pub(super) fn write_tables(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [blocks, keys] = [&self.stats, &self.dkv].map(|tiles| 4 * tiles.table().words());
        let count = self.stats.table().count();
        write!(f, "\ntables     {blocks} and {keys} bytes for {count} sequences, which kernels write before")
    }
}

/// Describes the tiles of the dK/dV or dQ kernel.
pub(super) fn text(tiles: &Tiles) -> String {
    let (most, order, grid) = (tiles.most(), tiles.order(), tiles.grid());
    format!("at most {most} tiles, {order}, {}, {grid} CTAs", Scheduler::DynamicPersistent)
}
