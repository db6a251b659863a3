//! Loads of tiles by the tensor memory accelerator, through a ring.

use fa3_ir::lang::*;

/// A tensor whose tiles go through a ring: dimensions head_dim, heads, rows, sequences.
pub(crate) struct Feed<'k> {
    map: TileMap,
    ring: Ring<'k, 1>,
}

/// The thread that fills the ring.
pub(crate) struct TmaLoader<'k> {
    map: TileMap,
    ring: Producer<'k, 1>,
}

impl<'k> Feed<'k> {
    /// Declares a ring of `stages` tiles of this shape, which `consumers` warps empty.
    #[track_caller]
    pub(crate) fn declare(b: &'k Builder, name: &str, map: TileMap, stages: u32, consumers: u32) -> Feed<'k> {
        let shape: TileShape = map.shape();
        Feed { map, ring: b.ring(name, stages, consumers, [(name, shape)]) }
    }

    /// The end that fills it.
    #[track_caller]
    pub(crate) fn loader(&self) -> TmaLoader<'k> {
        TmaLoader { map: self.map, ring: self.ring.producer() }
    }

    /// The end that empties it.
    #[track_caller]
    pub(crate) fn consumer(&self) -> Consumer<'k, 1> {
        self.ring.consumer()
    }
}

impl<'k> TmaLoader<'k> {
    /// Loads the tile of `head` that begins with `row`.
    #[track_caller]
    pub(crate) fn load(&mut self, head: V<'k, B32>, row: V<'k, B32>, batch: V<'k, B32>) {
        let mut slot = self.ring.acquire(); // A1:7
        slot.load(0, &self.map, (0, head, row, batch)); // A1:8
        slot.commit(); // A1:9
    }
}
