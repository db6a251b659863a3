//! Masks of intervals: the bounds of query rows in memory, the keys that a row sees, the KV blocks that a tile visits.

use fa3_ir::lang::*;
use fa3_ir::{BufferId, BufferRole, Program};
use fa3_sched::{
    BlockRange, BlockRanges, Bounds, FastDiv, Int, KvRange, SeqLens, Tiling, VisibleKeys, keys_of_interval,
};
use fa3_types::{Intervals, IntervalsOfRow, Shape};

use super::block_column::BlockColumn;
use super::block_words::{BlockWords, MOST_ROWS};
use super::geometry::{Varlen, WorkTile};
use super::key_tiles::{KeyTile, KeyTiles};
use super::lookup::Lookup;
use super::out::Out;
use super::summaries::{Summaries, at_head, strides};
use super::visible::{Position, TreeWords, Visible};
use crate::kernels::params::{Form, Host, InKernel, Pass, Side, copies, param, params};

/// The name of the buffer of bounds.
pub(crate) const INTERVALS: &str = "intervals";

/// Bytes of the bounds of one row, of the number of one sequence, or of a word.
const fn row_bytes(of_row: IntervalsOfRow) -> u32 {
    match of_row {
        IntervalsOfRow::One => 8,
        IntervalsOfRow::Two => 16,
        IntervalsOfRow::Causal { .. } | IntervalsOfRow::Tree { .. } | IntervalsOfRow::Blocks { .. } => 4,
    }
}

/// Adds the buffer of bounds to a program whose Q has shape `q`.
pub(crate) fn interval_rows<K>(program: &mut Program<K>, form: Intervals, q: Shape) -> BufferId {
    let dims = form.shape(q).map(|extent| extent as u32);
    let intervals = program.buffer(INTERVALS, Elem::U32, &dims, BufferRole::Input);
    program.align(intervals, row_bytes(form.of_row));
    intervals
}

params! {
    /// The location of the bounds of rows.
    struct IntervalRows {
        of_row: fixed IntervalsOfRow,
        address: pointer = "intervals",
        /// Strides in rows, from a sequence to the next and from a head to the next; 0 if sequences or heads share
        /// bounds. Under a tree they count words.
        batch: u64 = "intervals_batch",
        head: u64 = "intervals_head",
        /// The last sequence, if a number of a sequence decides what its rows see.
        last: maybe u32 = "last_sequence",
        /// The number of words of a row, if they say which new keys it sees, or of a block of rows, if they say which
        /// blocks of keys it sees.
        words: maybe u32 = "tree_words",
    }
}

copies!(IntervalRows);

impl IntervalRows<Form> {
    /// The parameters of rows with `of_row` intervals.
    pub(crate) fn form(of_row: IntervalsOfRow) -> IntervalRows<Form> {
        let last = matches!(of_row, IntervalsOfRow::Causal { .. }).then_some(());
        let has_words = matches!(of_row, IntervalsOfRow::Tree { .. } | IntervalsOfRow::Blocks { .. });
        let words = has_words.then_some(());
        IntervalRows { of_row, address: Elem::U32, batch: (), head: (), last, words }
    }
}

impl IntervalRows<Host> {
    /// The arguments of a launch whose Q has shape `q`.
    pub(crate) fn of(form: Intervals, q: Shape, buffer: BufferId) -> IntervalRows<Host> {
        let [_, heads, rows, _] = form.shape(q).map(|extent| extent as u64);
        let of_batch = |words: usize| if q.batch > 1 { (q.seqlen * words) as u64 } else { 0 };
        let ([batch, head], last, words) = match form.of_row {
            IntervalsOfRow::One | IntervalsOfRow::Two => (strides(form, heads, rows), None, None),
            IntervalsOfRow::Causal { sequences } => ([1, 0], Some(sequences as u32 - 1), None),
            IntervalsOfRow::Tree { words } => ([of_batch(words), 0], None, Some(words as u32)),
            IntervalsOfRow::Blocks { words, side: _ } => {
                (strides(form, heads, rows * words as u64), None, Some(words as u32))
            }
        };
        IntervalRows { of_row: form.of_row, address: buffer, batch, head, last, words }
    }
}

