//! The writers of dQ: one warp for each consumer, in the producer's warpgroup. A writer hands its consumer an empty dQ
//! stage, takes the filled stage back, and adds it to the accumulators.

use fa3_ir::lang::*;
use fa3_sched::backward::DkvTile;

use super::blocks::AddedBlocks;
use super::in_order;
use super::state::{Adding, Dkv};

/// Number of warps in the producer's warpgroup that do not load: writers, and the semaphore warp.
pub(super) fn warps(tile: &DkvTile) -> u32 {
    let writers = if tile.adds_dq.is_some() { tile.consumers() } else { 0 };
    writers + u32::from(tile.adds_in_order())
}

/// Runs the writers, and the semaphore warp if tiles add in order.
pub(super) fn run<'k>(dkv: &Dkv<'k>, adding: &Adding<'k>) {
    let (b, consumers) = (dkv.builder, dkv.spec.tile.consumers());
    let warp = (b.tid() >> 5).shfl_idx(0);
    b.if_uniform(warp.ge(1) & warp.le(consumers), || match &adding.in_order {
        None => add(dkv, adding, warp - 1),
        Some(order) => in_order::add(dkv, adding, order, warp - 1),
    });
    if let Some(order) = &adding.in_order {
        b.if_uniform(warp.eq(consumers + 1), || in_order::wait_for_semaphores(dkv, adding, order));
    }
}

/// Runs the writer of consumer `me`, if tiles add in any order.
fn add<'k>(dkv: &Dkv<'k>, adding: &Adding<'k>, me: U32<'k>) {
    let (b, head_dim) = (dkv.builder, dkv.spec.tile.head_dim);
    let mut stage = adding.dq.stage(me).handoff();
    let blocks = AddedBlocks::of(dkv, adding, me);
    dkv.scheduler.consume_kept(|ref work| {
        let visits = dkv.visits(work);
        blocks.begin_tile(visits);
        b.if_uniform(visits, || {
            blocks.skip_zeros(|| {
                b.once_per_warp(|| stage.hand_over().commit());
                stage.take_back();
            });
            blocks.for_each(work, |block| {
                block.if_mine(b, || {
                    b.once_per_warp(|| stage.hand_over().commit());
                    let [dq] = stage.take_back(); // A3:32
                    b.once_per_warp(|| {
                        b.add_tile_flat(dq, adding.dq_accum.address_of(block.number, head_dim)); // A3:33
                        b.bulk_commit();
                        b.bulk_wait_read(0);
                    });
                });
            });
        });
    });
}
