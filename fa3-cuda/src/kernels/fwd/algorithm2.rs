//! Algorithm 2: the softmax of a block under PV of the block before.

use fa3_ir::lang::{Fresh, gemm};

use super::consumer::{Attend, Query, Sum};
use crate::kernels::parts::kv_blocks::KvBlocks;

impl<'k> Attend<'_, 'k> {
    /// With lazy rescaling. A warpgroup's own PV is waited for before its softmax, since O may have to be rescaled in
    /// it; what overlaps are warpgroups.
    pub(super) fn algorithm2(&mut self, q: &Query<'_, 'k>, blocks: &KvBlocks<'k>, sum: &mut Sum<'k>) {
        let mut s = self.block_scores(q, &blocks.at(0)); // A2:3-5
        let mut p = sum.softmax.first(&mut s, self.p); // A2:6, O is still 0
        blocks.for_each(1, |block| {
            // A2:7, to T_c - 1
            let k = self.k.wait(); // A2:8
            self.turn.take();
            let s = gemm(q.tile, k.tile().t(), Fresh); // A2:9, in flight
            let v = self.v.wait(); // A2:10
            let pv = gemm(&p, v.tile(), &mut sum.o); // A2:11, in flight
            self.turn.pass();
            let mut s = s.wait(); // A2:12
            self.k.release(k); // A2:15
            q.slot.release_if(block.last);
            q.apply(&mut s, &block);
            let o = pv.wait(); // A2:14
            self.v.release(v); // A2:15
            p.set(&sum.softmax.step_lazily(&s, self.p, o)); // A2:13-14, A2:16
        });
        self.add_last_product(&p, &mut sum.o); // A2:18-19
    }

    /// As printed: the row_max of every block, and the softmax under the warpgroup's own PV as well.
    pub(super) fn algorithm2_every_block(
        &mut self,
        q: &Query<'_, 'k>,
        blocks: &KvBlocks<'k>,
        sum: &mut Sum<'k>,
    ) {
        let mut s = self.block_scores(q, &blocks.at(0)); // A2:3-5
        sum.softmax.step(&mut s); // A2:6, O is still 0
        let mut p = self.p.round(&s);
        blocks.for_each(1, |block| {
            // A2:7, to T_c - 1
            let k = self.k.wait(); // A2:8
            self.turn.take();
            let s = gemm(q.tile, k.tile().t(), Fresh); // A2:9, in flight
            let v = self.v.wait(); // A2:10
            let pv = gemm(&p, v.tile(), &mut sum.o); // A2:11, in flight
            self.turn.pass();
            let mut s = s.wait(); // A2:12
            self.k.release(k); // A2:15
            q.slot.release_if(block.last);
            q.apply(&mut s, &block);
            let shrink = sum.softmax.step(&mut s); // A2:13
            let o = pv.wait(); // A2:14
            self.v.release(v); // A2:15
            o.scale_rows(shrink); // A2:14
            p.set(&self.p.round(&s)); // A2:16
        });
        self.add_last_product(&p, &mut sum.o); // A2:18-19
    }
}
