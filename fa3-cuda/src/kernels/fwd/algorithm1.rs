//! Algorithm 1: products and softmax one after the other.

use super::attend::{Attend, Sum};
use super::query::Query;
use crate::kernels::parts::kv_blocks::KvBlocks;

impl<'k> Attend<'_, 'k> {
    /// The ping-pong turn lasts from PV of one block to QKᵀ of the next.
    pub(super) fn algorithm1(&mut self, q: &Query<'_, 'k>, blocks: &KvBlocks<'k>, sum: &mut Sum<'k>) {
        self.turn.take();
        blocks.for_each(0, |block| {
            let mut s = self.products_ending_turn(q, &block); // A1:16-17
            q.apply(&mut s, &block);
            let shrink = sum.softmax.step(&mut s); // A1:18-19
            sum.o.scale_rows(shrink); // A1:21
            let p = self.p.round(&s); // A1:20
            self.turn.take();
            self.add_product(&p, &mut sum.o); // A1:20, A1:22
        });
        self.turn.pass();
    }
}
