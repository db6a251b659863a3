//! The hand-off of P from one consumer warpgroup to another, through shared memory.

use fa3_ir::lang::*;

use super::spec::FwdSpec;

/// Pipelines of P and of the rescale factors of O's rows, from the first consumer to the second.
pub(super) struct HandOver<'k> {
    /// P of a block, and the factors by which rows of O are rescaled before P V is added.
    pub(super) blocks: Pipeline<'k, 2>,
    /// The final factors of rows of O, at the end of a tile.
    pub(super) ends: Pipeline<'k, 1>,
}

impl<'k> HandOver<'k> {
    #[track_caller]
    pub(super) fn declare(b: &'k Builder, spec: &FwdSpec) -> HandOver<'k> {
        let p = TileShape::new(spec.elem, spec.tile.tile_m, spec.tile.tile_n);
        HandOver {
            blocks: b.stored_pipeline("p", 1, [4, 4], [("p", p), ("factors", factors())]),
            ends: b.stored_pipeline("ends", 1, [4, 4], [("inverse", factors())]),
        }
    }
}

/// The shape of the factors of 64 rows, contiguous in memory.
fn factors() -> TileShape {
    TileShape::new(Elem::F32, 16, 4)
}

/// The addresses of the factors of the thread's two rows.
#[track_caller]
fn factors_of_thread<'k>(b: &'k Builder, tile: Tile<'_, 'k>) -> [SharedAddr; 2] {
    let first = b.frag_row().mad(4, tile.element(0, 0));
    Half::BOTH.map(|half| first.at(4 * half.rows() as i32))
}

/// Stores the factors of rows. In each quad, one thread stores them for all four.
#[track_caller]
pub(super) fn store_factors<'k>(b: &'k Builder, rows: Rows<'k>, tile: Tile<'_, 'k>) {
    let to = factors_of_thread(b, tile);
    b.guarded((b.tid() & 3).eq(0), || {
        for half in Half::BOTH {
            b.store(to[half as usize], rows[half]);
        }
    });
}

/// Loads the factors of the thread's rows.
#[track_caller]
pub(super) fn load_factors<'k>(b: &'k Builder, tile: Tile<'_, 'k>) -> Rows<'k> {
    Rows(factors_of_thread(b, tile).map(|from| b.load(from)))
}
