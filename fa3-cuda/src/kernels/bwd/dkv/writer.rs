//! The writers of dQ, one for each consumer: warps of the producer's warpgroup. A writer lends its consumer a place in
//! shared memory, the consumer leaves its dQ of a block there, and the writer adds it to the sums.

use fa3_ir::lang::*;
use fa3_sched::backward::{ADDED_ROWS, DkvTile};

use super::{Adding, Dkv, in_order};
use crate::kernels::parts::geometry::Work;

/// Warps that the producer's warpgroup has besides the one that loads.
pub(super) fn warps(tile: &DkvTile) -> u32 {
    let writers = if tile.adds_dq.is_some() { tile.consumers() } else { 0 };
    writers + u32::from(tile.adds_in_order())
}

/// Runs these warps.
pub(super) fn run<'k>(dkv: &Dkv<'k>, adding: &Adding<'k>) {
    let (b, consumers) = (dkv.builder, dkv.spec.tile.consumers());
    let warp = (b.tid() >> 5).shfl_idx(0);
    b.if_uniform(warp.ge(1) & warp.le(consumers), || match &adding.in_order {
        None => add(dkv, adding, warp - 1),
        Some(order) => in_order::add(dkv, adding, order, warp - 1),
    });
    if let Some(order) = &adding.in_order {
        b.if_uniform(warp.eq(consumers + 1), || in_order::watch(dkv, adding, order));
    }
}

/// Runs the writer of consumer `me`, if tiles add in any order.
fn add<'k>(dkv: &Dkv<'k>, adding: &Adding<'k>, me: V<'k, B32>) {
    let (b, head_dim) = (dkv.builder, dkv.spec.tile.head_dim);
    let mut place = adding.dq.stage(me).lender();
    let blocks = Blocks::of(dkv, adding, me);
    dkv.works.consume_kept(|ref work| {
        let visits = dkv.visits(work);
        blocks.begin_tile(visits);
        b.if_uniform(visits, || {
            blocks.skip_zeros(|| {
                b.once_per_warp(|| place.lend().commit());
                place.back();
            });
            blocks.for_each(work, |block| {
                block.if_mine(b, || {
                    b.once_per_warp(|| place.lend().commit());
                    let [dq] = place.back(); // A3:32
                    b.once_per_warp(|| {
                        b.add_tile_flat(dq, adding.sums.address_of(block.number, head_dim)); // A3:33
                        b.bulk_commit();
                        b.bulk_wait_read(0);
                    });
                });
            });
        });
    });
}

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
