//! Zeros in rows of a tile that no load writes.

use fa3_ir::lang::*;

/// Stores zeros to a tile, in `threads` threads; the calling thread is number `thread`.
#[track_caller]
pub(super) fn store<'k>(b: &'k Builder, tile: Tile<'_, 'k>, thread: U32<'k>, threads: u32) {
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
