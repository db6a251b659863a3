//! Loads of tiles by the tensor memory accelerator, through a ring.

use fa3_ir::lang::*;

use super::pages::PageSpan;
use super::rows_view::RowSpan;

/// A tensor whose tiles go through a ring.
pub(crate) struct Feed<'k> {
    source: Source<'k>,
    along: Along,
    ring: Ring<'k, 1>,
    /// The first column of its tiles in the tensor.
    col: u32,
    /// Which part of a tile this CTA loads for its cluster; none if it loads all, for itself.
    part: Option<V<'k, B32>>,
}

/// The source of a ring's tiles.
enum Source<'k> {
    /// Copies of a tensor map.
    Tiles(TileMap),
    /// A warp that copies rows.
    Rows(CopiedRing<'k, 1>),
}

/// The thread that fills the ring.
pub(crate) struct TmaLoader<'k> {
    map: TileMap,
    /// Rows of a tile, of which the map may copy some at a time.
    tile_rows: u32,
    along: Along,
    col: u32,
    ring: Producer<'k, 1>,
    part: Option<V<'k, B32>>,
}

/// The CTAs of a cluster of two.
const BOTH: u16 = 0b11;

/// The dimension of the tensor that a tile's rows run along.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Along {
    /// The columns of a head: dimensions head_dim, heads, rows, sequences.
    HeadDim,
    /// The rows of a sequence: dimensions rows, head_dim, heads, sequences.
    Seqlen,
}

