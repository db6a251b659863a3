//! A consumer that has 64 keys of its own, computes their dK and their dV, and adds dQ of 64 of the 128 rows of every
//! block. dQ needs dSᵀ of all keys, and is computed a block later: by then both consumers have given theirs, so that
//! they need not keep step.

use fa3_ir::lang::*;
use fa3_sched::backward::ADDED_ROWS;

use super::outlet::Outlet;
use super::{Adding, Columns, Dkv, Stat};

/// What it runs.
pub(super) fn run<'k>(dkv: &Dkv<'k>, adding: &Adding<'k>) {
    let (b, spec) = (dkv.builder, &dkv.spec);
    let (tile_m, ty) = (spec.tile.tile_m, spec.product_type());
    let me = b.warpgroup();
    // Blocks of dS. Before the first one there is one of zeros, whose dQ the writer does not add.
    let blocks = Rounds::begin(b);
    // Blocks of rows. After an idle tile, there are zeros before the first one again.
    let read = dkv.has_idle_tiles().then(|| Rounds::begin(b));
    let (mut k, mut v) = (dkv.k.consumer(), dkv.v.consumer());
    let mut rows = dkv.rows.consumer_by(read.unwrap_or(blocks.late(1)));
    let (mut given, mut taken) = (adding.ds.producer_by(blocks), adding.ds.consumer_by(blocks.late(1)));
    let mut outlet = Outlet::of(dkv, adding, me, blocks.late(1));
    let turn = adding.ping_pong.of(b, me);
    let mut k_before = k.held_beside();
    // Whether dQ of a block is still to be multiplied.
    let is_late = b.var("is_late", false);
    let catch_up = |taken: &mut Consumer<'k, 1>, outlet: &mut Outlet<'_, 'k>, k_before: &HeldSlot<'k, 1>| {
        let ds_before = taken.wait(); // A3:32
        let my_ds = ds_before.tile().nth_col_block(me, ADDED_ROWS);
        let dq = gemm(my_ds.t(), k_before.tile(), Fresh).wait(); // A3:28
        ds_before.release();
        outlet.next().give(&dq);
    };
    dkv.tiles.consume(|tile| {
        let work = dkv.params.inputs.geometry.work(tile);
        let key = work.row + me.mad(64, b.frag_row());
        let mut dk = Frag::zeros(b, spec.tile.head_dim); // A3:16
        let mut dv = Frag::zeros(b, spec.tile.head_dim_v); // A3:16
        let visits = dkv.visits(&work);
        b.if_uniform(visits, || {
            let (k_slot, v_slot) = (k.wait(), v.wait()); // A3:17
            let [k, v] = [&k_slot, &v_slot].map(|slot| slot.tile().row_block(me, 64));
            b.if_uniform(!is_late, || {
                k_before.begin(&k_slot);
                let slot = given.acquire();
                Frag::zeros(b, tile_m).to_a(ty).store(slot.tiles()[0].row_block(me, 64));
                slot.commit_stored();
                blocks.next();
                is_late.set(true);
            });
            dkv.for_each_block(&work, |_, block| {
                // A3:18
                let slot = rows.wait(); // A3:19
                let [q, stats, dout] = slot.tiles();
                turn.take();
                let s = gemm(k, q.t(), Fresh); // A3:21
                let dp = gemm(v, dout.t(), Fresh); // A3:22-23
                let hidden = dkv.hidden(key, &block);
                let mut s = s.wait();
                let shifts = Columns::on_demand(b, stats, Stat::Shift);
                dkv.begin_p(&mut s, &shifts, hidden.as_ref()); // A3:24
                let mut dp = dp.wait();
                turn.pass();
                let minus_delta = Columns::on_demand(b, stats, Stat::MinusDelta);
                let [p, ds] = dkv.end_p(&s, &mut dp, [&shifts, &minus_delta], hidden.as_ref()); // A3:24-25
                let to_give = given.acquire();
                ds.store(to_give.tiles()[0].row_block(me, 64));
                let more_dv = gemm(&p, dout, &mut dv); // A3:26
                let ds_before = taken.wait(); // A3:32
                let my_ds = ds_before.tile().nth_col_block(me, ADDED_ROWS);
                let dq = gemm(my_ds.t(), k_before.tile(), Fresh); // A3:28
                let more_dk = gemm(&ds, q, &mut dk); // A3:27
                let draft = outlet.next();
                let dq = dq.wait();
                ds_before.release();
                k_before.advance(&k_slot);
                // Its fence is for dS, too, and for the loads of statistics.
                draft.give(&dq);
                to_give.commit_unfenced();
                more_dk.wait();
                more_dv.wait();
                slot.release();
                blocks.next();
                if let Some(read) = read {
                    read.next();
                }
            });
            k_before.keep(k_slot);
            v_slot.release();
        });
        if dkv.has_idle_tiles() {
            // Nobody knows when the next block comes: the tile after this one has no number before the writer has
            // taken this one's, and until then it waits for dQ.
            b.if_uniform(!visits, || {
                b.if_uniform(is_late, || {
                    catch_up(&mut taken, &mut outlet, &k_before);
                    k_before.release();
                    is_late.set(false);
                });
            });
        }
        dkv.write_dv(dv, &work, key);
        dkv.write_dk(dk, &work, key);
    });
    b.if_uniform(is_late, || catch_up(&mut taken, &mut outlet, &k_before));
    turn.end(b);
}
