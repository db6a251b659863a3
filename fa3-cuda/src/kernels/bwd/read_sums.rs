//! Sums of the gradients of the elements of tables that rows read. The dQ kernel writes them for the 16 rows of each
//! warp: one sum for each read by head, and one of each row for each read by query.

use std::cell::RefCell;

use fa3_ir::lang::*;
use fa3_sched::backward::{DqTile, SUMMED_ROWS};
use fa3_types::{ReadBy, ScoreExpr, ScoreGradients, TableRead};

use super::line_sums::{BlockSums, LineSums};
use super::params::{DqParams, ReadSumsParams};
use super::spec::PartSpec;
use crate::kernels::params::InKernel;
use crate::kernels::parts::geometry::WorkTile;
use crate::kernels::parts::over_warp::over_warp;
use crate::kernels::parts::score::Slope;

/// Rows of a group, which are the rows of a warp.
pub(super) const GROUP: u32 = SUMMED_ROWS;

/// The sums of a group of rows in memory.
pub(super) struct GroupSums {
    /// Each read, and the place of its first sum.
    pub(super) reads: Vec<(TableRead, u32)>,
    /// Number of sums.
    pub(super) count: u32,
}

impl GroupSums {
    /// The sums of an expression's reads by head and by query.
    pub(super) fn of(expr: &ScoreExpr, gradients: ScoreGradients) -> GroupSums {
        let (mut count, mut reads) = (0, vec![]);
        for read in expr.table_reads(gradients) {
            let sums = match read.by {
                ReadBy::Head => 1,
                ReadBy::Row => GROUP,
                ReadBy::Key | ReadBy::Distance => continue,
                ReadBy::QueryAndKey { .. } | ReadBy::Score => continue,
            };
            reads.push((read, count));
            count += sums;
        }
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
    /// The sums of keys and of diagonals, if there are such reads.
    lines: Option<LineSums<'k>>,
    /// Whether each read is by head or by query.
    are_of_rows: Vec<bool>,
}

/// The index of a work tile's sequence and head in arrays of sums, and the group of a row.
#[track_caller]
fn place<'k>(work: &WorkTile<'k>, heads: U32<'k>, row: U32<'k>) -> [U32<'k>; 2] {
    // With a table, the arrays are padded, and hold all sequences as one.
    let (of_head, row) = match work.varlen.and_then(|varlen| varlen.padded_row) {
        None => (work.batch.mad(heads, work.head), row),
        Some(padded_row) => (work.head, padded_row + row),
    };
    [of_head, row >> GROUP.ilog2()]
}

impl<'k> RowSums<'k> {
    /// Sums of 0 in a work tile. The thread has the rows `row` and `row` + 8.
    #[track_caller]
    pub(super) fn new(
        b: &'k Builder,
        spec: &PartSpec<DqTile>,
        params: &DqParams<InKernel<'k>>,
        work: &WorkTile<'k>,
        row: U32<'k>,
    ) -> Option<RowSums<'k>> {
        let (expr, gradients) = (spec.score.as_ref().filter(|_| params.sums.is_some())?, spec.gradients);
        let of_group = GroupSums::of(expr, gradients);
        let lines = params.line_sums.map(|to| {
            let sums = BlockSums::of(expr, gradients, spec.tile.tile_n);
            let [of_head, group] = place(work, params.stats.heads, row);
            let counts = [0, 8].map(|half: u32| (row + half).lt(work.lens.q));
            LineSums::new(b, sums.address(&to, of_head, group), sums, counts, work.lens.k)
        });
        let are_of_rows = |read: TableRead| matches!(read.by, ReadBy::Head | ReadBy::Row);
        let are_of_rows = expr.table_reads(gradients).into_iter().map(are_of_rows).collect();
        let zeros = |_: &_| Half::BOTH.map(|_| b.var("sum", 0.0));
        let sums: Vec<_> = of_group.reads.iter().map(zeros).collect();
        let of_block = RefCell::new(vec![[None; 2]; sums.len()]);
        Some(RowSums { of_group, sums, of_block, lines, are_of_rows })
    }

    /// Adds P · (dP - D) of an element, times the derivatives by what it reads.
    #[track_caller]
    pub(super) fn add(&self, of_score: V<'k, F32>, slopes: Vec<Option<Slope<'k>>>, at: At) {
        let (mut of_rows, mut of_lines) = (0, 0);
        for (&is_of_rows, slope) in self.are_of_rows.iter().zip(slopes) {
            if let (false, Some(lines)) = (is_of_rows, &self.lines) {
                lines.add(of_lines, slope.map_or(of_score, |slope| slope.of(of_score)), at);
                of_lines += 1;
                continue;
            }
            let sum = &mut self.of_block.borrow_mut()[of_rows][at.half as usize];
            of_rows += 1;
            *sum = Some(match (*sum, slope) {
                (Some(sum), Some(Slope { factor, is_finite: true })) => of_score.fma(factor, sum),
                (sum, slope) => {
                    let term = slope.map_or(of_score, |slope| slope.of(of_score));
                    sum.map_or(term, |sum| sum + term)
                }
            });
        }
    }

    /// Ends the block that begins with `key`.
    #[track_caller]
    pub(super) fn end_block(&self, key: U32<'k>) {
        if let Some(lines) = &self.lines {
            lines.end_block(key);
        }
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
        (params, heads): (&ReadSumsParams<InKernel<'k>>, U32<'k>),
        work: &WorkTile<'k>,
        row: U32<'k>,
    ) {
        let [of_head, group] = place(work, heads, row);
        let to = self.of_group.address(params, of_head, group);
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
