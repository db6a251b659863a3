//! Rows of sequences of K and V that are found through lists of pages.

use ndarray::{ArrayView3, ArrayView4, Axis};

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
pub(super) struct PagedRows<'a, T> {
    /// (entries, rows, columns).
    head: ArrayView3<'a, T>,
    pages: &'a [usize],
    first: usize,
}

impl<'a, T: Scalar> PagedRows<'a, T> {
    /// Rows of a tensor (entries, rows, heads, columns), behind `first` others of these pages.
    pub(super) fn of(
        tensor: ArrayView4<'a, T>,
        (pages, first): (&'a [usize], usize),
        head: usize,
    ) -> PagedRows<'a, T> {
        PagedRows { head: tensor.index_axis_move(Axis(2), head), pages, first }
    }

    /// The number of columns.
    pub(super) fn columns(&self) -> usize {
        self.head.len_of(Axis(2))
    }

    /// Leaves row `row` in `to`.
    pub(super) fn read(&self, row: usize, to: &mut [f32]) {
        let (at, rows) = (self.first + row, self.head.len_of(Axis(1)));
        let page = self.head.index_axis(Axis(0), self.pages[at / rows]);
        widen(page.index_axis(Axis(0), at % rows), to);
    }
}
