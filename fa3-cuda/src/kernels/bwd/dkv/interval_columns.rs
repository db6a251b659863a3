//! Intervals of a block's rows, which are columns of Sᵀ.

use std::cell::RefCell;

use fa3_ir::lang::*;
use fa3_sched::{Lens, VisibleKeys};

use crate::kernels::params::InKernel;
use crate::kernels::parts::intervals::IntervalRows;

/// The intervals of the thread's columns, each pair of them loaded where it is asked for. Elements come in the order of
/// their registers, so that one pair is kept.
pub(super) struct IntervalColumns<'k> {
    builder: &'k Builder,
    rows: IntervalRows<InKernel<'k>>,
    of_head: V<'k, B64>,
    lens: Lens<V<'k, B32>>,
    /// The thread's two keys.
    keys: [V<'k, B32>; 2],
    /// The row of its first column.
    first: V<'k, B32>,
    /// The last pair, and its first column.
    loaded: RefCell<Option<(u32, Pair<'k>)>>,
}

/// The intervals of two rows.
type Pair<'k> = [Vec<VisibleKeys<V<'k, B32>>>; 2];

impl<'k> IntervalColumns<'k> {
    /// Those of the rows from `row` on of the head whose bounds are at `of_head`, for the keys `key` and 8 more.
    #[track_caller]
    pub(super) fn new(
        b: &'k Builder,
        rows: IntervalRows<InKernel<'k>>,
        of_head: V<'k, B64>,
        lens: Lens<V<'k, B32>>,
        [key, row]: [V<'k, B32>; 2],
    ) -> IntervalColumns<'k> {
        let (keys, first) = (Half::BOTH.map(|half| key + half.rows()), row + b.frag_col());
        IntervalColumns { builder: b, rows, of_head, lens, keys, first, loaded: RefCell::new(None) }
    }

    /// Zero in place of what the row of an element does not see.
    #[track_caller]
    pub(super) fn hide(&self, x: V<'k, F32>, at: At) -> V<'k, F32> {
        let even = at.col & !1;
        let mut loaded = self.loaded.borrow_mut();
        let pair = match loaded.take() {
            Some((col, pair)) if col == even => pair,
            _ => [0, 1]
                .map(|col| self.rows.keys(self.builder, self.of_head, self.first + (even + col), self.lens)),
        };
        let key = self.keys[at.half as usize];
        let outside = pair[at.col as usize % 2]
            .iter()
            .map(|&VisibleKeys { start, end }| key.lt(start) | key.ge(end))
            .reduce(|one, other| one & other)
            .expect("a row has an interval");
        *loaded = Some((even, pair));
        outside.select(0.0, x)
    }
}
