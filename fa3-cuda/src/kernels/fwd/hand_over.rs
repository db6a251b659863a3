//! The way of P from one consumer warpgroup to another, in shared memory.

use fa3_ir::lang::*;

use super::spec::FwdSpec;

/// Where P and factors of its rows pass from one consumer to the other.
pub(super) struct HandOver<'k> {
    /// P of a block, and by what O is to be multiplied before its product is added.
    pub(super) blocks: Ring<'k, 2>,
    /// By what O is to be multiplied at the end of a tile.
    pub(super) ends: Ring<'k, 1>,
}

impl<'k> HandOver<'k> {
    #[track_caller]
    pub(super) fn declare(b: &'k Builder, spec: &FwdSpec) -> HandOver<'k> {
        let p = TileShape::new(spec.elem, spec.tile.tile_m, spec.tile.tile_n);
        HandOver {
            blocks: b.stored_ring("p", 1, [4, 4], [("p", p), ("factors", factors())]),
            ends: b.stored_ring("ends", 1, [4, 4], [("inverse", factors())]),
        }
    }
}

/// A factor of each of 64 rows, one after the other.
fn factors() -> TileShape {
    TileShape::new(Elem::F32, 16, 4)
}

/// Where in such a tile the factors of the thread's two rows are.
#[track_caller]
fn factors_of_thread<'k>(b: &'k Builder, tile: Tile<'_, 'k>) -> [SharedAddr; 2] {
    let first = b.frag_row().mad(4, tile.element(0, 0));
    Half::BOTH.map(|half| first.at(4 * half.rows() as i32))
}

/// Stores them, in one thread of each quad.
#[track_caller]
pub(super) fn store_factors<'k>(b: &'k Builder, rows: Rows<'k>, tile: Tile<'_, 'k>) {
    let to = factors_of_thread(b, tile);
    b.guarded((b.tid() & 3).eq(0), || {
        for half in Half::BOTH {
            b.store(to[half as usize], rows[half]);
        }
    });
}

/// Loads them.
#[track_caller]
pub(super) fn load_factors<'k>(b: &'k Builder, tile: Tile<'_, 'k>) -> Rows<'k> {
    Rows(factors_of_thread(b, tile).map(|from| b.load(from)))
}
