//! The writers of dQ, one for each consumer: warps of the producer's warpgroup. A consumer gives its dQ of a block in
//! shared memory, and its writer adds it to the sums.
//!
//! If tiles add in order, one more warp, the watch, waits until this tile may add to block after block. It runs ahead
//! of the writers, so that the time of a poll does not add to that of an addition.

use fa3_ir::lang::*;
use fa3_sched::backward::{ADDED_ROWS, DkvTile};

use super::{Adding, Dkv};
use crate::kernels::bwd::gradients::store_registers;
use crate::kernels::parts::geometry::Work;

/// Blocks by which the watch runs ahead.
pub(super) const AHEAD: u32 = 4;

/// Warps that the producer's warpgroup has besides the one that loads.
pub(super) fn warps(tile: &DkvTile) -> u32 {
    let writers = if tile.adds_dq.is_some() { tile.consumers() } else { 0 };
    writers + u32::from(tile.adds_in_order())
}

/// Gives dQ to the writer, registers in the order of threads.
#[track_caller]
pub(super) fn give<'k>(dq: &Frag<'k>, slot: EmptySlot<'k, 1>) {
    let [tile] = slot.tiles();
    store_registers(dq, tile);
    slot.commit_stored();
}

/// What these warps run.
pub(super) fn run<'k>(dkv: &Dkv<'k>, adding: &Adding<'k>) {
    let (b, consumers) = (dkv.builder, dkv.spec.tile.consumers());
    let warp = (b.tid() >> 5).shfl_idx(0);
    b.if_uniform(warp.ge(1) & warp.le(consumers), || write(dkv, adding, warp - 1));
    if let Some(ready) = &adding.ready {
        b.if_uniform(warp.eq(consumers + 1), || watch(dkv, adding, ready));
    }
}

/// What the writer of consumer `me` runs.
fn write<'k>(dkv: &Dkv<'k>, adding: &Adding<'k>, me: V<'k, B32>) {
    let (b, tile) = (dkv.builder, &dkv.spec.tile);
    let mut given = adding.dq.consumer_of_stage(me);
    let mut ready = adding.ready.as_ref().map(Ring::consumer);
    // Whose block is next, where blocks go to the one consumer and the other.
    let next = b.var::<B32>("next", 0);
    for_each_tile(dkv, |work| {
        if tile.adds_halves() {
            // That of the zeros before the first block.
            given.wait().release();
        }
        let before = adding.ready.as_ref().map(|_| Before::of(dkv, work));
        let mut add = |number: V<'k, B32>, row: V<'k, B32>| {
            let first = before.as_ref().map(|before| !before.visits(row));
            let dq = given.wait(); // A3:32
            b.once_per_warp(|| {
                if adding.ready.is_some() {
                    b.fence(FenceInst::ProxyAsyncGlobal);
                }
                adding.sums.add(b, number, dq.tile(), tile.head_dim, first); // A3:33
                b.bulk_wait_read(0);
            });
            dq.release();
            if let Some(last) = adding.sums.last(number) {
                b.once_per_warp(|| last.set(b, work.row));
            }
        };
        dkv.for_each_row(work, |head, row| {
            let number = adding.number([work.batch, head, row]);
            if let Some(ready) = &mut ready {
                ready.wait().release_unfenced();
            }
            if tile.adds_halves() {
                add(number + me, row);
            } else {
                b.if_uniform(next.now().eq(me), || add(number, row));
                next.update(|next| next ^ 1);
            }
        });
    });
}

/// What the watch runs.
fn watch<'k>(dkv: &Dkv<'k>, adding: &Adding<'k>, ready: &Ring<'k, 0>) {
    let (b, tile) = (dkv.builder, &dkv.spec.tile);
    let mut ready = ready.producer();
    for_each_tile(dkv, |work| {
        let before = Before::of(dkv, work);
        dkv.for_each_row(work, |head, row| {
            let slot = ready.acquire();
            let first = adding.number([work.batch, head, row]);
            b.if_uniform(before.visits(row), || {
                b.once_per_warp(|| {
                    for half in 0..tile.tile_m / ADDED_ROWS {
                        if let Some(last) = adding.sums.last(first + half) {
                            last.wait(b, before.key);
                        }
                    }
                });
            });
            slot.commit_unfenced();
        });
    });
}

/// The tile that adds before another one, to the blocks that it visits.
struct Before<'k> {
    /// Its first key.
    key: V<'k, B32>,
    /// The first row of the first block, and of the first that it does not visit any more.
    first: V<'k, B32>,
    end: V<'k, B32>,
}

impl<'k> Before<'k> {
    /// The one before the tile of this work: that of the keys after its own, if there are any.
    #[track_caller]
    fn of(dkv: &Dkv<'k>, work: &Work<V<'k, B32>>) -> Before<'k> {
        let tile = &dkv.spec.tile;
        let key = work.row + tile.tile_n;
        let blocks = dkv.params.inputs.geometry.kv_range(key >> tile.tile_n.ilog2());
        Before { key, first: blocks.first * tile.tile_m, end: blocks.end * tile.tile_m }
    }

    /// Whether it visits the block that begins with this row.
    #[track_caller]
    fn visits(&self, row: V<'k, B32>) -> V<'k, Pred> {
        row.ge(self.first) & row.lt(self.end)
    }
}

/// Runs `body` for every tile that visits a block.
#[track_caller]
fn for_each_tile<'k>(dkv: &Dkv<'k>, body: impl FnOnce(&Work<V<'k, B32>>)) {
    dkv.tiles.consume(|index| {
        let work = dkv.params.inputs.geometry.work(index);
        dkv.builder.if_uniform(dkv.visits(&work), || body(&work));
    });
}
