//! Algorithm 2: QKᵀ of a block and PV of the previous block are in flight together.

use fa3_ir::lang::{Fresh, gemm};

use super::attend::{Attend, Sum};
use super::merged;
use super::query::Query;
use crate::kernels::parts::kv_blocks::KvBlocks;

impl<'k> Attend<'_, 'k> {
    /// The paper's form runs the softmax of a block under PV of the block before, and rescales O in every block. With
    /// lazy rescaling the softmax may rescale O itself, so it waits for PV, and overlaps the products of other
    /// warpgroups.
    pub(super) fn algorithm2(&mut self, q: &Query<'_, 'k>, blocks: &KvBlocks<'k>, sum: &mut Sum<'k>) {
        let lazily = self.fwd.spec.tile.rescales_lazily();
        let (mut s, exponents) = self.block_scores(q, &blocks.at(0)); // A2:3-5
        let mut p = if lazily {
            sum.softmax.first(&mut s, exponents.as_ref(), self.p) // A2:6, O is still 0
        } else {
            sum.softmax.step(&mut s); // A2:6, O is still 0
            self.p.round(&s)
        };
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
            q.stage.release_if(block.last);
            let exponents = q.apply(&mut s, &block);
            let shrink = (!lazily).then(|| sum.softmax.step(&mut s)); // A2:13, under PV
            let o = pv.wait(); // A2:14
            self.v.release(v); // A2:15
            match shrink {
                Some(shrink) => {
                    o.scale_rows(shrink); // A2:14
                    p.set(&self.p.round(&s)); // A2:16
                }
                None => {
                    let softmax = (&sum.softmax, sum.merged.as_ref());
                    let scores = (&mut s, exponents.as_ref(), self.p);
                    merged::step_lazily(softmax, &block, scores, (&mut p, o)); // A2:13-14, A2:16
                }
            }
        });
        self.add_last_product(&p, &mut sum.o); // A2:18-19
    }
}
