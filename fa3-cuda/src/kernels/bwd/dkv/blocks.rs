//! The blocks of rows to which a tile of keys adds its part of dQ, as one of the writers sees them.

use fa3_ir::lang::*;
use fa3_sched::backward::ADDED_ROWS;

use super::state::{Adding, Dkv};
use crate::kernels::parts::geometry::Work;

/// The blocks of [`ADDED_ROWS`] rows to which a tile adds, as one of the writers sees them.
pub(super) struct Blocks<'a, 'k> {
    dkv: &'a Dkv<'k>,
    adding: &'a Adding<'k>,
    me: V<'k, B32>,
    /// Index of the writer that adds the next block, if the writers alternate.
    next: Var<'k, B32>,
    begun: Var<'k, Pred>,
}

/// One of them.
#[derive(Clone, Copy)]
pub(super) struct Block<'k> {
    /// Whether this writer adds to it, if not every one does.
    is_mine: Option<V<'k, Pred>>,
    /// Its number among the sums.
    pub(super) number: V<'k, B32>,
    /// Its query head.
    pub(super) head: V<'k, B32>,
    /// Its first row.
    pub(super) row: V<'k, B32>,
}

impl<'a, 'k> Blocks<'a, 'k> {
    /// The blocks of the writer of consumer `me`.
    #[track_caller]
    pub(super) fn of(dkv: &'a Dkv<'k>, adding: &'a Adding<'k>, me: V<'k, B32>) -> Blocks<'a, 'k> {
        let b = dkv.builder;
        Blocks { dkv, adding, me, next: b.var("next", 0), begun: b.var("begun", false) }
    }

    /// Runs `skip` where blocks are halved, before the first one of all, and after an idle tile: for that of zeros
    /// before it.
    #[track_caller]
    pub(super) fn skip_zeros(&self, skip: impl FnOnce()) {
        if self.dkv.spec.tile.adds_halves() {
            self.dkv.builder.if_uniform(!self.begun, skip);
            self.begun.set(true);
        }
    }

    /// Begins with a tile. After one that visits nothing, consumers begin anew.
    #[track_caller]
    pub(super) fn begin_tile(&self, visits: V<'k, Pred>) {
        if self.dkv.spec.tile.adds_halves() && self.dkv.has_idle_tiles() {
            self.begun.set(self.begun.now() & visits);
        }
    }

    /// Runs `body` for each block of a tile, or of blocks of which every writer has half, for its half.
    #[track_caller]
    pub(super) fn for_each(&self, work: &Work<V<'k, B32>>, body: impl FnOnce(Block<'k>)) {
        let Blocks { dkv, adding, me, next, .. } = self;
        dkv.for_each_row(work, |head, row| {
            let number = adding.sums.number(dkv.place(work, head, row));
            if dkv.spec.tile.adds_halves() {
                body(Block { is_mine: None, number: number + *me, head, row: me.mad(ADDED_ROWS, row) });
            } else {
                body(Block { is_mine: Some(next.get().eq(*me)), number, head, row });
                next.update(|next| next ^ 1);
            }
        });
    }
}

impl<'k> Block<'k> {
    /// Runs `body` if this writer adds to it.
    #[track_caller]
    pub(super) fn if_mine(&self, b: &'k Builder, body: impl FnOnce()) {
        match self.is_mine {
            None => body(),
            Some(is_mine) => b.if_uniform(is_mine, body),
        }
    }

    /// Runs `body` if another one does.
    #[track_caller]
    pub(super) fn if_anothers(&self, b: &'k Builder, body: impl FnOnce()) {
        if let Some(is_mine) = self.is_mine {
            b.if_uniform(!is_mine, body);
        }
    }
}
