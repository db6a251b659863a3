//! Intervals of a block's query rows, which are columns of Sᵀ.

use std::cell::RefCell;

use fa3_ir::lang::*;
use fa3_sched::{SeqLens, VisibleKeys};

use crate::kernels::params::InKernel;
use crate::kernels::parts::intervals::IntervalRows;

/// The intervals of the thread's columns. A pair of columns loads its intervals when an element first needs them.
/// Elements come in the order of their registers, so only the predicates of the last pair are kept.
pub(super) struct IntervalColumns<'k> {
    builder: &'k Builder,
    rows: IntervalRows<InKernel<'k>>,
    of_head: U64<'k>,
    lens: SeqLens<U32<'k>>,
    /// The thread's two keys.
    keys: [U32<'k>; 2],
    /// The query row of the thread's first column.
    first: U32<'k>,
    /// The first column of the pair that was loaded last, and the pair's predicates.
    last: RefCell<Option<(u32, Outside<'k>)>>,
}

/// Predicates that are true where a column does not see a key: first index the column of the pair, then the key.
type Outside<'k> = [[V<'k, Pred>; 2]; 2];

impl<'k> IntervalColumns<'k> {
    /// The intervals of query rows from `row` on, for the keys `key` and `key` + 8. Their head's bounds are at
    /// `of_head`.
    #[track_caller]
    pub(super) fn new(
        b: &'k Builder,
        rows: IntervalRows<InKernel<'k>>,
        of_head: U64<'k>,
        lens: SeqLens<U32<'k>>,
        [key, row]: [U32<'k>; 2],
    ) -> IntervalColumns<'k> {
        let (keys, first) = (Half::BOTH.map(|half| key + half.rows()), row + b.frag_col());
        IntervalColumns { builder: b, rows, of_head, lens, keys, first, last: RefCell::new(None) }
    }

    /// `x`, or 0 if the element's query row does not see the element's key.
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

    /// Predicates that are true where the query row of a column does not see the thread's keys.
    #[track_caller]
    fn outside(&self, col: u32) -> [V<'k, Pred>; 2] {
        let intervals = self.rows.keys(self.builder, self.of_head, self.first + col, self.lens, None);
        self.keys.map(|key| {
            let each = intervals.iter().map(|&VisibleKeys { start, end }| key.lt(start) | key.ge(end));
            each.reduce(|one, other| one & other).expect("a row has an interval")
        })
    }
}
