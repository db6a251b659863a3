//! Tensors cut into disjoint parts, which threads write in parallel.

use fa3_types::SequenceRows;
use ndarray::{ArrayViewMut3, ArrayViewMut4, Axis, Slice};

/// For each sequence, the used rows (rows, heads, columns) of a tensor (batch, rows, heads, columns).
pub(super) fn sequences<'a, T>(
    sequences: &SequenceRows,
    tensor: ArrayViewMut4<'a, T>,
) -> Vec<ArrayViewMut3<'a, T>> {
    let used = |index| Slice::from(..sequences.len(index));
    if !sequences.is_packed() {
        let rows = tensor.into_outer_iter_mut().enumerate();
        return rows.map(|(index, rows)| rows.slice_axis_move(Axis(0), used(index))).collect();
    }
    let mut rest = tensor.index_axis_move(Axis(0), 0);
    let mut cut = vec![];
    for index in 0..sequences.count() {
        // Sequences lie one after the other: this sequence's rows are the first of the rest.
        let (rows, after) = rest.split_at(Axis(0), sequences.capacity(index));
        cut.push(rows.slice_axis_move(Axis(0), used(index)));
        rest = after;
    }
    cut
}

/// Pieces of `size` along an axis. The last piece may be shorter.
pub(super) fn pieces<T>(tensor: ArrayViewMut3<'_, T>, axis: Axis, size: usize) -> Vec<ArrayViewMut3<'_, T>> {
    let mut rest = tensor;
    let mut pieces = vec![];
    while rest.len_of(axis) > size {
        let (piece, after) = rest.split_at(axis, size);
        pieces.push(piece);
        rest = after;
    }
    if rest.len_of(axis) > 0 {
        pieces.push(rest);
    }
    pieces
}
