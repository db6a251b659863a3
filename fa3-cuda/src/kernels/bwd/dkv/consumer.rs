//! A consumer that has 64 keys of its own, and computes their dK and their dV.

use fa3_ir::lang::*;
use fa3_sched::backward::ADDED_ROWS;

use super::{Columns, Dkv, Stat};
use crate::kernels::bwd::gradients::registers;
use crate::kernels::bwd::params::SumsParams;
use crate::kernels::params::InKernel;

/// What it runs.
pub(super) fn run(dkv: &Dkv<'_>) {
    let (b, spec) = (dkv.builder, &dkv.spec);
    let me = b.warpgroup();
    let (mut k, mut v) = (dkv.k.consumer(), dkv.v.consumer());
    let (mut q, mut dout) = (dkv.q.consumer(), dkv.dout.consumer());
    let mut additions = Additions::of(dkv, me);
    dkv.tiles.consume(|tile| {
        let work = dkv.params.inputs.geometry.work(tile);
        let key = work.row + me.mad(64, b.frag_row());
        let mut dk = Frag::zeros(b, spec.tile.head_dim); // A3:16
        let mut dv = Frag::zeros(b, spec.tile.head_dim_v);
        b.if_uniform(dkv.visits(&work), || {
            let (k_slot, v_slot) = (k.wait(), v.wait());
            let [k, v] = [&k_slot, &v_slot].map(|slot| slot.tile().row_block(me, 64));
            dkv.for_each_block(&work, |head, block| {
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
                let turn = additions.as_mut().map(|additions| additions.give(&ds));
                let more_dk = gemm(&ds, q_tile, &mut dk);
                more_dv.wait();
                dout.release();
                more_dk.wait();
                q.release_loaded();
                if let Some((additions, turn)) = additions.as_mut().zip(turn) {
                    let row_block = block.key >> ADDED_ROWS.ilog2();
                    b.if_uniform(turn, || additions.add(k_slot.tile(), [work.batch, head, row_block]));
                }
            });
            k_slot.release();
            v_slot.release();
        });
        dkv.write_dv(dv, &work, key);
        dkv.write_dk(dk, &work, key);
    });
}

/// One consumer's part in dQ: it gives dSᵀ of every block to the consumer whose turn it is, and adds dQ = dS K of all keys
/// of the tile when it is its own.
struct Additions<'d, 'k> {
    dkv: &'d Dkv<'k>,
    sums: &'d SumsParams<InKernel<'k>>,
    me: V<'k, B32>,
    given: Producer<'k, 1>,
    taken: StageConsumer<'k, 1>,
}

impl<'d, 'k> Additions<'d, 'k> {
    #[track_caller]
    fn of(dkv: &'d Dkv<'k>, me: V<'k, B32>) -> Option<Additions<'d, 'k>> {
        let (ring, sums) = (dkv.ds.as_ref()?, dkv.params.sums.as_ref()?);
        Some(Additions { dkv, sums, me, given: ring.producer(), taken: ring.consumer_of_stage(me) })
    }

    /// Gives dSᵀ of the next block. Whether the turn is this consumer's.
    #[track_caller]
    fn give(&mut self, ds: &AFrag<'k>) -> V<'k, Pred> {
        let slot = self.given.acquire();
        let [tile] = slot.tiles();
        ds.store(tile.row_block(self.me, 64));
        let is_mine = slot.is_of_stage(self.me);
        slot.commit_stored();
        is_mine
    }

    /// Adds dQ of the block that all have given, one of a head.
    #[track_caller]
    fn add(&mut self, k: Tile<'_, 'k>, block: [V<'k, B32>; 3]) {
        let b = self.dkv.builder;
        let ds = self.taken.wait();
        let dq = gemm(ds.tile().t(), k, Fresh).wait();
        ds.release();
        self.sums.block(b, block, self.dkv.spec.tile.head_dim).add(b, &dq);
    }
}