impl<'k> IntervalRows<InKernel<'k>> {
    /// The address of the bounds of a head's first row, or of the number of its sequence. Rows behind the last sequence
    /// count as rows of the last one.
    #[track_caller]
    fn of_head(&self, batch: U32<'k>, head: U32<'k>) -> U64<'k> {
        let batch = self.last.map_or(batch, |last| batch.min(last));
        at_head(self.address, [self.batch, self.head], [batch, head], row_bytes(self.of_row))
    }

    /// The address of the bounds of the first row of a tile's sequence. Tiles divide rows.
    #[track_caller]
    pub(crate) fn of_tile(&self, work: &WorkTile<'k>) -> U64<'k> {
        self.of_sequence([work.batch, work.head], work.varlen.map(|varlen| varlen.q_row))
    }

    /// The address of the bounds of the first row of a head in a sequence, which begins with row `first` of Q if it is
    /// in a table.
    #[track_caller]
    pub(crate) fn of_sequence(&self, [batch, head]: [U32<'k>; 2], first: Option<U32<'k>>) -> U64<'k> {
        let of_head = self.of_head(batch, head);
        let first = first.filter(|_| self.last.is_none());
        first.map_or(of_head, |first| self.at_row(first, of_head))
    }

    /// The address of the bounds of row `row`, whose first row's bounds are at `first`.
    #[track_caller]
    fn at_row(&self, row: U32<'k>, first: U64<'k>) -> U64<'k> {
        match self.words {
            None => row.mad_wide(row_bytes(self.of_row), first),
            Some(words) => row.mad_wide(words << 2, first),
        }
    }

    /// The keys of the intervals of row `row`, in a head whose bounds begin at `of_head`. With `mask`, they are those
    /// keys that the mask of this tiling lets the row see, too. A row beyond the end has the keys of the last row.
    #[track_caller]
    pub(crate) fn keys(
        &self,
        b: &'k Builder,
        of_head: U64<'k>,
        row: U32<'k>,
        lens: SeqLens<U32<'k>>,
        mask: Option<&Tiling<U32<'k>>>,
    ) -> Vec<VisibleKeys<U32<'k>>> {
        let row = row.min(lens.q - 1);
        let of_row = || self.at_row(row, of_head);
        let bounds = match self.of_row {
            IntervalsOfRow::One => vec![b.load_read_only(of_row())],
            IntervalsOfRow::Two => {
                let [start, end, other, other_end] = b.load_read_only(of_row());
                vec![[start, end], [other, other_end]]
            }
            IntervalsOfRow::Causal { .. } => {
                let [is_causal]: [U32<'k>; 1] = b.load_read_only(of_head);
                let end = is_causal.ne(0).select(lens.k + row + 1 - lens.q, lens.k);
                vec![[row.constant(0), end]]
            }
            IntervalsOfRow::Tree { .. } | IntervalsOfRow::Blocks { .. } => vec![[row.constant(0), lens.k]],
        };
        let seen = mask.filter(|mask| mask.has_mask()).map(|mask| mask.keys(row, lens));
        let cut = |keys: VisibleKeys<U32<'k>>| seen.map_or(keys, |seen| keys.and(seen));
        bounds.into_iter().map(|bounds| cut(keys_of_interval(bounds, lens.k))).collect()
    }

    /// These bounds; `None` if there are bits of blocks.
    pub(crate) fn bounds(self) -> Option<Self> {
        let IntervalRows { of_row, .. } = self;
        (!matches!(of_row, IntervalsOfRow::Blocks { .. })).then_some(self)
    }

    /// These bits of blocks; `None` if there are bounds.
    pub(crate) fn blocks(self) -> Option<Self> {
        let IntervalRows { of_row, .. } = self;
        matches!(of_row, IntervalsOfRow::Blocks { .. }).then_some(self)
    }

    /// The words that say which blocks of keys a tile's blocks of rows see, if there are words. The kernel has tiles of
    /// `tile_m` rows and blocks of `tile_n` keys. All lanes of a warp read the words `in_warp`; otherwise one thread
    /// does. If the tile has several blocks of rows, warpgroup `me`, if it is one, has block `me`. Behind the last row,
    /// the last block counts.
    #[track_caller]
    pub(crate) fn block_words(
        &self,
        builder: &'k Builder,
        work: &WorkTile<'k>,
        [tile_m, tile_n]: [u32; 2],
        in_warp: bool,
        me: Option<U32<'k>>,
    ) -> Option<BlockWords<'k>> {
        let (count, side) = (self.words?, self.side()?);
        let of_head = self.of_head(work.batch, work.head);
        let first = work.row >> side.ilog2();
        let address = self.at_row(first, of_head);
        let (mut addresses, rows) = ([address; MOST_ROWS], tile_m.div_ceil(side) as usize);
        let log2 = (side / tile_n).ilog2();
        if rows == 1 {
            return Some(BlockWords { builder, addresses, rows, count, own: None, log2, in_warp });
        }
        let last = (work.lens.q - 1) >> side.ilog2();
        let at = |block: U32<'k>| self.at_row((first + block).min(last), of_head);
        for (address, block) in addresses.iter_mut().zip(0..rows).skip(1) {
            *address = at(builder.value(block as u32));
        }
        Some(BlockWords { builder, addresses, rows, count, own: me.map(at), log2, in_warp })
    }

    /// The number of rows, and of keys, of a listed block, if bits show blocks.
    fn side(&self) -> Option<u32> {
        match self.of_row {
            IntervalsOfRow::Blocks { side, .. } => Some(side.rows() as u32),
            IntervalsOfRow::One
            | IntervalsOfRow::Two
            | IntervalsOfRow::Causal { .. }
            | IntervalsOfRow::Tree { .. } => None,
        }
    }

    /// The bits that say which blocks of rows of query head `head` see a tile of keys, if there are bits. The kernel
    /// has tiles of `tile_n` keys and blocks of `tile_m` rows.
    #[track_caller]
    pub(crate) fn block_column(
        &self,
        builder: &'k Builder,
        work: &WorkTile<'k>,
        head: U32<'k>,
        [tile_n, tile_m]: [u32; 2],
    ) -> Option<BlockColumn<'k>> {
        let (bytes, side) = (self.words? << 2, self.side()?);
        let block = work.row >> side.ilog2();
        let address = (block >> 5).mad_wide(4, self.of_head(work.batch, head));
        let (bits, log2) = (tile_n.div_ceil(side), (side / tile_m).ilog2());
        // A tile has several blocks only if their number divides 32, so that a word has all of its bits.
        Some(BlockColumn { builder, address, bytes, bit: block & 31, bits, log2 })
    }

    /// The blocks of rows that may see a tile of keys, from the first block that bits of some of `group` query heads
    /// show. So there is a block if and only if some head visits one. All lanes of a warp must call this.
    #[track_caller]
    fn blocks_of_rows(
        &self,
        b: &'k Builder,
        work: &WorkTile<'k>,
        group: U32<'k>,
        tile: [u32; 2],
    ) -> KvRange<U32<'k>> {
        let KvRange { first, unmasked_first, unmasked_end, end } = work.kv;
        // Keys behind the last word are not seen.
        let words = self.words.unwrap_or(end);
        let side = self.side().expect("bits show blocks");
        let has_bits = (work.row >> (5 + side.ilog2())).lt(words);
        let least = b.var("first", end);
        b.for_each((0, has_bits.select::<B32>(group, 0)), 1, |number| {
            let head = work.head.mad(group, number);
            if let Some(column) = self.block_column(b, work, head, tile) {
                least.set(column.first_from(first, least.get()).min(least.get()));
            }
        });
        let first = least.get();
        let [unmasked_first, unmasked_end] = [unmasked_first, unmasked_end].map(|block| block.max(first));
        KvRange { first, unmasked_first, unmasked_end, end }
    }

    /// The keys that the row at `position` sees by its intervals and by the mask of `tiling`.
    #[track_caller]
    pub(crate) fn visible(
        &self,
        b: &'k Builder,
        of_head: U64<'k>,
        Position(row): Position<'k>,
        lens: SeqLens<U32<'k>>,
        tiling: &Tiling<U32<'k>>,
    ) -> Visible<'k> {
        let mut keys = self.keys(b, of_head, row, lens, Some(tiling)).into_iter();
        let VisibleKeys { start, end } = keys.next().expect("a row has an interval");
        let tree = self.words.map(|count| {
            Box::new(TreeWords {
                builder: b,
                address: self.at_row(row.min(lens.q - 1), of_head),
                count,
                first: lens.k - lens.q,
            })
        });
        Visible { start: Some(start), end, other: keys.next(), tree }
    }

    /// Finds the KV blocks that a work tile visits, under the mask of `tiling`, too. All lanes of a warp must call
    /// this.
    #[track_caller]
    fn block_ranges(
        &self,
        b: &'k Builder,
        work: &WorkTile<'k>,
        tiling: &Tiling<U32<'k>>,
        [tile_m, tile_n]: [u32; 2],
    ) -> BlockRanges<U32<'k>> {
        // Rows of a table's sequence that are not in use have bounds in memory, too, but see no key.
        let lens = work.varlen.map_or(work.lens, |_| SeqLens {
            q: work.lens.q.max(1),
            k: work.row.lt(work.lens.q).select(work.lens.k, 0),
        });
        let of_head = self.of_tile(work);
        let first = work.row + b.lane_id();
        let of_lane = |row: u32| self.keys(b, of_head, first + row, lens, Some(tiling));
        let rows = (0..tile_m).step_by(32).map(of_lane);
        let of_row = |keys| {
            let bounds = Bounds::of(keys, lens.k);
            let VisibleKeys { start, end } = bounds.every;
            match self.words {
                None => bounds,
                // Every row sees the keys before the new ones.
                Some(_) => Bounds {
                    every: VisibleKeys { start, end: end.at_most(lens.k.sub_sat(lens.q)) },
                    ..bounds
                },
            }
        };
        let bounds = rows.map(|keys| keys.into_iter().map(of_row).collect());
        let both = |one: Vec<Bounds<_>>, other: Vec<_>| {
            one.into_iter().zip(other).map(|(one, other)| one.and(other)).collect()
        };
        let bounds: Vec<Bounds<_>> = bounds.reduce(both).expect("a tile has rows");
        let bounds = bounds.into_iter().map(over_warp).collect::<Vec<_>>();
        let tile_n = FastDiv::new(tile_n).map(|number| b.value(number));
        match bounds[..] {
            [one, other] => BlockRanges::of_two([one, other], tile_n),
            _ => BlockRanges::of_one(bounds[0], tile_n),
        }
    }
}

