//! The state that the roles of the dK/dV kernel share.

use fa3_ir::lang::*;
use fa3_sched::backward::DkvTile;

use super::order::InOrder;
use crate::kernels::bwd::gradients::registers_tile;
use crate::kernels::bwd::params::{DkvParams, SumsParams};
use crate::kernels::bwd::spec::PartSpec;
use crate::kernels::params::InKernel;
use crate::kernels::parts::geometry::Work;
use crate::kernels::parts::kv_blocks::{KvBlock, KvBlocks};
use crate::kernels::parts::loader::Feed;
use crate::kernels::parts::lookup::{Lookup, SequenceForm};
use crate::kernels::parts::ping_pong::PingPong;
use crate::kernels::parts::works::Works;

/// State that the roles share.
pub(super) struct Dkv<'k> {
    pub(super) builder: &'k Builder,
    pub(super) spec: PartSpec<DkvTile>,
    pub(super) params: DkvParams<InKernel<'k>>,
    pub(super) k: Feed<'k>,
    pub(super) v: Feed<'k>,
    /// The pipeline of blocks of Q, of row statistics and of dO.
    pub(super) rows: Ring<'k, 3>,
    pub(super) works: Works<'k>,
}

/// State of the additions to dQ.
pub(super) struct Adding<'k> {
    /// The pipeline of dSᵀ: the current block and the block before.
    pub(super) ds: Ring<'k, 1>,
    /// Stages for dQ of a block, or of half a block. Each consumer has one, which its writer hands out.
    pub(super) dq: Ring<'k, 1>,
    /// The state of additions in order (deterministic).
    pub(super) in_order: Option<InOrder<'k>>,
    /// The barriers that make exponentials of one consumer overlap products of the other.
    pub(super) ping_pong: PingPong<'k>,
    pub(super) sums: SumsParams<InKernel<'k>>,
}

impl<'k> Adding<'k> {
    #[track_caller]
    pub(super) fn declare(
        b: &'k Builder,
        spec: &PartSpec<DkvTile>,
        lookup: &Lookup<InKernel<'k>>,
        mut sums: SumsParams<InKernel<'k>>,
    ) -> Adding<'k> {
        let tile = &spec.tile;
        let warps = 4 * tile.consumers();
        let shape = TileShape::new(spec.elem, tile.tile_n, tile.tile_m);
        let readers = if tile.adds_halves() { warps } else { 4 };
        Adding {
            ds: b.stored_ring("ds", 2, [warps, readers], [("ds", shape)]),
            dq: b.stored_ring("dq", tile.consumers(), [1, 4], [("dq", registers_tile(tile.head_dim))]),
            in_order: sums.in_order.take().map(|order| InOrder::declare(b, tile, lookup, order)),
            ping_pong: PingPong::declare(b, tile.consumers()),
            sums,
        }
    }
}

impl<'k> Dkv<'k> {
    /// The indices of a row of Q in padded arrays: sequence, head and row. With a table, the arrays have one sequence.
    #[track_caller]
    pub(super) fn place(
        &self,
        work: &Work<V<'k, B32>>,
        head: V<'k, B32>,
        row: V<'k, B32>,
    ) -> [V<'k, B32>; 3] {
        match work.listed.and_then(|listed| listed.place) {
            None => [work.batch, head, row],
            Some(place) => [self.builder.value(0), head, place + row],
        }
    }

    /// Row index of Q in its tensor: absolute in a packed tensor, within the batch entry of a dense one.
    #[track_caller]
    pub(super) fn row_in_memory(&self, work: &Work<V<'k, B32>>, row: V<'k, B32>) -> V<'k, B32> {
        work.listed.map_or(row, |listed| listed.k_row + row)
    }

    /// Runs `body` for every query head that shares the tile's keys, and every block of its rows that sees some of
    /// them.
    #[track_caller]
    pub(super) fn for_each_block(
        &self,
        work: &Work<V<'k, B32>>,
        mut body: impl FnMut(V<'k, B32>, KvBlock<'k>),
    ) {
        let b = self.builder;
        let tile = &self.spec.tile;
        let mut kv = work.kv;
        if tile.adds_dq.is_some() {
            // A tile that reaches beyond the last key has only masked blocks.
            let whole = (work.row + tile.tile_n).le(work.lens.q);
            kv.unmasked_first = whole.select(kv.unmasked_first, kv.first);
            kv.unmasked_end = whole.select(kv.unmasked_end, kv.first);
        }
        let blocks = KvBlocks::of(b, kv, tile.tile_m, self.spec.mask);
        self.for_each_head(work, |head| blocks.for_each_upwards(|block| body(head, block)));
    }

    /// Like `for_each_block`, with the block's first row in place of the block.
    #[track_caller]
    pub(super) fn for_each_row(&self, work: &Work<V<'k, B32>>, body: impl FnOnce(V<'k, B32>, V<'k, B32>)) {
        let (b, rows) = (self.builder, self.spec.tile.tile_m);
        let (first, end) = (work.kv.first * rows, work.kv.end * rows);
        self.for_each_head(work, |head| b.for_each((first, end), rows, |row| body(head, row)));
    }

    /// Runs `body` for every query head that shares the tile's keys.
    #[track_caller]
    pub(super) fn for_each_head(&self, work: &Work<V<'k, B32>>, body: impl FnOnce(V<'k, B32>)) {
        let head = work.head * self.params.group;
        self.builder.for_each((head, head + self.params.group), 1, body);
    }

    /// Whether an idle tile, which no row sees, may come after other tiles: tiles before the first row's keys, or tiles
    /// of a sequence without rows.
    pub(super) fn has_idle_tiles(&self) -> bool {
        let (_, last) = self.spec.mask.reach();
        let has_intervals = self.spec.mask.intervals().is_some();
        has_intervals || last.is_some() || self.spec.sequences == SequenceForm::Listed
    }

    /// Whether some row sees the tile.
    #[track_caller]
    pub(super) fn visits(&self, work: &Work<V<'k, B32>>) -> V<'k, Pred> {
        work.kv.first.lt(work.kv.end)
    }
}
