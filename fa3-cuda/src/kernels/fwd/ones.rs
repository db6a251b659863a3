//! The column of ones behind e4m3 V: its PV is the row sums of P. In transposed V it is a row, which stays in a
//! pipeline stage whatever block of V the stage holds.

use fa3_ir::lang::*;
use fa3_sched::forward::ROW_SUM_COLS;

/// Four times 1 in e4m3.
const FOUR_ONES: u32 = 0x3838_3838;
/// Elements that a thread stores at a time.
const CHUNK: u32 = 16;

/// Sets the first of the last [`ROW_SUM_COLS`] rows to ones, and the others to zeros. `thread` is the number of this
/// thread among `threads`.
#[track_caller]
pub(super) fn store<'k>(b: &'k Builder, to: Tile<'_, 'k>, thread: U32<'k>, threads: u32) {
    let TileShape { rows, cols: keys, .. } = to.shape();
    for first in (0..keys / CHUNK * ROW_SUM_COLS).step_by(threads as usize) {
        let chunk = thread + first;
        let row = chunk & (ROW_SUM_COLS - 1);
        let word = row.eq(0).select(FOUR_ONES, 0);
        b.guarded(chunk.lt(keys / CHUNK * ROW_SUM_COLS), || {
            let at = to.element(row + (rows - ROW_SUM_COLS), (chunk >> ROW_SUM_COLS.ilog2()) * CHUNK);
            b.store_vector(at.at(0), [word; 4]);
        });
    }
}