/// The union and intersection of the bounds of all lanes, in each lane.
#[track_caller]
pub(crate) fn over_warp<'k>(bounds: Bounds<U32<'k>>) -> Bounds<U32<'k>> {
    [16, 8, 4, 2, 1].into_iter().fold(bounds, |bounds, distance| {
        let other = |keys: VisibleKeys<U32<'k>>| VisibleKeys {
            start: keys.start.shfl_bfly(distance),
            end: keys.end.shfl_bfly(distance),
        };
        bounds.and(Bounds { some: other(bounds.some), every: other(bounds.every) })
    })
}

/// The index of the producer's warp that finds blocks: its last warp.
pub(crate) const FINDER: u32 = 3;

/// Work tiles whose blocks follow from the bounds of rows. A warp fetches tiles, finds their blocks, and sends both to
/// the other warps.
#[derive(Clone, Copy)]
pub(crate) struct IntervalTiles<'k> {
    pub(crate) lookup: Lookup<InKernel<'k>>,
    /// The address of the counter from which tiles are fetched.
    pub(crate) tile_counter: U64<'k>,
    /// For tiles of rows: rows of a tile, keys of a block. For tiles of keys: keys of a tile, rows of a block.
    pub(crate) tile: [u32; 2],
    pub(crate) of: TilesUnderIntervals<'k>,
}

