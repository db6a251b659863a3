//! A consumer that has 64 keys of its own, and computes their dK and their dV.

use fa3_ir::lang::*;

use super::{Columns, Dkv, Stat};
use crate::kernels::bwd::gradients::registers;

/// What it runs.
pub(super) fn run(dkv: &Dkv<'_>) {
    let (b, spec) = (dkv.builder, &dkv.spec);
    let me = b.warpgroup();
    let (mut k, mut v) = (dkv.k.consumer(), dkv.v.consumer());
    let (mut q, mut dout) = (dkv.q.consumer(), dkv.dout.consumer());
    dkv.tiles.consume(|tile| {
        let work = dkv.params.inputs.geometry.work(tile);
        let key = work.row + me.mad(64, b.frag_row());
        let mut dk = Frag::zeros(b, spec.tile.head_dim); // A3:16
        let mut dv = Frag::zeros(b, spec.tile.head_dim_v);
        b.if_uniform(dkv.visits(&work), || {
            let (k_slot, v_slot) = (k.wait(), v.wait());
            let [k, v] = [&k_slot, &v_slot].map(|slot| slot.tile().row_block(me, 64));
            dkv.for_each_block(&work, |block| {
                let q = q.wait();
                let [q_tile, stats] = q.tiles();
                let s = gemm(k, q_tile.t(), Fresh);
                let dout = dout.wait();
                let dp = gemm(v, dout.tile().t(), Fresh);
                let shifts = Columns::load(b, stats, Stat::Shift);
                let mut s = s.wait();
                let p = dkv.p(&mut s, &shifts, key, &block);
                let more_dv = gemm(&p, dout.tile(), &mut dv);
                let deltas = Columns::load(b, stats, Stat::Delta);
                let dp = dp.wait();
                let ds = dkv.ds(&dp, &deltas, &registers(&s));
                let more_dk = gemm(&ds, q_tile, &mut dk);
                more_dv.wait();
                dout.release();
                more_dk.wait();
                q.release_loaded();
            });
            k_slot.release();
            v_slot.release();
        });
        dkv.write_dv(dv, &work, key);
        dkv.write_dk(dk, &work, key);
    });
}
