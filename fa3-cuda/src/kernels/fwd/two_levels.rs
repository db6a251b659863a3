//! Algorithms 1 and 2 for e4m3, whose products are summed in two levels. The tensor core keeps about 13 fraction bits
//! of a sum of e4m3 products. So each block's PV begins at 0, and O is multiplied and gets PV added in binary32: one
//! instruction an element.
//!
//! V has a column of ones behind its own. Its PV is what the rounded P adds up to, truncated as the other columns are.
//! So the row sums take no addition for each score, and what rounding and truncation do to all of a row cancels in O.

use fa3_ir::lang::*;
use fa3_sched::forward::ROW_SUM_COLS;

use super::attend::{Attend, Sum};
use super::query::Query;
use super::scales::BlockScales;
use crate::kernels::parts::kv_blocks::{KvBlock, KvBlocks};

impl<'k> Attend<'_, 'k> {
    /// QKᵀ, softmax and PV one after the other: what overlaps are warpgroups, which take no turns.
    pub(super) fn algorithm1_in_two_levels(
        &mut self,
        q: &Query<'_, 'k>,
        blocks: &KvBlocks<'k>,
        sum: &mut Sum<'k>,
    ) {
        blocks.for_each(0, |block| {
            let scales = q.scales.of(&block);
            let mut s = self.products_ending_turn(q, &block); // A1:16-17
            q.scores.apply(&mut s, &block, &scales.unit);
            let (p, shrink) = self.softmax_in_two_levels(s, &scales, sum); // A1:18-19
            self.add_in_two_levels(&p, shrink, sum); // A1:20-22
        });
    }

    /// The same with turns. One is PV of a block and QKᵀ of the next, and a round of the loop begins with it: ptxas
    /// moves a wait in the middle of a round to before the exponentials.
    pub(super) fn algorithm1_in_turns(
        &mut self,
        q: &Query<'_, 'k>,
        blocks: &KvBlocks<'k>,
        sum: &mut Sum<'k>,
    ) {
        let (mut p, shrink) = self.first_block(q, &blocks.at(0), sum);
        blocks.for_each(1, |block| {
            let scales = q.scales.of(&block);
            self.turn.take();
            self.add_in_two_levels(&p, shrink.get(), sum); // A1:20-22
            let mut s = self.products_ending_turn(q, &block); // A1:16-17
            q.scores.apply(&mut s, &block, &scales.unit);
            let (next, by) = self.softmax_in_two_levels(s, &scales, sum); // A1:18-19
            shrink.set(by);
            p.set(&next);
        });
        self.turn.take();
        self.add_in_two_levels(&p, shrink.get(), sum); // A1:20-22
        self.turn.pass();
    }

    /// QKᵀ of a block and PV of the block before in one turn, which ends when both are complete: what overlaps are
    /// warpgroups. PV is added to O after P has been rounded, into registers of its own: ptxas then joins the halves of
    /// a word in the conversion, and else with an instruction more.
    pub(super) fn algorithm2_in_two_levels(
        &mut self,
        q: &Query<'_, 'k>,
        blocks: &KvBlocks<'k>,
        sum: &mut Sum<'k>,
    ) {
        let (mut p, shrink) = self.first_block(q, &blocks.at(0), sum); // A2:3-6
        blocks.for_each(1, |block| {
            // A2:7, to T_c - 1
            let scales = q.scales.of(&block);
            let k = self.k.wait(); // A2:8
            self.turn.take();
            let s = gemm(q.tile, k.tile().t(), Fresh); // A2:9, in flight
            let v = self.v.wait(); // A2:10
            let pv = gemm(&p, v.tile().t(), Fresh); // A2:11, in flight
            let mut s = s.wait(); // A2:12
            self.k.release(k); // A2:15
            q.slot.release_if(block.last);
            let pv = pv.wait(); // A2:14
            self.turn.pass();
            self.v.release(v); // A2:15
            q.scores.apply(&mut s, &block, &scales.unit);
            let next = sum.softmax.step_uncounted(&mut s, &scales.unit); // A2:13
            let rounded = self.p.round(&s); // A2:16
            add(sum, 0, shrink.get(), pv); // A2:14
            shrink.set(next);
            sum.enter(&scales);
            p.set(&rounded); // A2:16
        });
        self.add_in_two_levels(&p, shrink.get(), sum); // A2:18-19
    }

    /// P of a tile's first block, and by what O is to be multiplied before its PV is added.
    fn first_block(
        &mut self,
        q: &Query<'_, 'k>,
        block: &KvBlock<'k>,
        sum: &mut Sum<'k>,
    ) -> (AFrag<'k>, RowsVar<'k>) {
        let s = self.block_scores(q, block);
        let (p, by) = self.softmax_in_two_levels(s, &q.scales.of(block), sum);
        let shrink = self.fwd.builder.rows_var("shrink", 0.0);
        shrink.set(by);
        (p, shrink)
    }

    /// P of a block, and by what O is to be multiplied before its PV is added.
    fn softmax_in_two_levels(
        &self,
        mut s: Frag<'k>,
        scales: &BlockScales<'k>,
        sum: &mut Sum<'k>,
    ) -> (AFrag<'k>, Rows<'k>) {
        let shrink = sum.softmax.step_uncounted(&mut s, &scales.unit);
        sum.enter(scales);
        (self.p.round(&s), shrink)
    }

    /// O ← shrink · O + P V with the next block of V, some columns after the other.
    fn add_in_two_levels(&mut self, p: &AFrag<'k>, shrink: Rows<'k>, sum: &mut Sum<'k>) {
        let (cols, all) = (self.fwd.spec.tile.pv_cols(), self.fwd.spec.tile.head_dim_v);
        let v = self.v.wait();
        for first in (0..all).step_by(cols as usize) {
            // The ones are in the last part.
            let ones = if first + cols == all { ROW_SUM_COLS } else { 0 };
            let pv = gemm(p, v.tile().rows(first, cols + ones).t(), Fresh).wait();
            add(sum, first, shrink, pv);
        }
        self.v.release(v);
    }
}

/// Adds PV to the columns of O from `first` on, and to the row sums what is behind O's columns.
#[track_caller]
fn add<'k>(sum: &mut Sum<'k>, first: u32, shrink: Rows<'k>, pv: Frag<'k>) {
    let cols = pv.cols().min(sum.o.cols() - first);
    let (of_v, of_ones) = pv.split_at(cols);
    let of_o = sum.v_scale.as_ref().map_or(shrink, |v_scale| shrink * v_scale.ratio());
    sum.o.scale_rows_and_add(first, of_o, &of_v);
    // The sum is the first of the columns behind, of which a thread has two for each of its rows.
    let sums: Vec<V<'k, F32>> = of_ones.pairs().map(|(_, [sum, _])| sum.get()).collect();
    if let [upper, lower, ..] = sums[..] {
        sum.softmax.count(shrink, Rows([upper, lower]));
    }
}
