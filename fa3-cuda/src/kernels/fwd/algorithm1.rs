//! Algorithm 1: products and softmax one after the other.

use fa3_ir::lang::*;
use fa3_sched::forward::Rescale;

use super::consumer::{Attend, Query, Sum};
use crate::kernels::parts::kv_blocks::KvBlocks;

impl<'k> Attend<'_, 'k> {
    /// A turn lasts from PV of one block to QKᵀ of the next.
    pub(super) fn algorithm1(&mut self, q: &Query<'_, 'k>, blocks: &KvBlocks<'k>, sum: &mut Sum<'k>) {
        self.turn.take();
        blocks.for_each(0, |block| {
            let mut s = self.products_ending_turn(q, &block); // A1:16-17
            q.apply(&mut s, &block);
            let p = self.softmax(&mut s, sum); // A1:18-21
            self.turn.take();
            self.add_product(&p, &mut sum.o); // A1:20-22
        });
        self.turn.pass();
    }

    /// P of a block, to which O is rescaled.
    fn softmax(&self, s: &mut Frag<'k>, sum: &mut Sum<'k>) -> AFrag<'k> {
        match self.fwd.spec.tile.rescale {
            Rescale::Lazy => sum.softmax.step_lazily(s, self.p, &mut sum.o),
            Rescale::EveryBlock => {
                let shrink = sum.softmax.step(s);
                sum.o.scale_rows(shrink);
                self.p.round(s)
            }
        }
    }
}
