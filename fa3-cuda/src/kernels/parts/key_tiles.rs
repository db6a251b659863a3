//! Tiles of keys under a mask of intervals: the blocks of rows that see each, and the parts into which those that many
//! see are split ([`fa3_sched::backward::Splits`]). Both are data, which kernels before have written.

use fa3_ir::BufferId;
use fa3_ir::lang::*;
use fa3_sched::KvRange;
use fa3_sched::backward::{Splits, is_split, part};

use super::out::Out;
use crate::kernels::params::{Form, Host, InKernel, Pass, Side};

/// Words of an entry of both arrays.
const WORDS: u32 = 4;

/// The arrays.
#[derive(Clone, Copy)]
pub(crate) struct KeyTiles<S: Side> {
    /// The blocks of each tile.
    blocks: S::Pointer,
    /// A [`Header`]; room for so many parts, each with its tile's number and its own; then split tiles, each with its
    /// number, its first part, and how many it has.
    list: S::Pointer,
    most_parts: S::U32,
}

/// The numbers of a split.
#[derive(Clone, Copy)]
pub(crate) struct Header<T> {
    /// How many parts there are.
    pub(crate) parts: T,
    /// How many tiles are split.
    pub(crate) tiles: T,
    /// The most blocks of a part.
    pub(crate) size: T,
}

/// A tile that is split.
#[derive(Clone, Copy)]
pub(crate) struct SplitTile<T> {
    /// Its number.
    pub(crate) tile: T,
    /// Its first part.
    pub(crate) first: T,
    /// How many it has.
    pub(crate) parts: T,
}

/// A tile of keys, or a part of one, as a CTA computes it.
#[derive(Clone, Copy)]
pub(crate) struct Found<T> {
    /// The tile.
    pub(crate) tile: T,
    /// The blocks that the CTA visits.
    pub(crate) blocks: KvRange<T>,
    /// The destination of gradients: of a whole tile the tensors, of a split one nowhere, of a part its own buffer.
    pub(crate) out: Out<T>,
}

impl KeyTiles<Host> {
    /// The shapes of both arrays, for so many tiles.
    pub(crate) fn dims(tiles: u32, splits: &Splits<u32>) -> [[u32; 2]; 2] {
        [tiles, 1 + splits.most_parts() + splits.most_tiles()].map(|entries| [entries, WORDS])
    }

    /// The arrays of a launch.
    pub(crate) fn of(splits: &Splits<u32>, [blocks, list]: [BufferId; 2]) -> KeyTiles<Host> {
        KeyTiles { blocks, list, most_parts: splits.most_parts() }
    }
}

impl KeyTiles<Form> {
    /// The form of a kernel's arrays.
    pub(crate) fn form() -> KeyTiles<Form> {
        KeyTiles { blocks: Elem::U32, list: Elem::U32, most_parts: () }
    }
}

impl<A: Side> KeyTiles<A> {
    /// Goes over its numbers.
    #[track_caller]
    pub(crate) fn pass<B: Side>(self, by: &mut impl Pass<A, B>) -> KeyTiles<B> {
        KeyTiles {
            blocks: by.pointer("blocks_of_keys", self.blocks),
            list: by.pointer("splits", self.list),
            most_parts: by.u32("most_parts", self.most_parts),
        }
    }
}

impl<'k> KeyTiles<InKernel<'k>> {
    /// Tile `number` of a launch, which has `last` as its last one besides parts. Parts come before tiles, of which
    /// those that are split visit no block. What lies behind the last tile is as that one.
    #[track_caller]
    pub(crate) fn find(&self, b: &'k Builder, number: V<'k, B32>, last: V<'k, B32>) -> Found<V<'k, B32>> {
        let Header { parts, size, .. } = self.header(b);
        let is_part = number.lt(parts);
        let [tile, of_tile] = [b.var("tile", number - parts), b.var("part", 0)];
        b.if_uniform(is_part, || {
            let [its_tile, its_number, ..] = b.load_vector::<B32, 4>(self.entry(number + 1));
            tile.set(its_tile);
            of_tile.set(its_number);
        });
        let tile = tile.get().min(last);
        let blocks = self.load_blocks(b, tile);
        let all = blocks.end - blocks.first;
        let is_split = is_split(all, size);
        let size = is_part.select(size, is_split.select::<B32>(0, all));
        let whole = is_split.select::<B32>(Out::NOWHERE, Out::TENSOR);
        let out = Out(is_part.select(number + 1, whole));
        Found { tile, blocks: part(blocks, of_tile.get(), size), out }
    }

    /// The numbers of the split.
    #[track_caller]
    pub(crate) fn header(&self, b: &'k Builder) -> Header<V<'k, B32>> {
        let [parts, tiles, size, _] = b.load_vector::<B32, 4>(self.entry(b.value(0)));
        Header { parts, tiles, size }
    }

    /// Stores the numbers of the split.
    #[track_caller]
    pub(crate) fn store_header(&self, b: &'k Builder, Header { parts, tiles, size }: Header<V<'k, B32>>) {
        b.store_vector(self.entry(b.value(0)), [parts, tiles, size, b.value(0)]);
    }

    /// Stores part `number`, which is part `of_tile` of this tile.
    #[track_caller]
    pub(crate) fn store_part(&self, b: &'k Builder, number: V<'k, B32>, [tile, of_tile]: [V<'k, B32>; 2]) {
        let zero = b.value(0);
        b.store_vector(self.entry(number + 1), [tile, of_tile, zero, zero]);
    }

    /// The tile that is split as number `number`.
    #[track_caller]
    pub(crate) fn split_tile(&self, b: &'k Builder, number: V<'k, B32>) -> SplitTile<V<'k, B32>> {
        let [tile, first, parts, _] = b.load_vector::<B32, 4>(self.entry(number + self.most_parts + 1));
        SplitTile { tile, first, parts }
    }

    /// Stores the tile that is split as number `number`.
    #[track_caller]
    pub(crate) fn store_split_tile(&self, b: &'k Builder, number: V<'k, B32>, split: SplitTile<V<'k, B32>>) {
        let SplitTile { tile, first, parts } = split;
        b.store_vector(self.entry(number + self.most_parts + 1), [tile, first, parts, b.value(0)]);
    }

    /// The address of an entry of the list. The header is the first one.
    #[track_caller]
    fn entry(&self, number: V<'k, B32>) -> V<'k, B64> {
        number.mad_wide(4 * WORDS, self.list)
    }

    /// The blocks of a tile.
    #[track_caller]
    pub(crate) fn load_blocks(&self, b: &'k Builder, tile: V<'k, B32>) -> KvRange<V<'k, B32>> {
        let [first, unmasked_first, unmasked_end, end] =
            b.load_vector::<B32, 4>(tile.mad_wide(4 * WORDS, self.blocks));
        KvRange { first, unmasked_first, unmasked_end, end }
    }

    /// Stores the blocks of a tile.
    #[track_caller]
    pub(crate) fn store_blocks(&self, b: &'k Builder, tile: V<'k, B32>, blocks: KvRange<V<'k, B32>>) {
        let KvRange { first, unmasked_first, unmasked_end, end } = blocks;
        let words = [first, unmasked_first, unmasked_end, end];
        b.store_vector(tile.mad_wide(4 * WORDS, self.blocks), words);
    }
}