/// The dimension of the attention matrix that tiles divide.
#[derive(Clone, Copy)]
pub(crate) enum TilesUnderIntervals<'k> {
    /// Rows of Q, whose bounds these are.
    Rows(IntervalRows<InKernel<'k>>),
    /// Keys. Earlier kernels have found which blocks of rows see them.
    Keys(KeyTiles<InKernel<'k>>),
    /// Keys of sequences of a table. Which blocks of rows see them follows from these summaries of blocks of rows, with
    /// this number of query heads that share a head of K and V.
    KeysOfTable(Summaries<InKernel<'k>>, U32<'k>),
    /// Keys. Bits say which blocks of rows see them, with this number of query heads that share a head of K and V.
    KeysOfBlocks(IntervalRows<InKernel<'k>>, U32<'k>),
}

/// Four words of a message about a tile. Under dense sequences, the first four are sequence, head, row and 1. Under
/// sequences of a table, the first eight are the sequence, its first row of Q and of K, its rows of Q in use, its keys,
/// its rows of O, the head, and the row; then comes the padded position, if there are padded arrays. For a tile of
/// rows, four words follow for each range, the last of which is the count of all blocks. For a tile of keys, four words
/// for the range of blocks follow, and where tiles are split, four for the destination of gradients. Behind the last
/// tile, words are 0.
pub(crate) type Words<'k> = [U32<'k>; 4];

