//! The channels of V of e4m3, whose means and scales are those of O's columns: O = mean + scale · O of codes.

use fa3_ir::lang::*;

use super::Fwd;
use super::descales::{Descales, V_};
use crate::kernels::parts::geometry::Work;
use crate::kernels::parts::store_rows::Order;

/// Columns of a fragment of which a thread has four.
const GROUP: u32 = 16;

/// The scales and means of the channels of a tile's head of V.
pub(super) struct Channels<'k> {
    builder: &'k Builder,
    scale: V<'k, B64>,
    mean: V<'k, B64>,
    /// Of the head, among all channels.
    first: V<'k, B32>,
    /// How many it has.
    cols: u32,
    order: Order,
}

impl<'k> Channels<'k> {
    /// Those of a tile, if channels have scales. O has columns in this order.
    #[track_caller]
    pub(super) fn of(fwd: &Fwd<'k>, work: &Work<V<'k, B32>>, order: Order) -> Option<Channels<'k>> {
        let Descales { pointers, mean, heads_kv, .. } = fwd.params.descales?;
        let cols = fwd.spec.head_dim_v;
        let first = work.batch.mad(heads_kv, work.kv_head) * cols;
        Some(Channels { builder: fwd.builder, scale: pointers[V_], mean: mean?, first, cols, order })
    }

    /// Gives a part of O, from this column on, the scales and means of its channels. It has been divided by row sums.
    /// An `empty` row, which has seen no key, is 0.
    #[track_caller]
    pub(super) fn restore(&self, part: &mut Frag<'k>, from: u32, empty: Rows<'k, Pred>) {
        let quad = self.builder.tid() & 3;
        for group in (0..part.cols().min(self.cols - from)).step_by(GROUP as usize) {
            let [scale, mean] = [self.scale, self.mean].map(|pointer| self.four(pointer, from + group, quad));
            for (at, x) in part.elements().filter(|(at, _)| (group..group + GROUP).contains(&at.col)) {
                let of_four = self.order.place_of(at.col % GROUP);
                let restored = x.get().fma(scale[of_four], mean[of_four]);
                x.set(empty[at].select::<F32>(0.0, restored));
            }
        }
    }

    /// The numbers of the columns that a thread has of 16, from column `from` on.
    #[track_caller]
    fn four(&self, pointer: V<'k, B64>, from: u32, quad: V<'k, B32>) -> [V<'k, F32>; 4] {
        let (b, first) = (self.builder, self.first + from);
        // Not read-only loads: the quantizer may still be writing them when this kernel is launched.
        match self.order {
            Order::EvensFirst => b.load_vector((first + (quad << 2)).mad_wide(4, pointer)),
            Order::Natural => {
                let at = (first + (quad << 1)).mad_wide(4, pointer);
                let [[a, b], [c, d]] = [0, 32].map(|bytes| b.load_vector(at.at(bytes)));
                [a, b, c, d]
            }
        }
    }
}

impl Order {
    /// Which of the four columns that a thread has of 16, as they are in memory, stands at `col` in a fragment: 0, 1, 8
    /// or 9.
    fn place_of(self, col: u32) -> usize {
        let (half, within) = (col as usize / 8, col as usize % 2);
        match self {
            Order::Natural => 2 * half + within,
            Order::EvensFirst => 2 * within + half,
        }
    }
}
