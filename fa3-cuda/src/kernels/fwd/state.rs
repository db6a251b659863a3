//! The state that the roles of a kernel share: its parameters, and the pipelines between the roles.

use fa3_ir::lang::*;
use fa3_sched::forward::{ROW_SUM_COLS, RunningO};
use fa3_sched::{FastDiv, Int, KvRange};
use fa3_types::IntervalsOfRow;

use super::constants;
use super::dequantized::{self, Dequantized};
use super::f16_queries::F16Queries;
use super::hand_over::HandOver;
use super::p_type::PType;
use super::params::Params;
use super::spec::FwdSpec;
use super::transpose::Transposed;
use crate::kernels::params::{Declare, Form, InKernel};
use crate::kernels::parts::block_words::BlockWords;
use crate::kernels::parts::geometry::WorkTile;
use crate::kernels::parts::intervals::TilesUnderIntervals;
use crate::kernels::parts::kv_blocks::KvBlocks;
use crate::kernels::parts::ping_pong::PingPong;
use crate::kernels::parts::seen::Seen;
use crate::kernels::parts::tile_scheduler::TileScheduler;
use crate::kernels::parts::tma_pipeline::TmaPipeline;
use crate::kernels::parts::walk::Walk;

/// State that the roles of a kernel share.
pub(super) struct Fwd<'k> {
    pub(super) builder: &'k Builder,
    pub(super) spec: FwdSpec,
    pub(super) params: Params<InKernel<'k>>,
    pub(super) scheduler: TileScheduler<'k>,
    pub(super) q: TmaPipeline<'k>,
    /// The part of the queries that is multiplied by V, in latent attention.
    pub(super) qv: Option<TmaPipeline<'k>>,
    pub(super) k: TmaPipeline<'k>,
    /// The last columns of K, if two warpgroups share O's columns and there is no `qv`. Then `k` has the first columns.
    pub(super) k_second: Option<TmaPipeline<'k>>,
    pub(super) v: TmaPipeline<'k>,
    /// The second half of V's columns, if two warpgroups share O's columns: `v` has the first half. With `qv`, the
    /// second half has two parts where it can, so that one is released while products read the other: of its columns,
    /// or, where rows are copied one by one, of its rows.
    pub(super) v_second: Vec<TmaPipeline<'k>>,
    /// The pipeline of transposed e4m3 V, if V is to be transposed.
    pub(super) transposed: Option<Transposed<'k>>,
    /// The pipelines of dequantized K and V, and perhaps of Q, if e4m3 tensors are converted for products of 16 bits.
    pub(super) dequantized: Option<Dequantized<'k>>,
    /// The rewriting of Q and `qv` to f16, if their elements are not the elements of products.
    pub(super) f16_queries: Option<F16Queries<'k>>,
    pub(super) p: PType,
    /// Number of query heads in a tile, if a tile may have rows of several heads (PackGQA).
    pub(super) pack: Option<FastDiv<U32<'k>>>,
    pub(super) ping_pong: Option<PingPong<'k>>,
    /// The hand-off of P from one warpgroup to another that computes the same rows.
    pub(super) hand_over: Option<HandOver<'k>>,
    /// Which keys of blocks exist, if keys are listed.
    pub(super) seen: Option<Seen<'k>>,
    /// O of the pieces before, if consumers merge pieces and keep it in shared memory.
    pub(super) running_o: Option<Region>,
}

/// The columns of a tile in two halves of whole panels; a single panel is one half. Gives the first column and the
/// shape of each half. The tile begins with column `col`.
fn halves((col, shape): (u32, TileShape)) -> impl Iterator<Item = (u32, TileShape)> {
    let first = shape.panels().div_ceil(2) * shape.panel_cols();
    let parts = [(col, first), (col + first, shape.cols - first)].into_iter();
    parts.filter(|(_, cols)| *cols > 0).map(move |(col, cols)| (col, TileShape { cols, ..shape }))
}