impl<'k> IntervalTiles<'k> {
    /// Number of work tiles, including the parts of split tiles of keys.
    #[track_caller]
    pub(crate) fn count(&self, b: &'k Builder) -> U32<'k> {
        let tiles = match &self.lookup {
            Lookup::Dense(geometry) => geometry.tiles,
            Lookup::Varlen { table, .. } => table.tiles(b),
        };
        match self.of {
            TilesUnderIntervals::Rows(_)
            | TilesUnderIntervals::KeysOfTable(..)
            | TilesUnderIntervals::KeysOfBlocks(..) => tiles,
            TilesUnderIntervals::Keys(keys) => tiles + keys.header(b).parts,
        }
    }

    /// The words about tile `number`, which must exist. All lanes of a warp must call this.
    #[track_caller]
    pub(crate) fn words(&self, b: &'k Builder, number: U32<'k>) -> Vec<Words<'k>> {
        let tile_of_keys = match self.of {
            TilesUnderIntervals::Rows(_)
            | TilesUnderIntervals::KeysOfTable(..)
            | TilesUnderIntervals::KeysOfBlocks(..) => None,
            TilesUnderIntervals::Keys(keys) => Some(keys.find(b, number)),
        };
        let tile = tile_of_keys.map_or(number, |of_keys| of_keys.tile);
        let (work, mut words) = match &self.lookup {
            Lookup::Dense(geometry) => {
                let work = geometry.work(tile);
                (work, vec![[work.batch, work.head, work.row, b.value(1)]])
            }
            Lookup::Varlen { table, .. } => {
                let (work, Varlen { q_row, q_rows, k_row, padded_row }) = table.tile(b, tile);
                let of_sequence = [work.batch, q_row, k_row, work.lens.q];
                let of_tile = [work.lens.k, q_rows, work.head, work.row];
                let padded = padded_row.map(|padded_row| [padded_row; 4]);
                (work, [of_sequence, of_tile].into_iter().chain(padded).collect())
            }
        };
        if let Some(KeyTile { blocks, out, .. }) = tile_of_keys {
            words.extend([words_of(blocks), [out.0; 4]]);
        }
        match self.of {
            TilesUnderIntervals::Rows(rows) => {
                let BlockRanges { count, ranges } =
                    rows.block_ranges(b, &work, self.lookup.tiling(), self.tile);
                let range = |BlockRange { masked_end, plain_end, top }| [masked_end, plain_end, top, count];
                words.extend(ranges.into_iter().map(range));
            }
            TilesUnderIntervals::Keys(_) => {}
            TilesUnderIntervals::KeysOfTable(summaries, group) => {
                let tiling = self.lookup.tiling();
                words.push(words_of(summaries.q_blocks(b, group, &work, tiling, self.tile, 1)));
            }
            TilesUnderIntervals::KeysOfBlocks(rows, group) => {
                words.push(words_of(rows.blocks_of_rows(b, &work, group, self.tile)));
            }
        }
        words
    }

