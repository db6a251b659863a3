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

/// The state that the roles share.
pub(super) struct Dkv<'k> {
    pub(super) builder: &'k Builder,
    pub(super) spec: PartSpec<DkvTile>,
    pub(super) params: DkvParams<InKernel<'k>>,
    pub(super) k: Feed<'k>,
    pub(super) v: Feed<'k>,
    /// Blocks of Q, of two numbers a row, and of dO.
    pub(super) rows: Ring<'k, 3>,
    pub(super) works: Works<'k>,
}

/// Where dQ goes, if it is added up.
pub(super) struct Adding<'k> {
    /// dSᵀ of a block and of the one before.
    pub(super) ds: Ring<'k, 1>,
    /// Places for dQ of a block, or of half of one. Each consumer has a stage, which a writer of its own lends it.
    pub(super) dq: Ring<'k, 1>,
    /// The order, if there is one.
    pub(super) in_order: Option<InOrder<'k>>,
    /// Keeps the exponentials of one consumer under the products of the other.
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
    /// The sequence, head and row of arrays with places for rows of Q: of a table they are all of one sequence.
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

    /// The number of a row of Q in memory: in a packed tensor, or in the sequence of a dense one.
    #[track_caller]
    pub(super) fn row_in_memory(&self, work: &Work<V<'k, B32>>, row: V<'k, B32>) -> V<'k, B32> {
        work.listed.map_or(row, |listed| listed.k_row + row)
    }

    /// Runs `body` for every head of Q that shares a tile's keys, and every block of its rows that sees some.
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
            // All blocks of a tile that reaches beyond the keys are masked.
            let whole = (work.row + tile.tile_n).le(work.lens.q);
            kv.unmasked_first = whole.select(kv.unmasked_first, kv.first);
            kv.unmasked_end = whole.select(kv.unmasked_end, kv.first);
        }
        let blocks = KvBlocks::of(b, kv, tile.tile_m, self.spec.mask);
        self.for_each_head(work, |head| blocks.for_each_upwards(|block| body(head, block)));
    }

    /// The same with the block's first row alone.
    #[track_caller]
    pub(super) fn for_each_row(&self, work: &Work<V<'k, B32>>, body: impl FnOnce(V<'k, B32>, V<'k, B32>)) {
        let (b, rows) = (self.builder, self.spec.tile.tile_m);
        let (first, end) = (work.kv.first * rows, work.kv.end * rows);
        self.for_each_head(work, |head| b.for_each((first, end), rows, |row| body(head, row)));
    }

    /// Runs `body` for every head of Q that shares a tile's keys.
    #[track_caller]
    pub(super) fn for_each_head(&self, work: &Work<V<'k, B32>>, body: impl FnOnce(V<'k, B32>)) {
        let head = work.head * self.params.group;
        self.builder.for_each((head, head + self.params.group), 1, body);
    }

    /// Whether tiles that see none may come after others: those of keys before what the first row sees, or of a
    /// sequence without rows.
    pub(super) fn has_idle_tiles(&self) -> bool {
        let (_, last) = self.spec.mask.reach();
        let has_intervals = self.spec.mask.intervals().is_some();
        has_intervals || last.is_some() || self.spec.sequences == SequenceForm::Listed
    }

    /// Whether a tile sees any.
    #[track_caller]
    pub(super) fn visits(&self, work: &Work<V<'k, B32>>) -> V<'k, Pred> {
        work.kv.first.lt(work.kv.end)
    }
}
