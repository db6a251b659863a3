//! Algorithms 1 and 2 for e4m3, with products summed in two levels. The tensor core keeps about 13 fraction bits of a
//! sum of e4m3 products. So PV of each block starts from 0, and is added to the rescaled O in binary32, with one
//! instruction per element.
//!
//! V has a column of ones behind its own columns. PV of that column is the sum of the rounded P, truncated like the
//! other columns. So row sums take no addition for each score. Errors of rounding and truncation that scale a whole row
//! cancel in O.

use fa3_ir::lang::*;
use fa3_sched::forward::ROW_SUM_COLS;

use super::attend::{Attend, Sum};
use super::query::Query;
use super::scales::BlockScales;
use crate::kernels::parts::kv_blocks::{KvBlock, KvBlocks};

impl<'k> Attend<'_, 'k> {
    /// Runs QKᵀ, softmax and PV one after another, without a ping-pong barrier: warpgroups overlap each other anyway.
    pub(super) fn algorithm1_in_two_levels(
        &mut self,
        q: &Query<'_, 'k>,
        blocks: &KvBlocks<'k>,
        sum: &mut Sum<'k>,
    ) {
        blocks.for_each(0, |block| {
            let scales = q.scales.of(&block);
            let mut s = self.products_ending_turn(q, &block); // A1:16-17
            q.scores.apply(&mut s, &block, [scales.unit; 2]);
            let (p, shrink) = self.softmax_in_two_levels(s, &scales, sum); // A1:18-19
            self.add_in_two_levels(&p, shrink, sum); // A1:20-22
        });
    }

    /// Like `algorithm1_in_two_levels`, but a ping-pong turn lasts from PV of a block to QKᵀ of the next. Each
    /// iteration begins with PV, because ptxas would move a wait in the middle of an iteration to before the
    /// exponentials.
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
            q.scores.apply(&mut s, &block, [scales.unit; 2]);
            let (next, by) = self.softmax_in_two_levels(s, &scales, sum); // A1:18-19
            shrink.set(by);
            p.set(&next);
        });
        self.turn.take();
        self.add_in_two_levels(&p, shrink.get(), sum); // A1:20-22
        self.turn.pass();
    }

    /// Runs QKᵀ of a block and PV of the previous block within one ping-pong turn, which ends when both are complete.
    /// PV is added to O after P has been rounded, and has its own registers. In this order ptxas joins the halves of a
    /// word within the conversion; in another order that takes one more instruction.
    pub(super) fn algorithm2_in_two_levels(
        &mut self,
        q: &Query<'_, 'k>,
        blocks: &KvBlocks<'k>,
        sum: &mut Sum<'k>,
    ) {
        let (mut p, shrink) = self.first_block(q, &blocks.at(0), sum); // A2:3-6
        blocks.for_each(1, |block| {
            // A2:7, for each block up to T_c - 1
            let scales = q.scales.of(&block);
            let k = self.k.wait(); // A2:8
            self.turn.take();
            let s = gemm(q.tile, k.tile().t(), Fresh); // A2:9, in flight
            let v = self.v.wait(); // A2:10
            let pv = gemm(&p, v.tile().t(), Fresh); // A2:11, in flight
            let mut s = s.wait(); // A2:12
            self.k.release(k); // A2:15
            q.stage.release_if(block.last);
            let pv = pv.wait(); // A2:14
            self.turn.pass();
            self.v.release(v); // A2:15
            q.scores.apply(&mut s, &block, [scales.unit; 2]);
            let next = sum.softmax.step_uncounted(&mut s, &scales.unit); // A2:13
            let rounded = self.p.round(&s); // A2:16
            add(sum, 0, shrink.get(), pv); // A2:14
            shrink.set(next);
            sum.enter(&scales);
            p.set(&rounded); // A2:16
        });
        self.add_in_two_levels(&p, shrink.get(), sum); // A2:18-19
    }

    /// P of a tile's first block, and the factor by which O must be rescaled before P V is added.
    fn first_block(
        &mut self,
        q: &Query<'_, 'k>,
        block: &KvBlock<'k>,
        sum: &mut Sum<'k>,
    ) -> (AFrag<'k>, RowsVar<'k>) {
        let (s, _) = self.block_scores(q, block);
        let (p, by) = self.softmax_in_two_levels(s, &q.scales.of(block), sum);
        let shrink = self.fwd.builder.rows_var("shrink", 0.0);
        shrink.set(by);
        (p, shrink)
    }

    /// P of a block, and the factor by which O must be rescaled before P V is added.
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

    /// O ← shrink · O + P V, with the next block of V, for one group of columns after another.
    fn add_in_two_levels(&mut self, p: &AFrag<'k>, shrink: Rows<'k>, sum: &mut Sum<'k>) {
        let (cols, all) = (self.fwd.spec.tile.pv_cols(), self.fwd.spec.tile.head_dim_v);
        let v = self.v.wait();
        for first in (0..all).step_by(cols as usize) {
            // The last group of columns includes the ones.
            let ones = if first + cols == all { ROW_SUM_COLS } else { 0 };
            let pv = gemm(p, v.tile().rows(first, cols + ones).t(), Fresh).wait();
            add(sum, first, shrink, pv);
        }
        self.v.release(v);
    }
}

/// Adds PV to the columns of O from `first` on. The sums of the column of ones, which is behind O's columns, go to the
/// row sums.
#[track_caller]
fn add<'k>(sum: &mut Sum<'k>, first: u32, shrink: Rows<'k>, pv: Frag<'k>) {
    let cols = pv.cols().min(sum.o.cols() - first);
    let (of_v, of_ones) = pv.split_at(cols);
    let of_o = sum.v_scale.as_ref().map_or(shrink, |v_scale| shrink * v_scale.ratio());
    sum.o.scale_rows_and_add(first, of_o, &of_v);
    // The ones are the first of the columns behind O. A thread has two of these columns in each of its rows.
    let sums: Vec<V<'k, F32>> = of_ones.pairs().map(|(_, [sum, _])| sum.get()).collect();
    if let [upper, lower, ..] = sums[..] {
        sum.softmax.count(shrink, Rows([upper, lower]));
    }
}
