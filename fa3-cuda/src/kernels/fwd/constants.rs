//! Stores constants in rows of shared-memory tiles that no load writes.

use fa3_ir::lang::*;
use fa3_sched::forward::ROW_SUM_COLS;

/// Four e4m3 codes of 1.
const FOUR_ONES: u32 = 0x3838_3838;
/// Number of elements that a thread stores at once.
const CHUNK: u32 = 16;

/// Stores the column of ones behind e4m3 V, whose PV is the row sums of P. In transposed V this column is the first of
/// the last [`ROW_SUM_COLS`] rows, and the other rows get zeros. They stay in a stage whatever block of V the stage
/// holds. The calling thread is number `thread` of `threads`.
#[track_caller]
pub(super) fn store_ones<'k>(b: &'k Builder, to: Tile<'_, 'k>, thread: U32<'k>, threads: u32) {
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

/// Stores zeros to a tile. The calling thread is number `thread` of `threads`.
#[track_caller]
pub(super) fn store_zeros<'k>(b: &'k Builder, tile: Tile<'_, 'k>, thread: U32<'k>, threads: u32) {
    let shape = tile.shape();
    let chunks = shape.rows * shape.panel_cols() * shape.elem.bytes() / 16;
    for panel in 0..shape.panels() {
        let to = tile.col_block(panel * shape.panel_cols(), shape.panel_cols()).element(0, 0);
        b.for_each((0, chunks), threads, |first| {
            let chunk = first + thread;
            let zero = b.value(0);
            b.guarded(chunk.lt(chunks), || b.store_vector(chunk.mad(16, to), [zero; 4]));
        });
    }
}
