//! What tile i of a launch is: the same integers for the host and in a kernel.

use std::cell::RefCell;

use fa3_ir::{B32, Builder, V};
use fa3_sched::forward::Plan;
use fa3_sched::{Decoder, Int, KvRange, Lens, Order, Tile, TileCounts, Tiling, VisibleKeys};
use fa3_types::Mask;

use crate::kernels::num::Num;

/// The numbers of a launch from which a tile's number gives its rows and its keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Geometry<T> {
    /// How many tiles there are.
    pub(super) tiles: T,
    /// Rows of Q and of K, the same for every sequence.
    pub(super) lens: Lens<T>,
    decoder: Decoder<T>,
    tiling: Tiling<T>,
}

/// One tile of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Work<T> {
    /// Its sequence.
    pub(super) batch: T,
    /// Its head of Q and O.
    pub(super) head: T,
    /// Its head of K and V.
    pub(super) kv_head: T,
    /// Its first query row.
    pub(super) row: T,
    /// The blocks of keys that it visits.
    pub(super) kv: KvRange<T>,
}

const ONE: TileCounts = TileCounts { m_blocks: 1, heads: 1, batch: 1, splits: 1 };

impl Geometry<u32> {
    /// Of a plan.
    pub(super) fn of(plan: &Plan) -> Geometry<u32> {
        let schedule = plan.schedule();
        Geometry {
            tiles: schedule.num_tiles(),
            lens: plan.lens(),
            decoder: schedule.decoder().unwrap_or_else(|| Decoder::new(ONE, schedule.order())),
            tiling: plan.tiling(),
        }
    }

    /// Some numbers, in the form that all launches with this order and this mask have.
    pub(super) fn form(order: Order, mask: Mask) -> Geometry<u32> {
        let (decoder, tiling) = (Decoder::new(ONE, order), Tiling::new(1, 1, 1, mask));
        Geometry { tiles: 1, lens: Lens { q: 1, k: 1 }, decoder, tiling }
    }

    /// Its numbers, in the order of [`Geometry::declare`].
    pub(super) fn numbers(self) -> Vec<u32> {
        let mut numbers = Vec::new();
        _ = self.map(|number| numbers.push(number));
        numbers
    }

    /// The same numbers as parameters of a kernel.
    #[track_caller]
    pub(super) fn declare(self, b: &mut Builder) -> Geometry<V<B32>> {
        let mut number = 0;
        self.map(|_| {
            number += 1;
            b.param_u32(&format!("geometry{number}"))
        })
    }
}

impl<T> Geometry<T> {
    /// Applies `f` to each of its numbers in a fixed order.
    fn map<U>(self, mut f: impl FnMut(T) -> U) -> Geometry<U> {
        Geometry {
            tiles: f(self.tiles),
            lens: Lens { q: f(self.lens.q), k: f(self.lens.k) },
            decoder: self.decoder.map(&mut f),
            tiling: self.tiling.map(f),
        }
    }
}

impl<T: Int> Geometry<T> {
    /// Tile number `index`.
    fn decode(&self, index: T) -> Work<T> {
        let Tile { m_block, head, batch, split: _ } = self.decoder.decode(index);
        Work {
            batch,
            head,
            kv_head: self.tiling.kv_head(head),
            row: m_block * self.tiling.tile_m(),
            kv: self.tiling.kv_range(m_block, self.lens),
        }
    }
}

impl Geometry<V<B32>> {
    /// Tile number `index`.
    #[track_caller]
    pub(super) fn work(&self, b: &mut Builder, index: V<B32>) -> Work<V<B32>> {
        let cell = RefCell::new(b);
        let geometry = self.map(|number| Num::new(&cell, number));
        let Work { batch, head, kv_head, row, kv } = geometry.decode(Num::new(&cell, index));
        let [batch, head, kv_head, row] = [batch, head, kv_head, row].map(Num::value);
        let [first, unmasked_first, unmasked_end, end] =
            [kv.first, kv.unmasked_first, kv.unmasked_end, kv.end].map(Num::value);
        Work { batch, head, kv_head, row, kv: KvRange { first, unmasked_first, unmasked_end, end } }
    }

    /// The keys that query row `row` may see; of a row beyond the sequence's end, any.
    #[track_caller]
    pub(super) fn keys(&self, b: &mut Builder, row: V<B32>) -> VisibleKeys<V<B32>> {
        let cell = RefCell::new(b);
        let geometry = self.map(|number| Num::new(&cell, number));
        let VisibleKeys { start, end } = geometry.tiling.keys(Num::new(&cell, row), geometry.lens);
        VisibleKeys { start: start.value(), end: end.value() }
    }
}
