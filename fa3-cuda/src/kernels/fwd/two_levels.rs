//! Algorithms 1 and 2 for e4m3, whose products are summed in two levels. The tensor core keeps about 13 fraction bits
//! of a sum of e4m3 products. So each block's PV begins at 0, and O is multiplied and gets PV added in binary32: one
//! instruction an element.

use fa3_ir::lang::*;

use super::consumer::{Attend, Query, Sum};
use crate::kernels::parts::kv_blocks::KvBlocks;
use crate::kernels::parts::p_operand::P;

impl<'k> Attend<'_, 'k> {
    /// Where registers are short: QKᵀ, softmax and PV one after the other, what overlaps are warpgroups. PV takes the
    /// registers that S had, some columns after the other. A turn lasts from PV of one block to QKᵀ of the next.
    pub(super) fn algorithm1_in_two_levels(
        &mut self,
        q: &Query<'_, 'k>,
        blocks: &KvBlocks<'k>,
        sum: &mut Sum<'k>,
    ) {
        self.turn.take();
        blocks.for_each(0, |block| {
            let k = self.k.wait(); // A1:16
            let s = gemm(q.tile, k.tile().t(), Fresh); // A1:17
            self.turn.pass();
            let mut s = s.wait();
            self.k.release(k);
            q.slot.release_if(block.last);
            q.scores.apply(&mut s, q.row, &block);
            let shrink = sum.softmax.step(&mut s); // A1:18-19
            let p = self.p.round(&s);
            self.turn.take();
            self.add_in_two_levels(&p, shrink, &mut sum.o); // A1:20-22
        });
        self.turn.pass();
    }

    /// The softmax of a block under PV of the block before.
    pub(super) fn algorithm2_in_two_levels(
        &mut self,
        q: &Query<'_, 'k>,
        blocks: &KvBlocks<'k>,
        sum: &mut Sum<'k>,
    ) {
        let mut s = self.block_scores(q, &blocks.at(0)); // A2:3-5
        // By what O is multiplied before the PV in flight is added.
        let shrink = self.fwd.builder.rows_var("shrink", 0.0);
        shrink.set(sum.softmax.step(&mut s)); // A2:6
        let mut p = self.p.round(&s);
        blocks.for_each(1, |block| {
            // A2:7, to T_c - 1
            let k = self.k.wait(); // A2:8
            self.turn.take();
            let s = gemm(q.tile, k.tile().t(), Fresh); // A2:9, in flight
            let v = self.v.wait(); // A2:10
            let pv = gemm(&p, v.tile().t(), Fresh); // A2:11, in flight
            self.turn.pass();
            let mut s = s.wait(); // A2:12
            self.k.release(k); // A2:15
            q.slot.release_if(block.last);
            q.scores.apply(&mut s, q.row, &block);
            let next = sum.softmax.step(&mut s); // A2:13
            sum.o.scale_rows_and_add(0, shrink.get(), &pv.wait()); // A2:14
            self.v.release(v); // A2:15
            shrink.set(next);
            p.set(&self.p.round(&s)); // A2:16
        });
        self.add_in_two_levels(&p, shrink.get(), &mut sum.o); // A2:18-19
    }

    /// O ← shrink · O + P V with the next block of V, some columns after the other.
    fn add_in_two_levels(&mut self, p: &P<'k>, shrink: Rows<'k>, o: &mut Frag<'k>) {
        let (cols, all) = (self.fwd.spec.tile.pv_cols(), self.fwd.spec.tile.head_dim_v);
        let v = self.v.wait();
        for part in 0..all / cols {
            let pv = gemm(p, v.tile().row_block(part, cols).t(), Fresh).wait();
            o.scale_rows_and_add(part * cols, shrink, &pv);
        }
        self.v.release(v);
    }
}
