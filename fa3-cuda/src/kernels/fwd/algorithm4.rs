//! Algorithm 4: the softmax of a block overlaps QKᵀ of the next block and PV of the previous one.

use fa3_ir::lang::{Fresh, gemm};

use super::attend::{Attend, Sum};
use super::query::Query;
use crate::kernels::parts::kv_blocks::KvBlocks;

impl<'k> Attend<'_, 'k> {
    pub(super) fn algorithm4(&mut self, q: &Query<'_, 'k>, blocks: &KvBlocks<'k>, sum: &mut Sum<'k>) {
        let b = self.fwd.builder;
        let (mut s, _) = self.block_scores(q, &blocks.at(0)); // A4:2-3
        let shrink = b.rows_var("shrink", 0.0);
        shrink.set(sum.softmax.step(&mut s)); // A4:4
        let mut p = self.p.round(&s);
        b.if_uniform(blocks.count.gt(1), || {
            let (mut s, _) = self.block_scores(q, &blocks.at(1)); // A4:5-6
            blocks.for_each(2, |block| {
                // A4:7, for each block up to T_c - 1
                let k = self.k.wait();
                self.turn.take();
                let next = gemm(q.tile, k.tile().t(), Fresh); // A4:8-9, in flight
                let v = self.v.wait();
                sum.o.scale_rows(shrink.get()); // A4:11
                let pv = gemm(&p, v.tile(), &mut sum.o); // A4:10, in flight
                self.turn.pass();
                shrink.set(sum.softmax.step(&mut s)); // A4:13
                let mut next = next.wait(); // A4:14
                self.k.release(k);
                q.stage.release_if(block.last);
                pv.wait(); // A4:12
                self.v.release(v);
                p.set(&self.p.round(&s)); // A4:16
                q.apply(&mut next, &block);
                s.set(&next); // A4:15
            });
            sum.o.scale_rows(shrink.get()); // A4:19
            self.add_product(&p, &mut sum.o); // A4:18, A4:20
            shrink.set(sum.softmax.step(&mut s)); // A4:21
            p.set(&self.p.round(&s));
        });
        sum.o.scale_rows(shrink.get()); // A4:23
        self.add_last_product(&p, &mut sum.o); // A4:22, A4:24
    }
}