/// The sequence whose rows are loaded.
#[derive(Clone, Copy)]
pub(crate) enum Sequence<'k> {
    /// This one of a tensor that has a dimension of sequences.
    Number(V<'k, B32>),
    /// These rows of memory, of a [`rows_view`](super::rows_view).
    Rows(RowSpan<'k>),
    /// The same, of a tensor whose tiles have rows of so many heads. These count as one.
    RowsOfHeads(RowSpan<'k>, u32),
}

/// Keys whose tiles a whole warp loads.
pub(crate) enum Keys<'k> {
    /// The rows of a sequence.
    Of(Sequence<'k>),
    /// These rows of pages.
    InPages(PageSpan<'k>),
}

impl<'k> From<V<'k, B32>> for Sequence<'k> {
    fn from(number: V<'k, B32>) -> Sequence<'k> {
        Sequence::Number(number)
    }
}

impl<'k> Sequence<'k> {
    /// Loads the tile of a head that begins with a row of it into a slot.
    #[track_caller]
    pub(crate) fn load<const N: usize>(
        &self,
        slot: &mut EmptySlot<'k, N>,
        index: usize,
        map: &TileMap,
        at: [V<'k, B32>; 2],
    ) {
        self.load_from(slot, index, map, (0, at));
    }

    /// Loads the tile of a head that begins with a column and a row of it into a slot.
    #[track_caller]
    fn load_from<const N: usize>(
        &self,
        slot: &mut EmptySlot<'k, N>,
        index: usize,
        map: &TileMap,
        (col, [head, row]): (u32, [V<'k, B32>; 2]),
    ) {
        match self {
            Sequence::Number(batch) => slot.load(index, map, (col, head, row, *batch)),
            Sequence::Rows(rows) => slot.load(index, map, rows.place(head, row).at_column(col)),
            Sequence::RowsOfHeads(rows, heads) => {
                slot.load_first_rows(index, map, rows.coords_of_heads(head * *heads, row));
            }
        }
    }
}

impl<'k> Feed<'k> {
    /// Declares a ring of `stages` tiles of this shape, which `consumers` warps empty.
    #[track_caller]
    pub(crate) fn declare(b: &'k Builder, name: &str, map: TileMap, stages: u32, consumers: u32) -> Feed<'k> {
        let ring = b.ring(name, stages, consumers, [(name, map.shape())]);
        Feed { source: Source::Tiles(map), along: Along::HeadDim, ring, col: 0, part: None }
    }

    /// Like `declare`, for tiles shared by a cluster: each CTA loads as many rows as `map` copies, and multicasts them.
    #[track_caller]
    pub(crate) fn declare_shared(
        b: &'k Builder,
        name: &str,
        map: TileMap,
        stages: u32,
        consumers: u32,
    ) -> Feed<'k> {
        let cluster = b.launch().cluster;
        if cluster == 1 {
            return Feed::declare(b, name, map, stages, consumers);
        }
        let shape = TileShape { rows: map.shape().rows * cluster, ..map.shape() };
        let ring = b.cluster_ring(name, stages, consumers, [(name, shape)]);
        Feed {
            source: Source::Tiles(map),
            along: Along::HeadDim,
            ring,
            col: 0,
            part: Some(b.cluster_cta_rank()),
        }
    }

    /// Like `declare`, for a transposed tensor. Each slot has `more` extra rows at its end that loads never write.
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
        let ring = b.ring(name, stages, consumers, [(name, shape)]);
        Feed { source: Source::Tiles(map), along: Along::Seqlen, ring, col: 0, part: None }
    }

    /// Like `declare`, for tiles of `rows` rows, of which `map` copies some at a time.
    #[track_caller]
    pub(crate) fn declare_rows(
        b: &'k Builder,
        name: &str,
        map: TileMap,
        rows: u32,
        stages: u32,
        consumers: u32,
    ) -> Feed<'k> {
        let ring = b.ring(name, stages, consumers, [(name, TileShape { rows, ..map.shape() })]);
        Feed { source: Source::Tiles(map), along: Along::HeadDim, ring, col: 0, part: None }
    }

    /// Like `declare`, for tiles that a warp copies row by row.
    #[track_caller]
    pub(crate) fn declare_copied(
        b: &'k Builder,
        name: &str,
        shape: TileShape,
        stages: u32,
        consumers: u32,
    ) -> Feed<'k> {
        let copied = b.copied_ring(name, stages, consumers, [(name, shape)]);
        let ring = copied.ring().clone();
        Feed { source: Source::Rows(copied), along: Along::HeadDim, ring, col: 0, part: None }
    }

    /// The same with tiles that begin with column `col` of the tensor.
    pub(crate) fn at_column(self, col: u32) -> Feed<'k> {
        Feed { col, ..self }
    }

    /// Columns of its tiles.
    pub(crate) fn cols(&self) -> u32 {
        let [tile] = self.ring.tiles_of(0);
        tile.shape().cols
    }

    /// The ring that it fills.
    pub(crate) fn ring(&self) -> &Ring<'k, 1> {
        &self.ring
    }

    /// The ring as those have it who fill it row by row, if they do, and the first column of its tiles.
    pub(crate) fn copied(&self) -> Option<(&CopiedRing<'k, 1>, u32)> {
        match &self.source {
            Source::Tiles(_) => None,
            Source::Rows(ring) => Some((ring, self.col)),
        }
    }

    /// The end that fills it by a tensor map.
    #[track_caller]
    pub(crate) fn loader(&self) -> TmaLoader<'k> {
        let Source::Tiles(map) = self.source else { unreachable!("rows that are copied have no tensor map") };
        let [tile] = self.ring.tiles_of(0);
        let tile_rows = tile.shape().rows;
        let &Feed { along, col, part, .. } = self;
        TmaLoader { map, tile_rows, along, col, ring: self.ring.producer(), part }
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
    pub(crate) fn load(&mut self, head: V<'k, B32>, row: V<'k, B32>, of: impl Into<Sequence<'k>>) {
        let mut slot = self.ring.acquire(); // A1:7
        match (of.into(), self.along, self.part) {
            (of @ (Sequence::Rows(_) | Sequence::RowsOfHeads(..)), ..) => {
                of.load_from(&mut slot, 0, &self.map, (self.col, [head, row]));
            }
            // A1:8
            (Sequence::Number(batch), Along::HeadDim, None) => {
                slot.load(0, &self.map, (self.col, head, row, batch))
            }
            (Sequence::Number(batch), Along::HeadDim, Some(part)) => {
                let row = part.mad(self.map.shape().rows, row);
                slot.load_part(0, &self.map, (self.col, head, row, batch), part, BOTH);
            }
            (Sequence::Number(batch), Along::Seqlen, _) => {
                slot.load_first_rows(0, &self.map, (row, self.col, head, batch));
            }
        }
        slot.commit(); // A1:9
    }

    /// Loads the tile of `head` that begins with `row`, in a whole warp, one of whose threads begins the copies. All
    /// lanes have the same numbers, and the compiler knows: then it takes no loop for each copy to find that out.
    #[track_caller]
    pub(crate) fn load_in_warp(&mut self, head: V<'k, B32>, row: V<'k, B32>, of: &Keys<'k>) {
        TmaLoader::load_parts_in_warp(std::slice::from_mut(self), head, row, of);
    }

    /// The same for the columns that each of these loaders has of the same rows, one after the other.
    #[track_caller]
    pub(crate) fn load_parts_in_warp(
        loaders: &mut [TmaLoader<'k>],
        head: V<'k, B32>,
        row: V<'k, B32>,
        of: &Keys<'k>,
    ) {
        let Some(first) = loaders.first() else { return };
        match of {
            Keys::Of(sequence) => {
                for TmaLoader { map, col, ring, .. } in loaders {
                    ring.fill_by_warp(|mut slot| {
                        sequence.load_from(&mut slot, 0, map, (*col, [head, row])); // A1:7-8
                        slot.commit(); // A1:9
                    });
                }
            }
            Keys::InPages(pages) => {
                let rows = first.map.shape().rows;
                // Before the wait for the slot, as it may take as long.
                let blocks = pages.blocks(head, row, (first.tile_rows / rows, rows));
                for TmaLoader { map, col, ring, .. } in loaders {
                    ring.fill_by_warp(|mut slot| {
                        slot.load_blocks(0, map, blocks.iter().map(|block| block.at_column(*col))); // A1:7-8
                        slot.commit(); // A1:9
                    });
                }
            }
        }
    }
}
