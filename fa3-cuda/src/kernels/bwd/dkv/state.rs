//! The state that the roles of the dK/dV kernel share.

use fa3_ir::lang::*;
use fa3_sched::FastDiv;
use fa3_sched::backward::DkvTile;
use fa3_types::Intervals;

use super::order::InOrder;
use crate::kernels::bwd::gradients::registers_tile;
use crate::kernels::bwd::params::{DkvParams, DqAccumParams};
use crate::kernels::bwd::spec::PartSpec;
use crate::kernels::params::InKernel;
use crate::kernels::parts::block_column::BlockColumn;
use crate::kernels::parts::geometry::WorkTile;
use crate::kernels::parts::intervals::IntervalRows;
use crate::kernels::parts::kv_blocks::{KvBlock, KvBlocks};
use crate::kernels::parts::lookup::{Lookup, SequenceForm};
use crate::kernels::parts::ping_pong::PingPong;
use crate::kernels::parts::tile_scheduler::TileScheduler;
use crate::kernels::parts::tma_pipeline::TmaPipeline;

/// The state that the roles (producer, consumers, writers) share.
pub(super) struct Dkv<'k> {
    pub(super) builder: &'k Builder,
    pub(super) spec: PartSpec<DkvTile>,
    pub(super) params: DkvParams<InKernel<'k>>,
    pub(super) k: TmaPipeline<'k>,
    pub(super) v: TmaPipeline<'k>,
    /// The pipeline of blocks of Q, of row statistics and of dO.
    pub(super) rows: Pipeline<'k, 3>,
    pub(super) scheduler: TileScheduler<'k>,
}

/// State of the additions to dQ.
pub(super) struct Adding<'k> {
    /// The pipeline of dSᵀ, with a stage for the current block and one for the previous block.
    pub(super) ds: Pipeline<'k, 1>,
    /// Stages for dQ of a block, or of half a block. Each consumer has one stage, which its writer hands over.
    pub(super) dq: Pipeline<'k, 1>,
    /// The state of additions in order (deterministic).
    pub(super) in_order: Option<InOrder<'k>>,
    /// The barriers that make exponentials of one consumer overlap products of the other.
    pub(super) ping_pong: PingPong<'k>,
    pub(super) dq_accum: DqAccumParams<InKernel<'k>>,
}

impl<'k> Adding<'k> {
    #[track_caller]
    pub(super) fn declare(
        b: &'k Builder,
        spec: &PartSpec<DkvTile>,
        lookup: &Lookup<InKernel<'k>>,
        mut dq_accum: DqAccumParams<InKernel<'k>>,
    ) -> Adding<'k> {
        let tile = &spec.tile;
        let warps = 4 * tile.consumers();
        let shape = TileShape::new(spec.elem, tile.tile_n, tile.tile_m);
        let readers = if tile.adds_halves() { warps } else { 4 };
        Adding {
            ds: b.stored_pipeline("ds", 2, [warps, readers], [("ds", shape)]),
            dq: b.stored_pipeline("dq", tile.consumers(), [1, 4], [("dq", registers_tile(tile.head_dim))]),
            in_order: dq_accum.in_order.take().map(|order| InOrder::declare(b, tile, lookup, order)),
            ping_pong: PingPong::declare(b, tile.consumers()),
            dq_accum,
        }
    }
}

impl<'k> Dkv<'k> {
    /// The sequence, head and row in padded arrays of a row of Q. With a table, these arrays hold all sequences as one.
    #[track_caller]
    pub(super) fn padded_row(&self, work: &WorkTile<'k>, head: U32<'k>, row: U32<'k>) -> [U32<'k>; 3] {
        match work.varlen.and_then(|varlen| varlen.padded_row) {
            None => [work.batch, head, row],
            Some(padded_row) => [self.builder.value(0), head, padded_row + row],
        }
    }

    /// Index of a row of Q in its tensor: absolute in a packed tensor, within the batch entry in a dense tensor.
    #[track_caller]
    pub(super) fn row_in_memory(&self, work: &WorkTile<'k>, row: U32<'k>) -> U32<'k> {
        work.varlen.map_or(row, |varlen| varlen.k_row + row)
    }

    /// Runs `body` for every query head that shares the tile's head of K and V, with every block of the head's rows
    /// that sees some key of the tile. `body` gets the result of `of_head` for the block's head.
    #[track_caller]
    pub(super) fn for_each_block<H>(
        &self,
        work: &WorkTile<'k>,
        of_head: impl FnOnce(U32<'k>) -> H,
        mut body: impl FnMut(&H, KvBlock<'k>),
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
        if self.spec.score.is_some() && self.spec.mask.bounds().is_some() {
            // A block that reaches beyond the last row is masked: the function may overflow in rows beyond it.
            let whole = FastDiv::new(tile.tile_m).map(|number| b.value(number)).quotient(work.lens.k);
            kv.unmasked_end = kv.unmasked_end.min(whole).max(kv.unmasked_first);
        }
        let blocks = KvBlocks::of(b, kv, tile.tile_m, self.spec.mask);
        self.for_each_head(work, |head| {
            let column = self.column(work, head);
            let head = of_head(head);
            blocks.for_each_upwards(column, |block| body(&head, block));
        });
    }

    /// The bits that say which blocks of rows of a query head see a tile, if there are bits.
    #[track_caller]
    fn column(&self, work: &WorkTile<'k>, head: U32<'k>) -> Option<BlockColumn<'k>> {
        let rows = self.params.inputs.intervals.and_then(IntervalRows::blocks)?;
        let tile = &self.spec.tile;
        rows.block_column(self.builder, work, head, [tile.tile_n, tile.tile_m])
    }

    /// Runs `body` for the heads and blocks of `for_each_block`, with each block's first row instead of the block.
    #[track_caller]
    pub(super) fn for_each_row(&self, work: &WorkTile<'k>, body: impl FnOnce(U32<'k>, U32<'k>)) {
        let (b, rows) = (self.builder, self.spec.tile.tile_m);
        let (first, end) = (work.kv.first * rows, work.kv.end * rows);
        self.for_each_head(work, |head| match self.column(work, head) {
            None => b.for_each((first, end), rows, |row| body(head, row)),
            Some(column) => column.for_each((work.kv.first, work.kv.end), |block| body(head, block * rows)),
        });
    }

    /// Runs `body` for every query head that shares the tile's head of K and V.
    #[track_caller]
    pub(super) fn for_each_head(&self, work: &WorkTile<'k>, body: impl FnOnce(U32<'k>)) {
        let head = work.head * self.params.group;
        self.builder.for_each((head, head + self.params.group), 1, body);
    }

    /// Whether each consumer has its own list of blocks of rows, because a tile has several listed blocks of keys.
    pub(super) fn lists_are_own(&self) -> bool {
        let side = self.spec.mask.intervals().and_then(Intervals::block_side);
        side.is_some_and(|side| side.rows() < self.spec.tile.tile_n as usize)
    }

    /// Whether an idle tile, which no row sees, may come after other tiles: a tile of keys before all keys that
    /// the first row sees, or a tile of a sequence without rows.
    pub(super) fn has_idle_tiles(&self) -> bool {
        let (_, last) = self.spec.mask.reach();
        let has_intervals = self.spec.mask.intervals().is_some();
        has_intervals || last.is_some() || self.spec.sequences == SequenceForm::Varlen
    }

    /// Whether some row sees the tile.
    #[track_caller]
    pub(super) fn visits(&self, work: &WorkTile<'k>) -> V<'k, Pred> {
        work.kv.first.lt(work.kv.end)
    }
}
