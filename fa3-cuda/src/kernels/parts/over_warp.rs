//! The reduction of a value over the lanes of a warp.

use fa3_ir::lang::*;

/// The reduction of `x` over the lanes of a warp, in each lane.
#[track_caller]
pub(crate) fn over_warp<'k, T: Word>(
    x: V<'k, T>,
    reduce: impl Fn(V<'k, T>, V<'k, T>) -> V<'k, T>,
) -> V<'k, T> {
    [16, 8, 4, 2, 1].into_iter().fold(x, |x, lanes: u32| reduce(x, x.shfl_bfly(lanes)))
}
