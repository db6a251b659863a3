//! Sums of the gradients of the elements of tables that rows read. The dQ kernel writes them, for each 16 rows of a head:
//! one sum for each read by head, and one of each row for each read by query.

use std::cell::RefCell;

use fa3_ir::lang::*;
use fa3_types::{ReadBy, ScoreExpr, ScoreGradients, TableRead};

use super::params::ReadSumsParams;
use crate::kernels::params::InKernel;
use crate::kernels::parts::geometry::WorkTile;
use crate::kernels::parts::over_warp::over_warp;
use crate::kernels::parts::score::Slope;

/// Rows of a group, which are the rows of a warp.
pub(super) const GROUP: u32 = 16;

/// The sums of a group of rows in memory.
pub(super) struct GroupSums {
    /// Each read, and the place of its first sum.
    pub(super) reads: Vec<(TableRead, u32)>,
    /// Number of sums.
    pub(super) count: u32,
}

impl GroupSums {
    /// The sums of an expression. Each of its reads is by head or by query.
    pub(super) fn of(expr: &ScoreExpr, gradients: ScoreGradients) -> GroupSums {
        let mut count = 0;
        let place = |read: TableRead| {
            let first = count;
            count += if read.by == ReadBy::Head { 1 } else { GROUP };
            (read, first)
        };
        let reads = expr.table_reads(gradients).into_iter().map(place).collect();
        GroupSums { reads, count }
    }

    /// The address of a group's sums.
    #[track_caller]
    pub(super) fn address<'k>(
        &self,
        params: &ReadSumsParams<InKernel<'k>>,
        of_head: U32<'k>,
        group: U32<'k>,
    ) -> U64<'k> {
        of_head.mad(params.groups, group).mad_wide(4 * self.count, params.address)
    }
}

/// The sums of a thread's rows in a work tile.
pub(super) struct RowSums<'k> {
    of_group: GroupSums,
    /// Sums over all blocks, of each read and row.
    sums: Vec<[Var<'k, F32>; 2]>,
    /// Sums over the elements of a block so far. Many small sums are rounded less than a long one.
    of_block: RefCell<Vec<[Option<V<'k, F32>>; 2]>>,
}

impl<'k> RowSums<'k> {
    /// Sums of 0.
    #[track_caller]
    pub(super) fn new(b: &'k Builder, expr: &ScoreExpr, gradients: ScoreGradients) -> RowSums<'k> {
        let of_group = GroupSums::of(expr, gradients);
        let zeros = |_: &_| Half::BOTH.map(|_| b.var("sum", 0.0));
        let sums: Vec<_> = of_group.reads.iter().map(zeros).collect();
        let of_block = RefCell::new(vec![[None; 2]; sums.len()]);
        RowSums { of_group, sums, of_block }
    }

    /// Adds P · (dP - D) of an element, times the derivatives by what it reads.
    #[track_caller]
    pub(super) fn add(&self, of_score: V<'k, F32>, slopes: Vec<Option<Slope<'k>>>, at: At) {
        for (sums, slope) in self.of_block.borrow_mut().iter_mut().zip(slopes) {
            let sum = &mut sums[at.half as usize];
            *sum = Some(match (*sum, slope) {
                (Some(sum), Some(Slope { factor, is_finite: true })) => of_score.fma(factor, sum),
                (sum, slope) => {
                    let term = slope.map_or(of_score, |slope| slope.of(of_score));
                    sum.map_or(term, |sum| sum + term)
                }
            });
        }
    }

    /// Ends a block.
    #[track_caller]
    pub(super) fn end_block(&self) {
        for (sums, of_block) in self.sums.iter().zip(self.of_block.borrow_mut().iter_mut()) {
            for (sum, of_block) in sums.iter().zip(of_block) {
                if let Some(of_block) = of_block.take() {
                    sum.update(|sum| sum + of_block);
                }
            }
        }
    }

    /// Stores the sums of the warp's rows. The thread has the rows `row` and `row` + 8 of a tile; `heads` is the number
    /// of query heads. Rows beyond the sequence's end count as 0.
    #[track_caller]
    pub(super) fn store(
        &self,
        b: &'k Builder,
        params: &ReadSumsParams<InKernel<'k>>,
        heads: U32<'k>,
        work: &WorkTile<'k>,
        row: U32<'k>,
    ) {
        // With a table, the arrays are padded, and hold all sequences as one.
        let (of_head, place) = match work.varlen.and_then(|varlen| varlen.padded_row) {
            None => (work.batch.mad(heads, work.head), row),
            Some(padded_row) => (work.head, padded_row + row),
        };
        let to = self.of_group.address(params, of_head, place >> GROUP.ilog2());
        let in_group = b.lane_id() >> 2;
        for ((read, first), sums) in self.of_group.reads.iter().zip(&self.sums) {
            let [upper, lower] = [0, 1].map(|half: u32| {
                let counts = (row + 8 * half).lt(work.lens.q);
                counts.select(sums[half as usize].get(), 0.0)
            });
            if read.by == ReadBy::Head {
                let sum = over_warp(upper + lower, |x, y| x + y);
                b.once_per_warp(|| b.store(to.at(4 * *first as i32), sum));
                continue;
            }
            let over_row = |x: V<'k, F32>| [2, 1].into_iter().fold(x, |x, lanes: u32| x + x.shfl_bfly(lanes));
            let sums = [upper, lower].map(over_row);
            let to = in_group.mad_wide(4, to);
            b.if_lanes((b.lane_id() & 3).eq(0), || {
                for (half, sum) in (0..).zip(sums) {
                    b.store(to.at(4 * *first as i32 + 32 * half), sum);
                }
            });
        }
    }
}