impl<'k> Fwd<'k> {
    pub(super) fn declare(b: &'k Builder, spec: &FwdSpec) -> Fwd<'k> {
        let tile = &spec.tile;
        let params = Params::<Form>::form(spec).pass(&mut Declare(b));
        let warps = 4 * tile.consumers;
        // Number of warps that compute scores.
        let first = warps / tile.column_groups();
        let (loaders, transposers) = (spec.loaders(), spec.transposers());
        let transposed = (transposers > 0).then(|| Transposed::declare(b, tile, transposers));
        let dequantized = (tile.converters() > 0).then(|| Dequantized::declare(b, spec));
        let of_k = if dequantized.is_some() { dequantized::WARPS } else { first };
        let of_q = if spec.converts_q() { dequantized::WARPS } else { first };
        let of_v = if transposers > 0 { transposers } else { of_k };
        let walkers = warps + loaders + transposers + 4 * tile.converters();
        let hand_over = (tile.column_groups() > 1).then(|| HandOver::declare(b, spec));
        // Makes the pipeline of the columns from `col` on; `shape` says how many there are.
        let keys = |name, map: Option<TileMap>, (col, shape): (u32, TileShape), consumers| {
            let pipeline = match (map.map(|map| map.of_columns(shape.cols)), spec.page_block) {
                (Some(map), None) => TmaPipeline::declare_shared(b, name, map, [tile.stages, consumers]),
                (Some(map), Some(_)) => {
                    TmaPipeline::declare_rows(b, name, map, tile.tile_n, [tile.stages, consumers])
                }
                (None, _) if tile.converts_rows() => {
                    TmaPipeline::declare_stored(b, name, shape, tile.stages, [dequantized::WARPS, consumers])
                }
                (None, _) => TmaPipeline::declare_copied(b, name, shape, [tile.stages, consumers]),
            };
            pipeline.at_column(col)
        };
        let elem = if tile.converts_rows() { spec.elem } else { spec.key_elem() };
        let [of_k_cols, of_v_cols] =
            [tile.head_dim, tile.head_dim_v].map(|cols| TileShape::new(elem, tile.tile_n, cols));
        let first_of_k = match &hand_over {
            Some(_) if !tile.qv => of_k_cols.panels().div_ceil(2) * of_k_cols.panel_cols(),
            _ => tile.head_dim,
        };
        let [k_parts, v_parts] =
            [(of_k_cols, first_of_k), (of_v_cols, tile.columns())].map(|(all, first)| {
                let part = |col, cols| (col, TileShape { cols, ..all });
                (part(0, first), (first < all.cols).then(|| part(first, all.cols - first)))
            });
        let ty = match (spec.is_fp8(), spec.elem) {
            (true, _) => WgmmaType::E4m3,
            (false, Elem::F16) => WgmmaType::F16,
            (false, _) => WgmmaType::Bf16,
        };
        Fwd {
            builder: b,
            spec: spec.clone(),
            q: TmaPipeline::declare_rows(b, "q", params.q, tile.tile_m, [1, of_q]),
            qv: params.qv.map(|map| TmaPipeline::declare_rows(b, "qv", map, tile.tile_m, [1, first])),
            k: keys("k", params.k, k_parts.0, of_k),
            k_second: k_parts.1.map(|part| keys("k_second", params.k, part, of_k)),
            v: match (params.v, spec.v_is_transposed()) {
                (Some(map), true) => {
                    TmaPipeline::declare_transposed(b, "v", map, ROW_SUM_COLS, [tile.stages, of_v])
                }
                (map, _) => keys("v", map, v_parts.0, of_v),
            },
            v_second: v_parts.1.map_or_else(Vec::new, |part| {
                // With `qv`, scores take them, too.
                let readers = if tile.qv { warps } else { warps - first };
                if let Some(first_rows) = spec.first_rows_of_second_half() {
                    return Vec::from(
                        keys("v_second", None, part, readers).split_rows("v_third", first_rows),
                    );
                }
                let parts = if tile.qv && !spec.gathers() { halves(part).collect() } else { vec![part] };
                let named = parts.into_iter().zip(["v_second", "v_third"]);
                named.map(|(part, name)| keys(name, params.v, part, readers)).collect()
            }),
            transposed,
            dequantized,
            f16_queries: spec.rewrites_q().then(|| F16Queries::declare(b, spec)),
            p: PType(ty),
            pack: spec.shares.map(|_| FastDiv::new(spec.pack).map(|number| b.value(number))),
            hand_over,
            seen: spec.lists().map(|_| Seen::declare(b, tile.tile_n, tile.stages, [loaders, first])),
            running_o: (spec.merges == Some(RunningO::Shared))
                .then(|| b.region("running_o", tile.bytes_of_o(), 16)),
            ping_pong: tile.ping_pong.then(|| PingPong::declare(b, tile.consumers)),
            scheduler: match params.walk {
                Walk::Tiles(lookup) => {
                    let Params { intervals, tile_counter, .. } = params;
                    let of = intervals.filter(|_| spec.finds_ranges());
                    let of = of.map(|rows| (TilesUnderIntervals::Rows(rows), [tile.tile_m, tile.tile_n]));
                    TileScheduler::declare(b, spec.scheduler, &lookup, tile_counter, of, walkers)
                }
                Walk::Shares(shares) => TileScheduler::declare_shares(b, shares, walkers),
            },
            params,
        }
    }

    /// Prefetches what the first loads of a short call would wait for, one after another: tensor maps, lengths, page
    /// tables and lists. Prefetches read nothing, so they need not wait for the kernel before.
    #[track_caller]
    pub(super) fn prefetch(&self) {
        let (b, Params { q, qv, k, v, walk, pages, lists, .. }) = (self.builder, &self.params);
        let Walk::Shares(shares) = walk else { return };
        b.once_in_warp(0, || {
            let maps = [Some(*q), *qv, *k, *v].into_iter().flatten();
            maps.for_each(|map| b.prefetch_tensor_map(map.tensor_map()));
        });
        shares.prefetch(b);
        if let Some(pages) = pages {
            pages.prefetch(b, shares.count);
        }
        if let Some(lists) = lists {
            lists.prefetch(b, shares.count);
        }
    }

    /// Waits for the cluster's other CTA, which may still load into this CTA's memory, or arrive at its mbarriers.
    #[track_caller]
    pub(super) fn leave_together(&self) {
        if self.spec.cluster > 1 {
            self.builder.cluster_sync();
        }
    }

    /// Stores rows of tiles that no load writes, before threads take roles: a column of ones behind V in each stage, if
    /// V is transposed in memory, and zeros in rows of Q beyond the last whole position.
    #[track_caller]
    pub(super) fn store_constants(&self) {
        let (b, tile) = (self.builder, &self.spec.tile);
        let rows = self.spec.q_rows();
        if rows < tile.tile_m {
            for pipeline in [Some(&self.q), self.qv.as_ref()].into_iter().flatten() {
                let [to] = pipeline.stages().tiles_of(0);
                constants::store_zeros(b, to.rows(rows, tile.tile_m - rows), b.tid(), tile.threads());
            }
            b.fence(FenceInst::ProxyAsyncShared);
        }
        if self.spec.v_is_transposed() {
            for stage in 0..tile.stages {
                let [to] = self.v.stages().tiles_of(stage);
                constants::store_ones(b, to, b.tid(), tile.threads());
            }
            b.fence(FenceInst::ProxyAsyncShared);
        }
    }

    /// The work tile, with the last block that its rows see as its last one, if bits say which blocks they see.
    #[track_caller]
    pub(super) fn cut(&self, work: WorkTile<'k>, in_warp: bool) -> WorkTile<'k> {
        let Some(words) = self.block_words(&work, in_warp, None) else { return work };
        let end = words.last_end(work.kv.end, work.kv.first);
        WorkTile { kv: KvRange { end, ..work.kv }, ..work }
    }

    /// The words that say which blocks of keys a work tile visits, and which of them warpgroup `me` sees, if any do.
    #[track_caller]
    fn block_words(&self, work: &WorkTile<'k>, in_warp: bool, me: Option<U32<'k>>) -> Option<BlockWords<'k>> {
        let rows = self.params.intervals.filter(|_| self.spec.lists_blocks())?;
        let tile = &self.spec.tile;
        rows.block_words(self.builder, work, [tile.tile_m, tile.tile_n], in_warp, me)
    }

    /// The KV blocks that a work tile visits, as all lanes of a warp know them, or one thread; for consumer warpgroup
    /// `me`, if it is one.
    #[track_caller]
    pub(super) fn blocks_by(&self, work: &WorkTile<'k>, in_warp: bool, me: Option<U32<'k>>) -> KvBlocks<'k> {
        self.blocks(work).with_words(self.block_words(work, in_warp, me))
    }

    /// The KV blocks that a work tile visits.
    #[track_caller]
    pub(super) fn blocks(&self, work: &WorkTile<'k>) -> KvBlocks<'k> {
        let (mask, keys) = (self.spec.mask, self.spec.tile.tile_n);
        let blocks = KvBlocks::of(self.builder, work.kv, keys, mask).in_ranges(work.ranges, mask);
        let blocks = blocks.listed(self.seen.is_some());
        match mask.intervals().filter(|_| !self.spec.finds_ranges()).map(|form| form.of_row) {
            None | Some(IntervalsOfRow::Blocks { .. }) => blocks,
            Some(IntervalsOfRow::One | IntervalsOfRow::Two) => blocks.all_masked(),
            // Every row sees the keys before the new ones.
            Some(IntervalsOfRow::Causal { .. } | IntervalsOfRow::Tree { .. }) => {
                blocks.masked_from(Int::sub_sat(work.lens.k, work.lens.q), mask)
            }
        }
    }
}