    /// The words behind the last tile.
    #[track_caller]
    pub(crate) fn end_words(b: &'k Builder) -> Vec<Words<'k>> {
        let zero = b.value(0);
        vec![[zero; 4]; 4]
    }

    /// The work tile whose words lie at `at` in shared memory, and whether there is one.
    #[track_caller]
    pub(crate) fn work(&self, b: &'k Builder, at: U32<'k>) -> (WorkTile<'k>, V<'k, Pred>) {
        let (work, is_tile, blocks) = match &self.lookup {
            Lookup::Dense(geometry) => {
                let [batch, head, row, is_tile] = load_words(b, at);
                (geometry.work_of(batch, head, row), is_tile, at + 16)
            }
            Lookup::Varlen { table, .. } => {
                let [batch, q_row, k_row, q_len] = load_words(b, at);
                let [k_len, q_rows, head, row] = load_words(b, at + 16);
                let lens = SeqLens { q: q_len, k: k_len };
                let padded_row = table.padded.map(|_| load_words(b, at + 32)[0]);
                let varlen = Varlen { q_row, q_rows, k_row, padded_row };
                let blocks = at + if padded_row.is_some() { 48 } else { 32 };
                (table.work_of([batch, head, row], lens, varlen), q_rows, blocks)
            }
        };
        let [first, unmasked_first, unmasked_end, end] = load_words(b, blocks);
        let kv = KvRange { first, unmasked_first, unmasked_end, end };
        let work = match self.of {
            TilesUnderIntervals::Rows(_) => {
                let kv = KvRange { first: end.lit(0), unmasked_first: end, unmasked_end: end, end };
                WorkTile { kv, ranges: Some(blocks), ..work }
            }
            TilesUnderIntervals::Keys(_) => {
                let [out, ..] = load_words(b, blocks + 16);
                WorkTile { kv, out: Some(Out(out)), ..work }
            }
            TilesUnderIntervals::KeysOfTable(..) | TilesUnderIntervals::KeysOfBlocks(..) => {
                WorkTile { kv, ..work }
            }
        };
        (work, is_tile.ne(0))
    }
}

/// The words about a range of blocks.
fn words_of(KvRange { first, unmasked_first, unmasked_end, end }: KvRange<U32<'_>>) -> Words<'_> {
    [first, unmasked_first, unmasked_end, end]
}

/// Loads four words from shared memory. All lanes read them, but take them from one lane, so that the compiler knows
/// that all lanes have the same words.
#[track_caller]
pub(crate) fn load_words<'k>(b: &'k Builder, at: impl Into<fa3_ir::Address>) -> Words<'k> {
    b.load_vector::<B32, 4>(at).map(|word| word.shfl_idx(0))
}
