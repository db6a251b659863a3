//! Loads of tiles by the tensor memory accelerator, through a ring.

use fa3_ir::lang::*;

/// A tensor whose tiles go through a ring.
pub(crate) struct Feed<'k> {
    map: TileMap,
    along: Along,
    ring: Ring<'k, 1>,
}

/// The thread that fills the ring.
pub(crate) struct TmaLoader<'k> {
    map: TileMap,
    along: Along,
    ring: Producer<'k, 1>,
}

/// What runs along the rows of a tile.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Along {
    /// The columns of a head: dimensions head_dim, heads, rows, sequences.
    HeadDim,
    /// The rows of a sequence: dimensions rows, head_dim, heads, sequences.
    Seqlen,
}

impl<'k> Feed<'k> {
    /// Declares a ring of `stages` tiles of this shape, which `consumers` warps empty.
    #[track_caller]
    pub(crate) fn declare(b: &'k Builder, name: &str, map: TileMap, stages: u32, consumers: u32) -> Feed<'k> {
        let ring = b.ring(name, stages, consumers, [(name, map.shape())]);
        Feed { map, along: Along::HeadDim, ring }
    }

    /// The same of a transposed tensor. Behind what is loaded of it, a tile has `more` rows, whose contents stay.
    #[track_caller]
    pub(crate) fn declare_transposed(
        b: &'k Builder,
        name: &str,
        map: TileMap,
        more: u32,
        stages: u32,
        consumers: u32,
    ) -> Feed<'k> {
        let shape = TileShape { rows: map.shape().rows + more, ..map.shape() };
        Feed { map, along: Along::Seqlen, ring: b.ring(name, stages, consumers, [(name, shape)]) }
    }

    /// What it goes through.
    pub(crate) fn ring(&self) -> &Ring<'k, 1> {
        &self.ring
    }

    /// The end that fills it.
    #[track_caller]
    pub(crate) fn loader(&self) -> TmaLoader<'k> {
        TmaLoader { map: self.map, along: self.along, ring: self.ring.producer() }
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
        match self.along {
            Along::HeadDim => slot.load(0, &self.map, (0, head, row, batch)), // A1:8
            Along::Seqlen => slot.load_first_rows(0, &self.map, (row, 0, head, batch)),
        }
        slot.commit(); // A1:9
    }
}
