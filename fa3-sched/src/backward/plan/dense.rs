//! Dense plans: sequences have one length, which the host knows, and tiles are found by their index.

use std::num::NonZeroU32;

use fa3_types::{Feature, Known, Mask};

use super::{Asked, DqBy, PlanError, STATS_ROWS, heads_between};
use crate::backward::{ADDED_ROWS, AddOrder, TileSplit};
use crate::{Longest, Order, Schedule, Scheduler, SeqLens, TileCounts, Tiling};

/// The features that kernels of dense plans compute.
const KNOWN: Known = Known::new(
    "the backward kernels of dense sequences",
    &[
        Feature::Window,
        Feature::Chunks,
        Feature::Intervals,
        Feature::Blocks,
        Feature::SoftCap,
        Feature::Score,
        Feature::Sinks,
    ],
);

/// Plan of sequences of one length: the tiles of each kernel.
#[derive(Clone, Copy, Debug)]
pub struct DensePlan {
    lens: SeqLens<u32>,
    stats: Schedule,
    dkv: Schedule,
    dq: Option<Schedule>,
    splits: Option<TileSplit<u32>>,
    unvisited_rows: u32,
    heads: Schedule,
    sms: NonZeroU32,
}

impl DensePlan {
    /// Decides the tiles of each kernel.
    pub(super) fn new(asked: &Asked<'_>, lens: SeqLens<u32>) -> Result<DensePlan, PlanError> {
        let &Asked { problem, dkv, dq, sms } = asked;
        let forward = problem.forward();
        KNOWN.check(forward)?;
        let (heads, tile, mask) = (forward.heads(), dkv.tile, forward.mask());
        // Heads and the batch are below 2³¹ in every problem.
        let counts = |rows: u32, tile: u32, heads: usize| TileCounts {
            m_blocks: rows.div_ceil(tile),
            heads: heads as u32,
            batch: forward.batch() as u32,
        };
        // Heads vary fastest: they are neighbours in memory.
        let one_tile = |counts| Schedule::new(counts, Order::HEADS_FASTEST, Scheduler::OneTile, sms);
        // Even equal tiles get sections and a tile counter, so that CTAs work on several heads at a time.
        let has_intervals = mask.intervals().is_some();
        let in_sections = |counts: TileCounts, mask: Mask, group: usize| {
            let order = Order::in_sections(mask, counts, group as u32, sms);
            // The producer finds the blocks of a tile when it fetches the tile, and sends them to the consumers.
            let scheduler = match has_intervals {
                true => Scheduler::DynamicPersistent,
                false => Scheduler::choose(counts.num_tiles()?, false, sms),
            };
            Schedule::new(counts, order, scheduler, sms)
        };
        // The order treats a mask of intervals as causal, as most masks of intervals are.
        let order_mask = if has_intervals { Mask::Causal } else { mask };
        // The statistics kernel clears the sums of dQ for all row blocks of the dK/dV kernel. The last block may reach
        // beyond the rows.
        let rows = if tile.adds_dq.is_some() { lens.q.next_multiple_of(tile.tile_m) } else { lens.q };
        let of_keys = counts(lens.k, tile.tile_n, heads.kv());
        let splits = match mask.bounds() {
            Some(_) => Some(TileSplit::new(sms, of_keys.num_tiles()?, lens.q.div_ceil(tile.tile_m))),
            None => None,
        };
        Ok(DensePlan {
            lens,
            sms,
            heads: one_tile(counts(1, 1, heads.q()))?,
            stats: one_tile(counts(rows, STATS_ROWS, heads.q()))?,
            dq: match dq {
                DqBy::AdditionsInOrder => None,
                DqBy::Additions => Some(one_tile(counts(lens.q, ADDED_ROWS, heads.q()))?),
                DqBy::Kernel(part) => {
                    let counts = counts(lens.q, part.tile.tile_m, heads.q());
                    Some(in_sections(counts, order_mask, heads.group_size())?)
                }
            },
            dkv: match tile.adds_dq {
                Some(AddOrder::LastKeysFirst) => {
                    // The last keys come first.
                    let blocks = lens.q.div_ceil(tile.tile_m).saturating_mul(heads.group_size() as u32);
                    let most = of_keys.heads.saturating_mul(of_keys.batch).max(1);
                    let section = heads_between(blocks, sms).min(most);
                    let order = Order::LongestFirst { section, longest: Longest::Last };
                    Schedule::new(of_keys, order, Scheduler::DynamicPersistent, sms)?
                }
                Some(AddOrder::Any) | None => {
                    let tiles = in_sections(of_keys, order_mask.transposed(), 1)?;
                    splits.map_or(tiles, |splits| tiles.split(splits.most_parts()))
                }
            },
            splits,
            unvisited_rows: {
                let unseen = Tiling::new(1, 1, 1, mask).rows_without_keys(lens);
                if unseen < lens.q { unseen / tile.tile_m * tile.tile_m } else { lens.q }
            },
        })
    }

    /// Lengths of Q and K, equal for all sequences.
    pub fn lens(&self) -> SeqLens<u32> {
        self.lens
    }

    /// The blocks of [`STATS_ROWS`] rows for which the first kernel computes D and LSE in base 2.
    pub fn stats(&self) -> &Schedule {
        &self.stats
    }

    /// The query heads of all sequences, over which the kernel of gradients of tables that are read by query and key
    /// walks.
    pub fn heads(&self) -> &Schedule {
        &self.heads
    }

    /// Number of SMs that launches use.
    pub fn sms(&self) -> NonZeroU32 {
        self.sms
    }

    /// The tiles of the kernel of dK and dV.
    pub fn dkv(&self) -> &Schedule {
        &self.dkv
    }

    /// The split of tiles of keys that many row blocks see, where rows have bounds of intervals.
    pub fn splits(&self) -> Option<TileSplit<u32>> {
        self.splits
    }

    /// The tiles of the dQ kernel, or the blocks of [`ADDED_ROWS`] rows of the kernel that rounds sums; `None` if there
    /// is no such kernel.
    pub fn dq(&self) -> Option<&Schedule> {
        self.dq.as_ref()
    }

    /// Number of leading rows of each sequence that no tile of keys visits, because they see no key.
    pub fn unvisited_rows(&self) -> u32 {
        self.unvisited_rows
    }
}

impl DensePlan {
    /// Describes the tiles of the dK/dV kernel.
    pub(super) fn dkv_text(&self) -> String {
        let split = self.splits.map_or("", |_| "; tiles that many rows see are split");
        format!("{}{split}", text(&self.dkv))
    }
}

/// Describes the tiles of the dK/dV or dQ kernel.
pub(super) fn text(schedule: &Schedule) -> String {
    let (tiles, grid) = (schedule.num_tiles(), schedule.grid());
    format!("{tiles} tiles, {}, {}, {grid} CTAs", schedule.order(), schedule.scheduler())
}
