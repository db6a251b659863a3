//! Tiles of keys under a mask of intervals: the blocks of rows that see each tile, and the parts into which tiles with
//! many blocks are split ([`fa3_sched::backward::TileSplit`]). Earlier kernels have written these to memory.

use fa3_ir::BufferId;
use fa3_ir::lang::*;
use fa3_sched::KvRange;
use fa3_sched::backward::{TileSplit, is_split, part};

use super::out::Out;
use crate::kernels::params::{Form, Host, InKernel, Pass, Side, copies, param, params};

/// Number of words of an entry, in the array of blocks and in the list.
const WORDS: u32 = 4;

params! {
    /// The arrays of blocks and of parts.
    struct KeyTiles {
        /// The range of blocks of rows that see each tile.
        blocks: pointer = "blocks_of_keys",
        /// A [`Header`]; then `most_parts` entries for parts, each with the index of its tile and its index in the
        /// tile; then the split tiles, each with its index, its first part, and its number of parts.
        list: pointer = "splits",
        most_parts: u32,
    }
}

copies!(KeyTiles);

/// The counts of the split of tiles into parts.
#[derive(Clone, Copy)]
pub(crate) struct Header<T> {
    /// Number of parts.
    pub(crate) parts: T,
    /// Number of split tiles.
    pub(crate) tiles: T,
    /// The largest number of blocks of a part.
    pub(crate) size: T,
}

/// A tile that is split.
#[derive(Clone, Copy)]
pub(crate) struct SplitTile<T> {
    /// The index of the tile.
    pub(crate) tile: T,
    /// The index of the tile's first part, among all parts.
    pub(crate) first: T,
    /// The number of the tile's parts.
    pub(crate) parts: T,
}

/// A tile of keys, or a part of a tile, as a CTA computes it.
#[derive(Clone, Copy)]
pub(crate) struct KeyTile<T> {
    /// The index of the tile.
    pub(crate) tile: T,
    /// The blocks that the CTA visits.
    pub(crate) blocks: KvRange<T>,
    /// The destination of gradients: the tensors for a whole tile, nowhere for a split tile, a buffer for a part.
    pub(crate) out: Out<T>,
}

impl KeyTiles<Host> {
    /// The shapes of the arrays of blocks and of parts, for `tiles` tiles.
    pub(crate) fn dims(tiles: u32, splits: &TileSplit<u32>) -> [[u32; 2]; 2] {
        [tiles, 1 + splits.most_parts() + splits.most_tiles()].map(|entries| [entries, WORDS])
    }

    pub(crate) fn of(splits: &TileSplit<u32>, [blocks, list]: [BufferId; 2]) -> KeyTiles<Host> {
        KeyTiles { blocks, list, most_parts: splits.most_parts() }
    }
}

impl KeyTiles<Form> {
    /// The parameters that a kernel declares for the arrays.
    pub(crate) fn form() -> KeyTiles<Form> {
        KeyTiles { blocks: Elem::U32, list: Elem::U32, most_parts: () }
    }
}

impl<'k> KeyTiles<InKernel<'k>> {
    /// The tile or part with number `number` in a launch, which must exist. Parts have the first numbers, and tiles the
    /// numbers behind them. A split tile visits no block.
    #[track_caller]
    pub(crate) fn find(&self, b: &'k Builder, number: U32<'k>) -> KeyTile<U32<'k>> {
        let Header { parts, size, .. } = self.header(b);
        let is_part = number.lt(parts);
        let [tile, of_tile] = [b.var("tile", number - parts), b.var("part", 0)];
        b.if_uniform(is_part, || {
            let [its_tile, its_number, ..] = b.load_vector::<B32, 4>(self.entry(number + 1));
            tile.set(its_tile);
            of_tile.set(its_number);
        });
        let tile = tile.get();
        let blocks = self.load_blocks(b, tile);
        let all = blocks.end - blocks.first;
        let is_split = is_split(all, size);
        let size = is_part.select(size, is_split.select::<B32>(0, all));
        let whole = is_split.select::<B32>(Out::NOWHERE, Out::TENSOR);
        let out = Out(is_part.select(number + 1, whole));
        KeyTile { tile, blocks: part(blocks, of_tile.get(), size), out }
    }

    /// The counts of the split.
    #[track_caller]
    pub(crate) fn header(&self, b: &'k Builder) -> Header<U32<'k>> {
        let [parts, tiles, size, _] = b.load_vector::<B32, 4>(self.entry(b.value(0)));
        Header { parts, tiles, size }
    }

    /// Stores the counts of the split.
    #[track_caller]
    pub(crate) fn store_header(&self, b: &'k Builder, Header { parts, tiles, size }: Header<U32<'k>>) {
        b.store_vector(self.entry(b.value(0)), [parts, tiles, size, b.value(0)]);
    }

    /// Stores part `number` of all parts, which is part `of_tile` of tile `tile`.
    #[track_caller]
    pub(crate) fn store_part(&self, b: &'k Builder, number: U32<'k>, [tile, of_tile]: [U32<'k>; 2]) {
        let zero = b.value(0);
        b.store_vector(self.entry(number + 1), [tile, of_tile, zero, zero]);
    }

    /// Loads split tile `number`.
    #[track_caller]
    pub(crate) fn split_tile(&self, b: &'k Builder, number: U32<'k>) -> SplitTile<U32<'k>> {
        let [tile, first, parts, _] = b.load_vector::<B32, 4>(self.entry(number + self.most_parts + 1));
        SplitTile { tile, first, parts }
    }

    /// Stores split tile `number`.
    #[track_caller]
    pub(crate) fn store_split_tile(&self, b: &'k Builder, number: U32<'k>, split: SplitTile<U32<'k>>) {
        let SplitTile { tile, first, parts } = split;
        b.store_vector(self.entry(number + self.most_parts + 1), [tile, first, parts, b.value(0)]);
    }

    /// The address of an entry of the list, whose first entry is the header.
    #[track_caller]
    fn entry(&self, number: U32<'k>) -> U64<'k> {
        number.mad_wide(4 * WORDS, self.list)
    }

    /// Loads the range of blocks that see a tile.
    #[track_caller]
    pub(crate) fn load_blocks(&self, b: &'k Builder, tile: U32<'k>) -> KvRange<U32<'k>> {
        let [first, unmasked_first, unmasked_end, end] =
            b.load_vector::<B32, 4>(tile.mad_wide(4 * WORDS, self.blocks));
        KvRange { first, unmasked_first, unmasked_end, end }
    }

    /// Stores the range of blocks that see a tile.
    #[track_caller]
    pub(crate) fn store_blocks(&self, b: &'k Builder, tile: U32<'k>, blocks: KvRange<U32<'k>>) {
        let KvRange { first, unmasked_first, unmasked_end, end } = blocks;
        let words = [first, unmasked_first, unmasked_end, end];
        b.store_vector(tile.mad_wide(4 * WORDS, self.blocks), words);
    }
}
