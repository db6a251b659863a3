//! One head of a tensor.

use ndarray::{ArrayView2, ArrayView4, ArrayViewMut2, ArrayViewMut4, Axis};

/// The rows (seqlen, head_dim) of one head of batch entry `batch`.
pub(crate) fn head<T>(x: ArrayView4<'_, T>, batch: usize, head: usize) -> ArrayView2<'_, T> {
    x.index_axis_move(Axis(0), batch).index_axis_move(Axis(1), head)
}

/// Mutable variant of [`head`].
pub(crate) fn head_mut<T>(x: ArrayViewMut4<'_, T>, batch: usize, head: usize) -> ArrayViewMut2<'_, T> {
    x.index_axis_move(Axis(0), batch).index_axis_move(Axis(1), head)
}
