//! Deterministic additions to dQ: the tile with the last keys adds first, and the tile with the first keys adds last.
//!
//! A writer adds to a block after the tile of the keys that follow has added, and then sets the block's semaphore. The
//! first tile to add stores its part. The last one does not add in memory: its writer loads the accumulator, and the
//! consumer adds, rounds and writes dQ ([`super::dq`]).
//!
//! One more warp, the semaphore warp, polls the semaphores of block after block. It runs ahead of the writers, so that
//! polling adds no time to an addition.

use fa3_ir::lang::*;
use fa3_sched::KvRange;
use fa3_sched::backward::ADDED_ROWS;

use super::blocks::{AddedBlock, AddedBlocks};
use super::order::{DqAction, END, Ends, InOrder};
use super::state::{Adding, Dkv};
use crate::kernels::parts::geometry::WorkTile;

/// The value of `unsignaled` when every semaphore is set.
const NONE: u32 = u32::MAX;

/// Runs the writer of consumer `me`.
pub(super) fn add<'k>(dkv: &Dkv<'k>, adding: &Adding<'k>, order: &InOrder<'k>, me: U32<'k>) {
    let b = dkv.builder;
    let blocks = AddedBlocks::of(dkv, adding, me);
    let stage = adding.dq.stage(me).handoff();
    let (ready, unsignaled) = (order.ready.consumer(), b.var("unsignaled", NONE));
    let mut writer = DqWriter { dkv, adding, order, me, stage, ready, unsignaled };
    dkv.scheduler.consume_kept(|ref work| {
        // `begin` and `end` are computed before the branch, because ptxas has too few registers to compute them after
        // it.
        let (begin, end) = (rows_before(dkv, work), rows_after(dkv, work));
        let visits = dkv.visits(work);
        blocks.begin_tile(visits);
        b.if_uniform(visits, || {
            blocks.skip_zeros(|| {
                writer.hand_over();
                writer.stage.take_back();
            });
            blocks.for_each(work, |block| {
                let (is_first, is_last) = (block.row.lt(begin), block.row.ge(end));
                block.if_mine(b, || {
                    b.if_uniform(is_last, || writer.finish(work, block, is_first));
                    b.if_uniform(!is_last, || writer.add(work, block, is_first));
                });
                block.if_anothers(b, || writer.await_turn());
            });
            writer.signal(work);
        });
    });
}

/// The writer of a consumer.
struct DqWriter<'a, 'k> {
    dkv: &'a Dkv<'k>,
    adding: &'a Adding<'k>,
    order: &'a InOrder<'k>,
    me: U32<'k>,
    stage: StageHandoff<'k, 1>,
    ready: Consumer<'k, 0>,
    /// The index of the block to which the writer has added without setting its semaphore yet.
    unsignaled: Var<'k, B32>,
}

