//! The pairs of a query row and a key that the mask hides.

use fa3_ir::lang::*;
use fa3_types::Mask;

use super::interval_columns::IntervalColumns;
use super::params::Inputs;
use crate::kernels::params::InKernel;
use crate::kernels::parts::geometry::WorkTile;
use crate::kernels::parts::intervals::IntervalRows;
use crate::kernels::parts::visible::{Position, Visible};

/// The elements of a block that the mask hides.
pub(super) enum Hidden<'k> {
    /// Fragment rows are query rows: the columns that each of the thread's two rows sees.
    Rows([Visible<'k>; 2]),
    /// Fragment columns are query rows: their intervals say which of the fragment's rows, which are keys, they see. If
    /// there is a mask beside the intervals, it says which columns see each of the thread's two keys.
    Columns(Box<(IntervalColumns<'k>, Option<[Visible<'k>; 2]>)>),
}

impl<'k> Hidden<'k> {
    /// `x`, or zero where the mask hides the element `at`.
    #[track_caller]
    pub(super) fn hide(&self, x: V<'k, F32>, at: At) -> V<'k, F32> {
        match self {
            Hidden::Rows(visible) => visible[at.half as usize].hide(x, at.col, 0.0),
            Hidden::Columns(hidden) => {
                let (columns, visible) = &**hidden;
                let x = columns.hide(x, at);
                visible.as_ref().map_or(x, |visible| visible[at.half as usize].hide(x, at.col, 0.0))
            }
        }
    }
}

/// The columns, counted from `first`, that the thread's query rows `row` and `row` + 8 see by their bounds, if any,
/// and by the mask beside them. They are unspecified for rows beyond the sequence's end.
#[track_caller]
pub(super) fn visible<'k>(
    b: &'k Builder,
    inputs: &Inputs<InKernel<'k>>,
    work: &WorkTile<'k>,
    mask: Mask,
    [row, first]: [U32<'k>; 2],
) -> [Visible<'k>; 2] {
    let Some(rows) = inputs.intervals.and_then(IntervalRows::bounds) else {
        return visible_by_mask(b, inputs, work, mask, [row, first]);
    };
    let first = first + b.frag_col();
    let (of_head, tiling) = (rows.of_tile(work), inputs.lookup.tiling());
    Half::BOTH
        .map(|half| rows.visible(b, of_head, Position(row + half.rows()), work.lens, tiling).from(first))
}

/// The columns, counted from `first`, that the thread's rows `row` and `row` + 8 see by a window and by chunks. They
/// are unspecified for rows beyond the sequence's end.
#[track_caller]
pub(super) fn visible_by_mask<'k>(
    b: &'k Builder,
    inputs: &Inputs<InKernel<'k>>,
    work: &WorkTile<'k>,
    mask: Mask,
    [row, first]: [U32<'k>; 2],
) -> [Visible<'k>; 2] {
    let (left, _) = mask.reach();
    let first = first + b.frag_col();
    Half::BOTH.map(|half| {
        let keys = inputs.lookup.keys(row + half.rows(), work.lens);
        Visible { start: left.map(|_| keys.start), end: keys.end, other: None, tree: None }.from(first)
    })
}
