//! Rows of sequences of K and V that are found through lists of pages.

use ndarray::{ArrayView2, ArrayView3, ArrayView4, Axis};

use super::rows::widen;
use crate::Scalar;

/// Where the rows of each sequence of K and V are: row r is row (first + r) of its pages, one after the other.
#[derive(Clone, Debug)]
pub struct Pages {
    /// Entries of the tensor's batch: [`Pages::each`] for each sequence, in order. Those that are not needed may be
    /// anything.
    pub(crate) entries: Vec<usize>,
    /// Pages of a sequence.
    pub(crate) each: usize,
    /// Rows of memory before each sequence's first one.
    pub(crate) first: Vec<usize>,
}

impl Pages {
    /// The pages of a sequence, and the rows before its first one.
    pub(crate) fn of(&self, sequence: usize) -> (&[usize], usize) {
        (&self.entries[sequence * self.each..][..self.each], self.first[sequence])
    }
}

/// Rows of one head of one sequence of K or V.
pub(super) enum KeyRows<'a, T> {
    /// (rows, columns) one after the other: no page is looked for.
    OnePage(ArrayView2<'a, T>),
    /// In several pages, or none, of (entries, rows, columns).
    Pages {
        /// All entries.
        head: ArrayView3<'a, T>,
        /// Entries of the sequence.
        pages: &'a [usize],
        /// Rows of them before the sequence's.
        first: usize,
    },
}

impl<'a, T: Scalar> KeyRows<'a, T> {
    /// Rows of a tensor (entries, rows, heads, columns), behind `first` others of these pages.
    pub(super) fn of(
        tensor: ArrayView4<'a, T>,
        (pages, first): (&'a [usize], usize),
        head: usize,
    ) -> KeyRows<'a, T> {
        let head = tensor.index_axis_move(Axis(2), head);
        match *pages {
            [page] if page < head.len_of(Axis(0)) => {
                let rows = head.index_axis_move(Axis(0), page);
                KeyRows::OnePage(rows.slice_axis_move(Axis(0), (first..).into()))
            }
            _ => KeyRows::Pages { head, pages, first },
        }
    }

    /// The number of columns.
    pub(super) fn columns(&self) -> usize {
        match self {
            KeyRows::OnePage(rows) => rows.ncols(),
            KeyRows::Pages { head, .. } => head.len_of(Axis(2)),
        }
    }

    /// Leaves row `row` in `to`.
    pub(super) fn read(&self, row: usize, to: &mut [f32]) {
        match self {
            KeyRows::OnePage(rows) => widen(rows.row(row), to),
            KeyRows::Pages { head, pages, first } => {
                let (at, rows) = (first + row, head.len_of(Axis(1)));
                let page = head.index_axis(Axis(0), pages[at / rows]);
                widen(page.index_axis(Axis(0), at % rows), to);
            }
        }
    }
}
