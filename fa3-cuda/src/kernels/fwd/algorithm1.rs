//! Algorithm 1: products and softmax one after the other.

use super::attend::{Attend, Sum};
use super::query::Query;
use crate::kernels::parts::kv_blocks::{KvBlock, KvBlocks};

impl<'k> Attend<'_, 'k> {
    /// The ping-pong turn lasts from PV of one block to QKᵀ of the next. Where each warpgroup has its own list, it
    /// passes over the blocks that others see. It holds no stage meanwhile, so that all blocks come by.
    pub(super) fn algorithm1(&mut self, q: &Query<'_, 'k>, blocks: &KvBlocks<'k>, sum: &mut Sum<'k>) {
        let b = self.fwd.builder;
        self.turn.take();
        blocks.for_each(0, |block| match block.own {
            None => self.add_block(q, &block, sum),
            Some(own) => {
                b.if_uniform(own, || self.add_block(q, &block, sum));
                b.if_uniform(!own, || self.pass_over(q, &block));
            }
        });
        self.turn.pass();
    }

    fn add_block(&mut self, q: &Query<'_, 'k>, block: &KvBlock<'k>, sum: &mut Sum<'k>) {
        let mut s = self.products_ending_turn(q, block); // A1:16-17
        q.apply(&mut s, block);
        let shrink = sum.softmax.step(&mut s); // A1:18-19
        sum.o.scale_rows(shrink); // A1:21
        let p = self.p.round(&s); // A1:20
        self.turn.take();
        self.add_product(&p, &mut sum.o); // A1:20, A1:22
    }

    fn pass_over(&mut self, q: &Query<'_, 'k>, block: &KvBlock<'k>) {
        let k = self.k.wait();
        self.k.release(k);
        q.stage.release_if(block.last);
        let v = self.v.wait();
        self.v.release(v);
    }
}
