//! Gradients in the registers of a warpgroup, and their stores.

use fa3_ir::lang::*;

use crate::kernels::params::InKernel;
use crate::kernels::parts::geometry::WorkTile;
use crate::kernels::parts::store_rows::{ColumnOrder, Columns, StoreRows};
use crate::kernels::parts::strided::Strided;

/// The registers of a fragment, by [`At::index`].
pub(super) fn registers<'k>(frag: &Frag<'k>) -> Vec<V<'k, F32>> {
    frag.elements().map(|(_, register)| register.now()).collect()
}

/// Number of threads of a warpgroup.
pub(super) const WARPGROUP: u32 = 128;

/// A shared-memory tile for the registers of a fragment, in all threads of a warpgroup. A row of the tile holds four
/// registers of one thread.
pub(super) fn registers_tile(cols: u32) -> TileShape {
    TileShape::new(Elem::F32, cols / 8 * WARPGROUP, 4)
}

/// The shared-memory addresses of the thread's groups of four registers, in a tile of [`registers_tile`].
#[track_caller]
pub(super) fn places_of_registers<'k>(
    b: &'k Builder,
    tile: Tile<'_, 'k>,
) -> impl Iterator<Item = SharedAddr> + use<'k> {
    let first = tile.element(b.tid() & (WARPGROUP - 1), 0);
    (0..tile.shape().rows / WARPGROUP).map(move |group| first.at((16 * WARPGROUP * group) as i32))
}

/// Stores the registers of a fragment in a tile of [`registers_tile`].
#[track_caller]
pub(super) fn store_registers<'k>(frag: &Frag<'k>, tile: Tile<'_, 'k>) {
    let b = frag.builder();
    let registers = registers(frag);
    for (at, four) in places_of_registers(b, tile).zip(registers.chunks_exact(4)) {
        b.store_vector(at, [four[0], four[1], four[2], four[3]]);
    }
}

/// Replaces padding rows of a gradient by zeros: rows from `used` on. The thread has the rows `row` and `row` + 8.
#[track_caller]
pub(super) fn clear_unused<'k>(gradient: &mut Frag<'k>, row: U32<'k>, used: U32<'k>) {
    let is_used = [row, row + 8].map(|row| row.lt(used));
    gradient.map_in_place(|x, at| is_used[at.half as usize].select(x, 0.0));
}

/// Writes a gradient of a tile of `tile_rows` rows, times `factor`. The thread has the rows `row` and `row` + 8.
/// Padding rows get zeros.
#[track_caller]
pub(super) fn write_tile<'k>(
    mut gradient: Frag<'k>,
    factor: Option<V<'k, F32>>,
    to: &Strided<InKernel<'k>>,
    work: &WorkTile<'k>,
    (row, tile_rows): (U32<'k>, u32),
    format: (Elem, u32),
) {
    let (mut in_memory, mut end) = (row, work.lens.q);
    if let Some(varlen) = work.varlen {
        let reaches_beyond = (work.row + tile_rows).gt(work.lens.q);
        let b = gradient.builder();
        b.if_uniform(reaches_beyond, || clear_unused(&mut gradient, row, work.lens.q));
        (in_memory, end) = (varlen.q_row + row, varlen.q_row + varlen.q_rows);
    }
    write(gradient, factor, to, [work.batch, work.head, in_memory], end, format);
}

/// Writes the rows of a head's gradient before `end`, times `factor`. The thread has the rows `row` and `row` + 8.
#[track_caller]
pub(super) fn write<'k>(
    mut gradient: Frag<'k>,
    factor: Option<V<'k, F32>>,
    to: &Strided<InKernel<'k>>,
    [batch, head, row]: [U32<'k>; 3],
    end: U32<'k>,
    (elem, cols): (Elem, u32),
) {
    if let Some(factor) = factor {
        gradient.map_in_place(|x, _| x * factor);
    }
    let inside = [row, row + 8].map(|row| row.lt(end));
    let store = StoreRows { elem, columns: Columns::of_rows(cols), order: ColumnOrder::Natural };
    store.store(gradient, to.global(), [batch, head, row], inside);
}
