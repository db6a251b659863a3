//! Sums of the gradients of elements of tables that are read by key or by distance. The dQ kernel writes them for each
//! warp's 16 rows and each block of keys: a sum of each key, or of each diagonal.
//!
//! ```text
//! thread (g, t) has the rows g and g + 8 and the columns 8j + 2t and 8j + 2t + 1
//! by key          sum over g: a butterfly
//! by distance     g - 2t = r mod 8: one shuffle brings what has r to thread (r, t); sum over t: a butterfly
//! ```

use std::cell::RefCell;

use fa3_ir::lang::*;
use fa3_sched::backward::lines_of_block;
use fa3_types::{ReadBy, ScoreExpr, ScoreGradients, ScoreIndex, TableRead};

use super::params::LineSumsParams;
use crate::kernels::params::InKernel;

/// The sums of a group of rows and a block of keys in memory.
pub(super) struct BlockSums {
    /// Each read, and the place of its first sum.
    pub(super) reads: Vec<(TableRead, u32)>,
    /// Number of sums.
    pub(super) count: u32,
    /// Keys of a block.
    pub(super) keys: u32,
}

impl BlockSums {
    /// The sums of an expression over blocks of `keys` keys.
    pub(super) fn of(expr: &ScoreExpr, gradients: ScoreGradients, keys: u32) -> BlockSums {
        let (mut count, mut reads) = (0, vec![]);
        for read in expr.table_reads(gradients) {
            let sums = lines_of_block(read.by, keys);
            if sums > 0 {
                reads.push((read, count));
                count += sums;
            }
        }
        BlockSums { reads, count, keys }
    }

    /// The address of the sums of a group, in its first block of keys.
    #[track_caller]
    pub(super) fn address<'k>(
        &self,
        params: &LineSumsParams<InKernel<'k>>,
        of_head: U32<'k>,
        group: U32<'k>,
    ) -> U64<'k> {
        (of_head.mad(params.groups, group) * params.blocks).mad_wide(4 * self.count, params.address)
    }
}

