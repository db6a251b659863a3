//! Parts of both kernels with products: P and dS, element by element, and how gradients are written.

use fa3_ir::lang::*;
use fa3_types::{Mask, softcap};

use super::params::Inputs;
use crate::kernels::params::InKernel;
use crate::kernels::parts::geometry::Work;
use crate::kernels::parts::store_rows::{ColumnOrder, Columns, StoreRows};
use crate::kernels::parts::strided::Strided;
use crate::kernels::parts::visible::{Position, Visible};

/// Makes P of products of Q and K.
#[derive(Clone, Copy)]
pub(super) struct Scores<'k> {
    /// Worth of a unit of a score in the exponent of 2.
    pub(super) scale_log2: V<'k, F32>,
    /// Factor that makes a product such a unit, if scores are capped.
    pub(super) into_cap: Option<V<'k, F32>>,
}

impl<'k> Scores<'k> {
    /// P of a product in a row whose -LSE in base 2 is `shift`, and what dP - D is multiplied by to be dS: P, times the
    /// slope of the soft cap.
    #[track_caller]
    pub(super) fn p(&self, product: V<'k, F32>, shift: V<'k, F32>) -> [V<'k, F32>; 2] {
        match self.into_cap {
            None => {
                let p = product.fma(self.scale_log2, shift).ex2();
                [p, p]
            }
            Some(into) => {
                let [p, slope] = self.capped_p(product, into, shift);
                [p, p * slope]
            }
        }
    }

    /// P of a product that is capped, and the slope of the soft cap.
    #[track_caller]
    pub(super) fn capped_p(
        &self,
        product: V<'k, F32>,
        into_cap: V<'k, F32>,
        shift: V<'k, F32>,
    ) -> [V<'k, F32>; 2] {
        let capped = softcap(product, into_cap);
        let p = capped.fma(self.scale_log2, shift).ex2();
        // d tanh(x) = 1 - tanh²(x)
        let slope = (-capped).fma(capped, capped.constant(1.0));
        [p, slope]
    }
}

/// The registers of a fragment, by [`At::index`].
pub(super) fn registers<'k>(frag: &Frag<'k>) -> Vec<V<'k, F32>> {
    frag.elements().map(|(_, register)| register.now()).collect()
}

/// Threads of a warpgroup.
pub(super) const WARPGROUP: u32 = 128;

/// A tile for the registers of a fragment in a warpgroup's threads: four of a thread are a row.
pub(super) fn registers_tile(cols: u32) -> TileShape {
    TileShape::new(Elem::F32, cols / 8 * WARPGROUP, 4)
}

/// Where in such a tile the thread's registers 4 · i and on are.
#[track_caller]
pub(super) fn places_of_registers<'k>(
    b: &'k Builder,
    tile: Tile<'_, 'k>,
) -> impl Iterator<Item = SharedAddr> + use<'k> {
    let first = tile.element(b.tid() & (WARPGROUP - 1), 0);
    (0..tile.shape().rows / WARPGROUP).map(move |group| first.at((16 * WARPGROUP * group) as i32))
}

/// Stores them.
#[track_caller]
pub(super) fn store_registers<'k>(frag: &Frag<'k>, tile: Tile<'_, 'k>) {
    let b = frag.builder();
    let registers = registers(frag);
    for (at, four) in places_of_registers(b, tile).zip(registers.chunks_exact(4)) {
        b.store_vector(at, [four[0], four[1], four[2], four[3]]);
    }
}

/// Visible columns, counted from `first`, of the thread's two rows, `row` and 8 below. Any of a row beyond the end.
#[track_caller]
pub(super) fn visible<'k>(
    b: &'k Builder,
    inputs: &Inputs<InKernel<'k>>,
    work: &Work<V<'k, B32>>,
    mask: Mask,
    [row, first]: [V<'k, B32>; 2],
) -> [Visible<'k>; 2] {
    let (left, _) = mask.reach();
    let first = first + b.frag_col();
    if let Some(rows) = inputs.intervals {
        let of_head = rows.of_head(work.batch, work.head);
        return Half::BOTH
            .map(|half| rows.visible(b, of_head, Position(row + half.rows()), work.lens).from(first));
    }
    Half::BOTH.map(|half| {
        let keys = inputs.lookup.keys(row + half.rows(), work.lens);
        Visible { start: left.map(|_| keys.start), end: keys.end, other: None }.from(first)
    })
}

/// Makes zeros of the thread's rows of a gradient, `row` and 8 below, where they are not `used`.
#[track_caller]
pub(super) fn clear_unused<'k>(gradient: &mut Frag<'k>, row: V<'k, B32>, used: V<'k, B32>) {
    let is_used = [row, row + 8].map(|row| row.lt(used));
    gradient.map_in_place(|x, at| is_used[at.half as usize].select(x, 0.0));
}

/// Writes a gradient of a tile of `tile_rows` rows, times `factor`: the thread's `row`, and 8 below. Rows that are not
/// in use get zeros.
#[track_caller]
pub(super) fn write_tile<'k>(
    mut gradient: Frag<'k>,
    factor: Option<V<'k, F32>>,
    to: &Strided<InKernel<'k>>,
    work: &Work<V<'k, B32>>,
    (row, tile_rows): (V<'k, B32>, u32),
    format: (Elem, u32),
) {
    let (mut in_memory, mut end) = (row, work.lens.q);
    if let Some(listed) = work.listed {
        let reaches_beyond = (work.row + tile_rows).gt(work.lens.q);
        let b = gradient.builder();
        b.if_uniform(reaches_beyond, || clear_unused(&mut gradient, row, work.lens.q));
        (in_memory, end) = (listed.q_row + row, listed.q_row + listed.q_rows);
    }
    write(gradient, factor, to, [work.batch, work.head, in_memory], end, format);
}

/// Writes rows of a gradient, times `factor`, where they are before `end`: the thread's `row` of a head, and 8 below.
#[track_caller]
pub(super) fn write<'k>(
    mut gradient: Frag<'k>,
    factor: Option<V<'k, F32>>,
    to: &Strided<InKernel<'k>>,
    [batch, head, row]: [V<'k, B32>; 3],
    end: V<'k, B32>,
    (elem, cols): (Elem, u32),
) {
    if let Some(factor) = factor {
        gradient.map_in_place(|x, _| x * factor);
    }
    let inside = [row, row + 8].map(|row| row.lt(end));
    let store = StoreRows { elem, columns: Columns::of_rows(cols), order: ColumnOrder::Natural };
    store.store(gradient, to.global(), [batch, head, row], inside);
}
