//! Rows of one head of one sequence, as f32.

use std::ops::Range;

use ndarray::{ArrayView1, ArrayView2, ArrayView4, ArrayViewMut1, Axis};

use crate::Scalar;

/// Rows (rows, columns) of one head.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a, T>(ArrayView2<'a, T>);

impl<'a, T: Scalar> Rows<'a, T> {
    /// Rows of a tensor (batch, rows, heads, columns).
    pub(super) fn of(
        tensor: ArrayView4<'a, T>,
        batch: usize,
        rows: Range<usize>,
        head: usize,
    ) -> Rows<'a, T> {
        let tensor = tensor.index_axis_move(Axis(0), batch).index_axis_move(Axis(1), head);
        Rows(tensor.slice_axis_move(Axis(0), rows.into()))
    }

    pub(super) fn columns(&self) -> usize {
        self.0.ncols()
    }

    /// Writes row `row` to `to`.
    pub(super) fn read(&self, row: usize, to: &mut [f32]) {
        widen(self.0.row(row), to);
    }
}

/// Converts a row to f32, into `to`.
pub(crate) fn widen<T: Scalar>(row: ArrayView1<'_, T>, to: &mut [f32]) {
    match row.as_slice() {
        Some(row) => T::widen(row, to),
        None => to.iter_mut().zip(row).for_each(|(to, x)| *to = x.to_f32()),
    }
}

/// Converts a row from f32, into `to`.
pub(crate) fn write<T: Scalar>(mut to: ArrayViewMut1<'_, T>, row: &[f32]) {
    match to.as_slice_mut() {
        Some(to) => T::narrow(row, to),
        None => to.iter_mut().zip(row).for_each(|(to, &x)| *to = T::from_f32(x)),
    }
}