/// The block of `keys` keys that contains a key.
#[track_caller]
pub(super) fn block_of(key: U32<'_>, keys: u32) -> U32<'_> {
    if keys.is_power_of_two() { key.shr_s32(keys.ilog2()) } else { key.div_floor(key.constant(keys)) }
}

/// The sums of a warp's rows in a block of keys.
pub(super) struct LineSums<'k> {
    builder: &'k Builder,
    sums: BlockSums,
    /// The address of the group's sums.
    to: U64<'k>,
    /// Whether each of the thread's rows is one of the sequence's.
    counts: [V<'k, Pred>; 2],
    /// The terms of a block by read: of a column, or of a pair of a diagonal chunk and a column in it.
    terms: RefCell<Vec<Vec<Option<V<'k, F32>>>>>,
}

impl<'k> LineSums<'k> {
    /// Sums of 0 in all blocks of a sequence of `keys` keys.
    #[track_caller]
    pub(super) fn new(
        builder: &'k Builder,
        to: U64<'k>,
        sums: BlockSums,
        counts: [V<'k, Pred>; 2],
        keys: U32<'k>,
    ) -> LineSums<'k> {
        let chunks = (sums.keys / 8 + 2) as usize;
        let terms = RefCell::new(vec![vec![None; 2 * chunks]; sums.reads.len()]);
        let lines = LineSums { builder, sums, to, counts, terms };
        // Each thread stores zeros where it stores sums.
        builder.for_each((0, keys), lines.sums.keys, |key| {
            let zero = builder.value(0.0);
            for at in 0..lines.sums.reads.len() {
                lines.store(at, key, |_, _| zero);
            }
        });
        lines
    }

    /// Adds a term to the read with this number.
    #[track_caller]
    pub(super) fn add(&self, read: usize, term: V<'k, F32>, at: At) {
        let (half, chunk) = (at.half as u32, at.col / 8);
        let are_diagonals = self.sums.reads[read].0.by == ReadBy::Distance;
        let chunk = if are_diagonals { self.sums.keys / 8 + half - chunk } else { chunk };
        let term = self.counts[half as usize].select(term, 0.0);
        let sum = &mut self.terms.borrow_mut()[read][(2 * chunk + at.col % 2) as usize];
        *sum = Some(sum.map_or(term, |sum| sum + term));
    }

    /// Stores the sums of the block that begins with `key`.
    #[track_caller]
    pub(super) fn end_block(&self, key: U32<'k>) {
        let (lane, chunks) = (self.builder.lane_id(), self.sums.keys / 8);
        let (row, quad) = (lane >> 2, lane & 3);
        for (at, (read, _)) in self.sums.reads.iter().enumerate() {
            let mut terms = self.terms.borrow_mut();
            let mut term = |chunk: u32, column: u32| terms[at][(2 * chunk + column) as usize].take();
            let none = self.builder.value(0.0);
            let sums: Vec<[V<'k, F32>; 2]> = if read.by == ReadBy::Distance {
                let all: Vec<_> = (0..chunks + 2).map(|chunk| [term(chunk, 0), term(chunk, 1)]).collect();
                let of = |chunk: u32, column: u32| {
                    let [this, next] = [chunk, chunk + 1].map(|chunk| {
                        all.get(chunk as usize).and_then(|pair| pair[column as usize]).unwrap_or(none)
                    });
                    // Thread (r, t) has the diagonal r of the chunk. A row from 2t + column on is of this chunk.
                    let first = (quad << 1) + column;
                    let sent = row.ge(first).select(this, next);
                    sent.shfl_idx((((row + first) & 7) << 2) + quad)
                };
                let over = |chunk| {
                    let sum = of(chunk, 0) + of(chunk, 1);
                    [1, 2].into_iter().fold(sum, |sum, lanes: u32| sum + sum.shfl_bfly(lanes))
                };
                (0..chunks + 2).map(|chunk| [over(chunk); 2]).collect()
            } else {
                let over =
                    |x: V<'k, F32>| [4, 8, 16].into_iter().fold(x, |x, lanes: u32| x + x.shfl_bfly(lanes));
                let columns = |chunk| [0, 1].map(|column| over(term(chunk, column).unwrap_or(none)));
                (0..chunks).map(columns).collect()
            };
            self.store(at, key, |chunk, column| sums[chunk as usize][column as usize]);
        }
    }

    /// Stores `sum` of each chunk of 8 lines of a block, and of the thread's columns of it. The lanes of a warp store 8
    /// chunks of keys at a time, or 4 of diagonals.
    #[track_caller]
    fn store(&self, at: usize, key: U32<'k>, sum: impl Fn(u32, u32) -> V<'k, F32>) {
        let b = self.builder;
        let (lane, keys) = (b.lane_id(), self.sums.keys);
        let (row, quad) = (lane >> 2, lane & 3);
        let (read, first) = &self.sums.reads[at];
        let are_diagonals = read.by == ReadBy::Distance;
        let (chunks, at_once, own) = if are_diagonals { (keys / 8 + 2, 4, quad) } else { (keys / 8, 8, row) };
        let to = block_of(key, keys).mad_wide(4 * self.sums.count, self.to);
        for turn in (0..chunks).step_by(at_once) {
            let count = (chunks - turn).min(at_once as u32);
            let chosen = |column| {
                let later = (turn + 1..turn + count).zip(1..);
                let first = sum(turn, column);
                later.fold(first, |x, (chunk, lane): (u32, u32)| own.eq(lane).select(sum(chunk, column), x))
            };
            let place = (4 * (first + 8 * turn)) as i32;
            let store = || {
                if are_diagonals {
                    b.store(((own << 3) + row).mad_wide(4, to).at(place), chosen(0));
                } else {
                    let to = ((own << 3) + (quad << 1)).mad_wide(4, to).at(place);
                    b.store_vector(to, [chosen(0), chosen(1)]);
                }
            };
            if count == at_once as u32 { store() } else { b.if_lanes(own.lt(count), store) }
        }
    }
}
