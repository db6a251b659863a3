//! Intervals of a block's rows, which are columns of Sᵀ.

use std::cell::RefCell;

use fa3_ir::lang::*;
use fa3_sched::{Lens, VisibleKeys};

use crate::kernels::params::InKernel;
use crate::kernels::parts::intervals::IntervalRows;

/// The intervals of the thread's columns, each pair of them loaded where it is asked for. Elements come in the order of
/// their registers, so that what one pair says is kept, and no bounds.
pub(super) struct IntervalColumns<'k> {
    builder: &'k Builder,
    rows: IntervalRows<InKernel<'k>>,
    of_head: V<'k, B64>,
    lens: Lens<V<'k, B32>>,
    /// The thread's two keys.
    keys: [V<'k, B32>; 2],
    /// The row of its first column.
    first: V<'k, B32>,
    /// The first column of the last pair, and whether each of its columns does not see each of the keys.
    last: RefCell<Option<(u32, Outside<'k>)>>,
}

/// Whether each of two columns does not see each of two keys.
type Outside<'k> = [[V<'k, Pred>; 2]; 2];

impl<'k> IntervalColumns<'k> {
    /// Intervals of the rows from `row` on of the head whose bounds are at `of_head`, for the keys `key` and 8 more.
    #[track_caller]
    pub(super) fn new(
        b: &'k Builder,
        rows: IntervalRows<InKernel<'k>>,
        of_head: V<'k, B64>,
        lens: Lens<V<'k, B32>>,
        [key, row]: [V<'k, B32>; 2],
    ) -> IntervalColumns<'k> {
        let (keys, first) = (Half::BOTH.map(|half| key + half.rows()), row + b.frag_col());
        IntervalColumns { builder: b, rows, of_head, lens, keys, first, last: RefCell::new(None) }
    }

    /// Zero in place of what the row of an element does not see.
    #[track_caller]
    pub(super) fn hide(&self, x: V<'k, F32>, at: At) -> V<'k, F32> {
        let even = at.col & !1;
        let mut last = self.last.borrow_mut();
        let outside = match *last {
            Some((col, outside)) if col == even => outside,
            _ => [even, even + 1].map(|col| self.outside(col)),
        };
        *last = Some((even, outside));
        let outside = outside[at.col as usize % 2][at.half as usize];
        outside.select(0.0, x)
    }

    /// Whether the row of a column does not see each of the thread's keys.
    #[track_caller]
    fn outside(&self, col: u32) -> [V<'k, Pred>; 2] {
        let intervals = self.rows.keys(self.builder, self.of_head, self.first + col, self.lens);
        self.keys.map(|key| {
            let each = intervals.iter().map(|&VisibleKeys { start, end }| key.lt(start) | key.ge(end));
            each.reduce(|one, other| one & other).expect("a row has an interval")
        })
    }
}
