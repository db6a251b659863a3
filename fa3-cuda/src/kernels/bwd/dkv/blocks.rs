//! The blocks of rows to which a tile of keys adds dQ. Each writer, a warp that adds dQ to memory for one consumer, has
//! its own list of blocks.

use fa3_ir::lang::*;
use fa3_sched::backward::ADDED_ROWS;

use super::state::{Adding, Dkv};
use crate::kernels::parts::geometry::WorkTile;

/// The blocks of [`ADDED_ROWS`] rows to which a writer adds dQ of a tile.
pub(super) struct AddedBlocks<'a, 'k> {
    dkv: &'a Dkv<'k>,
    adding: &'a Adding<'k>,
    me: U32<'k>,
    /// Index of the writer that adds to the next block, if the writers alternate.
    next: Var<'k, B32>,
    begun: Var<'k, Pred>,
}

/// A block of [`ADDED_ROWS`] rows of one query head.
#[derive(Clone, Copy)]
pub(super) struct AddedBlock<'k> {
    /// Whether this writer adds to the block; `None` if each writer has its own half of every block.
    is_mine: Option<V<'k, Pred>>,
    /// Index of the block's accumulator.
    pub(super) number: U32<'k>,
    /// Query head of the block.
    pub(super) head: U32<'k>,
    /// First row of the block.
    pub(super) row: U32<'k>,
}

impl<'a, 'k> AddedBlocks<'a, 'k> {
    /// The blocks of the writer that serves consumer `me`.
    #[track_caller]
    pub(super) fn of(dkv: &'a Dkv<'k>, adding: &'a Adding<'k>, me: U32<'k>) -> AddedBlocks<'a, 'k> {
        let b = dkv.builder;
        AddedBlocks { dkv, adding, me, next: b.var("next", 0), begun: b.var("begun", false) }
    }

    /// If consumers own halves of blocks, runs `skip` before the first block, and before the first block after an idle
    /// tile: consumers then begin with a block of zeros, whose dQ is not added.
    #[track_caller]
    pub(super) fn skip_zeros(&self, skip: impl FnOnce()) {
        if self.dkv.spec.tile.adds_halves() {
            self.dkv.builder.if_uniform(!self.begun, skip);
            self.begun.set(true);
        }
    }

    /// Begins a tile. After an idle tile, which visits no block, consumers begin with zeros again.
    #[track_caller]
    pub(super) fn begin_tile(&self, visits: V<'k, Pred>) {
        if self.dkv.spec.tile.adds_halves() && self.dkv.has_idle_tiles() {
            self.begun.set(self.begun.now() & visits);
        }
    }

    /// Runs `body` for each block of a tile. If writers own halves of blocks, `body` gets this writer's half.
    #[track_caller]
    pub(super) fn for_each(&self, work: &WorkTile<'k>, body: impl FnOnce(AddedBlock<'k>)) {
        let AddedBlocks { dkv, adding, me, next, .. } = self;
        dkv.for_each_row(work, |head, row| {
            let number = adding.dq_accum.number(dkv.padded_row(work, head, row));
            if dkv.spec.tile.adds_halves() {
                body(AddedBlock { is_mine: None, number: number + *me, head, row: me.mad(ADDED_ROWS, row) });
            } else {
                body(AddedBlock { is_mine: Some(next.get().eq(*me)), number, head, row });
                next.update(|next| next ^ 1);
            }
        });
    }
}

impl<'k> AddedBlock<'k> {
    /// Runs `body` if this writer adds to the block.
    #[track_caller]
    pub(super) fn if_mine(&self, b: &'k Builder, body: impl FnOnce()) {
        match self.is_mine {
            None => body(),
            Some(is_mine) => b.if_uniform(is_mine, body),
        }
    }

    /// Runs `body` if another writer adds to the block.
    #[track_caller]
    pub(super) fn if_anothers(&self, b: &'k Builder, body: impl FnOnce()) {
        if let Some(is_mine) = self.is_mine {
            b.if_uniform(!is_mine, body);
        }
    }
}
