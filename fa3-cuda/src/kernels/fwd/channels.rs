//! Scales and means of e4m3 V's channels, by which O's columns are restored: O = mean + scale · (O of codes).

use fa3_ir::lang::*;

use super::descales::Descales;
use super::scales::sequence_of_scales;
use super::state::Fwd;
use crate::kernels::parts::geometry::WorkTile;
use crate::kernels::parts::store_rows::ColumnOrder;

/// Number of fragment columns in a group. A thread has four of them.
const GROUP: u32 = 16;

/// Applies the scales and means of V's channels, if they exist, to a tile of O that has been divided by its row sums.
/// Means are weighted by the sum of P over keys, which is 1 without a sink.
#[track_caller]
pub(super) fn restore<'k>(
    fwd: &Fwd<'k>,
    o: &Frag<'k>,
    work: &WorkTile<'k>,
    order: ColumnOrder,
    of_keys: Option<Rows<'k>>,
) {
    let Some(Descales { pointers: [.., Some(scale)], mean: Some(mean), heads_kv, .. }) = fwd.params.descales
    else {
        return;
    };
    let (b, cols) = (fwd.builder, fwd.spec.head_dim_v);
    let head = sequence_of_scales(work).mad(heads_kv, work.kv_head);
    let (first, quad) = (head * cols, b.tid() & 3);
    for group in (0..cols).step_by(GROUP as usize) {
        let [scale, mean] = [scale, mean].map(|pointer| four(b, pointer, first + group, order, quad));
        for (at, x) in o.elements().filter(|(at, _)| (group..group + GROUP).contains(&at.col)) {
            let of_four = order.place_of(at.col % GROUP);
            let mean = of_keys.map_or(mean[of_four], |of_keys| mean[of_four] * of_keys[at]);
            x.set(x.get().fma(scale[of_four], mean));
        }
    }
}

/// The values of the four columns that a thread has among the 16 columns from `first` on.
#[track_caller]
fn four<'k>(
    b: &'k Builder,
    pointer: U64<'k>,
    first: U32<'k>,
    order: ColumnOrder,
    quad: U32<'k>,
) -> [V<'k, F32>; 4] {
    // This must not be a read-only load: with PDL, the quantizer may still write these values when this kernel starts.
    match order {
        ColumnOrder::EvensFirst => b.load_vector((first + (quad << 2)).mad_wide(4, pointer)),
        ColumnOrder::Natural => {
            let at = (first + (quad << 1)).mad_wide(4, pointer);
            let [[x, y], [z, w]] = [0, 32].map(|bytes| b.load_vector(at.at(bytes)));
            [x, y, z, w]
        }
    }
}

impl ColumnOrder {
    /// Index of fragment column `col` (0, 1, 8 or 9) among the four columns of a group of 16 that a thread has. The
    /// index counts in memory order.
    fn place_of(self, col: u32) -> usize {
        let (half, within) = (col as usize / 8, col as usize % 2);
        match self {
            ColumnOrder::Natural => 2 * half + within,
            ColumnOrder::EvensFirst => 2 * within + half,
        }
    }
}