impl<'k> DqWriter<'_, 'k> {
    /// Adds the consumer's dQ to a block, or stores it if this tile is the first to add.
    #[track_caller]
    fn add(&mut self, work: &WorkTile<'k>, block: AddedBlock<'k>, is_first: V<'k, Pred>) {
        let b = self.dkv.builder;
        self.hand_over();
        self.signal(work);
        self.await_turn();
        let to = self.sum(block);
        let [dq] = self.stage.take_back(); // A3:32
        b.once_per_warp(|| {
            b.fence(FenceInst::ProxyAsyncGlobal);
            b.if_else_uniform(is_first, || b.store_tile_flat(dq, to), || b.add_tile_flat(dq, to)); // A3:33
            b.bulk_commit();
            b.bulk_wait_read(0);
        });
        self.unsignaled.set(block.number);
    }

    /// Lets the consumer add the accumulator to its dQ, and write dQ.
    #[track_caller]
    fn finish(&mut self, work: &WorkTile<'k>, block: AddedBlock<'k>, is_first: V<'k, Pred>) {
        let b = self.dkv.builder;
        self.signal(work);
        self.await_turn();
        b.once_per_warp(|| {
            let action = is_first.select::<B32>(DqAction::Write as u32, DqAction::AddAndWrite as u32);
            let (said, row) = (self.order.action(b, self.me), self.dkv.row_in_memory(work, block.row));
            b.store_vector(said, [action, work.batch, block.head, row]);
            if let Ends::Sent(ends) = self.order.ends {
                let end = self.dkv.row_in_memory(work, work.lens.k);
                b.store(self.me.mad(END, b.address(ends)), end);
            }
            b.if_uniform(is_first, || self.stage.hand_over().commit());
            b.if_uniform(!is_first, || {
                b.fence(FenceInst::ProxyAsyncGlobal);
                let from = self.sum(block);
                let mut stage = self.stage.hand_over();
                stage.load_flat(0, from);
                stage.commit();
            });
        });
        self.stage.take_back();
    }

    /// Hands the consumer its empty stage, which it fills with dQ for the writer.
    #[track_caller]
    fn hand_over(&mut self) {
        let b = self.dkv.builder;
        b.once_per_warp(|| {
            b.store(self.order.action(b, self.me), DqAction::Leave as u32);
            self.stage.hand_over().commit();
        });
    }

    /// Waits until the writer's addition is complete, and sets the semaphore. The consumer has its stage again by then.
    #[track_caller]
    fn signal(&mut self, work: &WorkTile<'k>) {
        let b = self.dkv.builder;
        b.if_uniform(self.unsignaled.now().ne(NONE), || {
            b.once_per_warp(|| self.order.params.last(self.unsignaled.get()).set(b, work.row));
            self.unsignaled.set(NONE);
        });
    }

    /// Waits until this tile may add to its next block.
    #[track_caller]
    fn await_turn(&mut self) {
        self.ready.wait().release_unfenced();
    }

    /// The address of a block's accumulator.
    #[track_caller]
    fn sum(&self, block: AddedBlock<'k>) -> U64<'k> {
        self.adding.dq_accum.address_of(block.number, self.dkv.spec.tile.head_dim)
    }
}

/// Runs the semaphore warp, which waits for the semaphores of blocks, and signals the writers.
pub(super) fn wait_for_semaphores<'k>(dkv: &Dkv<'k>, adding: &Adding<'k>, order: &InOrder<'k>) {
    let (b, tile) = (dkv.builder, &dkv.spec.tile);
    let mut ready = order.ready.producer();
    dkv.scheduler.consume_kept(|ref work| {
        b.if_uniform(dkv.visits(work), || {
            let begin = rows_before(dkv, work);
            dkv.for_each_row(work, |head, row| {
                let stage = ready.acquire();
                let first = adding.dq_accum.number(dkv.padded_row(work, head, row));
                b.if_uniform(row.ge(begin), || {
                    b.once_per_warp(|| {
                        for half in 0..tile.tile_m / ADDED_ROWS {
                            order.params.last(first + half).wait(b, work.row + tile.tile_n);
                        }
                    });
                });
                stage.commit_unfenced();
            });
        });
    });
}

/// The first row that the next tile of keys visits, or `u32::MAX` if there is no next tile. The next tile adds before
/// this one, so this tile is the first to add to earlier rows.
#[track_caller]
fn rows_before<'k>(dkv: &Dkv<'k>, work: &WorkTile<'k>) -> U32<'k> {
    let blocks = blocks_of(dkv, work, 1);
    let visits = blocks.first.lt(blocks.end);
    visits.select(blocks.first * dkv.spec.tile.tile_m, u32::MAX)
}

/// The end of the rows that the previous tile of keys visits, or 0 if there is no previous tile. The previous tile adds
/// after this one, so this tile is the last to add from that end on.
#[track_caller]
fn rows_after<'k>(dkv: &Dkv<'k>, work: &WorkTile<'k>) -> U32<'k> {
    let blocks = blocks_of(dkv, work, -1);
    let visits = blocks.first.lt(blocks.end) & work.row.gt(0);
    visits.select(blocks.end * dkv.spec.tile.tile_m, 0)
}

/// The blocks of rows that the tile `distance` tiles away visits.
#[track_caller]
fn blocks_of<'k>(dkv: &Dkv<'k>, work: &WorkTile<'k>, distance: i32) -> KvRange<U32<'k>> {
    let tile_n = dkv.spec.tile.tile_n;
    dkv.params.inputs.lookup.kv_range((work.row >> tile_n.ilog2()) + distance, work.lens)
}
