//! Summaries of blocks of rows under a mask of intervals: the union and the intersection of their rows' intervals.

use fa3_ir::BufferId;
use fa3_ir::lang::*;
use fa3_sched::backward::{STATS_ROWS, VisibleQBlocks};
use fa3_sched::{Bounds, FastDiv, KvRange, Tiling, VisibleKeys};
use fa3_types::{Intervals, IntervalsOfRow, Shape};

use super::geometry::WorkTile;
use crate::kernels::params::{Form, Host, InKernel, Pass, Side, copies, param, params};

/// Strides of an array with `of_head` items per head: from one sequence to the next, and from one head to the next. A
/// stride is 0 if sequences or heads share their items.
pub(crate) fn strides(form: Intervals, heads: u64, of_head: u64) -> [u64; 2] {
    let own = |is_own: bool, items: u64| if is_own { items } else { 0 };
    [own(form.per_sequence, heads * of_head), own(form.per_head, of_head)]
}

/// The address of a head's first item. An item has `bytes` bytes, a power of two.
#[track_caller]
pub(crate) fn at_head<'k>(
    address: U64<'k>,
    [sequences, heads]: [U64<'k>; 2],
    [batch, head]: [U32<'k>; 2],
    bytes: u32,
) -> U64<'k> {
    let items = batch.to_u64() * sequences + head.to_u64() * heads;
    address + (items << bytes.ilog2())
}

params! {
    /// The array of summaries, each with the [`Bounds`] (union and intersection) of each interval of [`STATS_ROWS`]
    /// rows.
    struct Summaries {
        of_row: fixed IntervalsOfRow,
        address: pointer = "summaries",
        /// Number of blocks of a head.
        blocks: u32 = "summary_blocks",
        /// Strides in blocks, from a sequence to the next and from a head to the next; 0 where sequences or heads share
        /// their intervals.
        batch: u64 = "summaries_batch",
        head: u64 = "summaries_head",
    }
}

copies!(Summaries);

/// Bytes of the summary of one interval of a row.
const SUMMARY: u32 = 16;

impl Summaries<Form> {
    /// The parameters of summaries of rows with `of_row` intervals.
    pub(crate) fn form(of_row: IntervalsOfRow) -> Summaries<Form> {
        Summaries { of_row, address: Elem::U32, blocks: (), batch: (), head: () }
    }
}

impl Summaries<Host> {
    /// The shape of the buffer: (batch or 1, heads or 1, blocks, words). Shared intervals make it 1. In padded arrays,
    /// the blocks of all sequences of a table lie one after another: `padded` is their number.
    pub(crate) fn dims(form: Intervals, q: Shape, padded: Option<u32>) -> [u32; 4] {
        let [batch, heads, ..] = form.shape(q).map(|extent| extent as u32);
        let blocks_of_head = (q.seqlen as u32).div_ceil(STATS_ROWS);
        let (batch, blocks) = padded.map_or((batch, blocks_of_head), |blocks| (1, blocks));
        [batch, heads, blocks, SUMMARY / 4 * form.of_row.count() as u32]
    }

    /// The arguments of a launch whose Q has shape `q`.
    pub(crate) fn of(form: Intervals, q: Shape, padded: Option<u32>, buffer: BufferId) -> Summaries<Host> {
        let [_, heads, blocks, _] = Summaries::dims(form, q, padded).map(u64::from);
        let form = Intervals { per_sequence: form.per_sequence && padded.is_none(), ..form };
        let [batch, head] = strides(form, heads, blocks);
        Summaries { of_row: form.of_row, address: buffer, blocks: blocks as u32, batch, head }
    }
}

impl<'k> Summaries<InKernel<'k>> {
    /// Whether heads have intervals of their own.
    #[track_caller]
    pub(crate) fn has_own_heads(&self) -> V<'k, Pred> {
        self.head.ne(0_u64)
    }

    /// The address of the summary of a head's first block.
    #[track_caller]
    pub(crate) fn of_head(&self, batch: U32<'k>, head: U32<'k>) -> U64<'k> {
        at_head(self.address, [self.batch, self.head], [batch, head], self.bytes())
    }

    /// Number of bytes of a block's summary.
    fn bytes(&self) -> u32 {
        SUMMARY * self.of_row.count() as u32
    }

    /// Stores the summary of a block of rows, in one thread. If heads or sequences share their intervals, only the
    /// first of them stores.
    #[track_caller]
    pub(crate) fn store(
        &self,
        b: &'k Builder,
        [batch, head, block]: [U32<'k>; 3],
        bounds: &[Bounds<U32<'k>>],
    ) {
        let at = block.mad_wide(self.bytes(), self.of_head(batch, head));
        let is_first = |strides: U64<'k>, number: U32<'k>| strides.ne(0_u64) | number.eq(0);
        let stores = is_first(self.batch, batch) & is_first(self.head, head);
        b.guarded(b.elect() & stores & block.lt(self.blocks), || {
            for (number, Bounds { some, every }) in bounds.iter().enumerate() {
                let words = [some.start, some.end, every.start, every.end];
                b.store_vector(at.at((SUMMARY * number as u32) as i32), words);
            }
        });
    }

    /// Loads the summary of block `block`: the bounds of each interval. The head's summaries begin at `of_head`.
    #[track_caller]
    pub(crate) fn load(&self, b: &'k Builder, of_head: U64<'k>, block: U32<'k>) -> Vec<Bounds<U32<'k>>> {
        let at = block.mad_wide(self.bytes(), of_head);
        let bounds = (0..self.of_row.count() as u32).map(|of| {
            let [some, some_end, every, every_end] = b.load_vector::<B32, 4>(at.at((SUMMARY * of) as i32));
            Bounds {
                some: VisibleKeys { start: some, end: some_end },
                every: VisibleKeys { start: every, end: every_end },
            }
        });
        bounds.collect()
    }

    /// Finds the blocks of `tile_m` rows that see keys of a work tile of `tile_n` keys, over all `group` query heads
    /// that share the tile's head of K and V: the range from the first to the last block that sees some key of the
    /// tile, and in this range the blocks that see all keys. The mask of `tiling`, whose rows are keys, cuts the range.
    /// All lanes of a warp must call this. A lane loads `at_once` summaries before it uses the first.
    #[track_caller]
    pub(crate) fn q_blocks(
        &self,
        b: &'k Builder,
        group: U32<'k>,
        work: &WorkTile<'k>,
        tiling: &Tiling<U32<'k>>,
        [tile_n, tile_m]: [u32; 2],
        at_once: u32,
    ) -> KvRange<U32<'k>> {
        let none = VisibleQBlocks::none(work.lens.q);
        let all = QBlocksVars::new(b, none);
        let first = work.head * group;
        // If heads share their intervals, the first head stands for all.
        let heads = self.has_own_heads().select::<B32>(group, 1);
        b.for_each((0, heads), 1, |number| {
            let of_head = self.q_blocks_of_head(b, first + number, work, tile_n, at_once);
            let is_first = number.eq(0);
            all.set(select(is_first, of_head, all.get().beside(of_head)));
        });
        let tile_m = FastDiv::new(tile_m).map(|number| b.value(number));
        let by_intervals = all.get().range(STATS_ROWS, work.lens.k, tile_m);
        if !tiling.has_mask() {
            return by_intervals;
        }
        // A tile of keys is a power of two.
        by_intervals.and(tiling.kv_range(work.row >> tile_n.ilog2(), work.lens))
    }

    /// The blocks of one query head that see keys of the tile.
    #[track_caller]
    fn q_blocks_of_head(
        &self,
        b: &'k Builder,
        head: U32<'k>,
        work: &WorkTile<'k>,
        tile_n: u32,
        at_once: u32,
    ) -> VisibleQBlocks<U32<'k>> {
        let keys = work.lens.q;
        let none = VisibleQBlocks::none(keys);
        let (of_head, count) = match work.varlen.and_then(|varlen| varlen.padded_row) {
            None => (self.of_head(work.batch, head), self.blocks),
            Some(padded_row) => {
                let of_head = self.of_head(b.value(0), head);
                let first = padded_row >> STATS_ROWS.ilog2();
                let count = (work.lens.k + (STATS_ROWS - 1)) >> STATS_ROWS.ilog2();
                (first.mad_wide(self.bytes(), of_head), count)
            }
        };
        let mine = QBlocksVars::new(b, none);
        b.for_each((0, count), 32 * at_once, |first| {
            let blocks = (0..at_once).map(|turn| first + b.lane_id() + 32 * turn);
            let loaded: Vec<_> =
                blocks.map(|block| (block, self.load(b, of_head, block.min(count - 1)))).collect();
            for (block, bounds) in loaded {
                let seeing = VisibleQBlocks::of(block, &bounds, [work.row, work.row + tile_n], keys);
                let there = block.lt(count);
                mine.set(mine.get().and(select(there, seeing, none)));
            }
        });
        [16, 8, 4, 2, 1]
            .into_iter()
            .fold(mine.get(), |seeing, distance| seeing.and(map(seeing, |number| number.shfl_bfly(distance))))
    }
}

/// [`VisibleQBlocks`], the ranges of blocks of rows that see a tile, in variables.
struct QBlocksVars<'k>(VisibleQBlocks<Var<'k, B32>>);

impl<'k> QBlocksVars<'k> {
    #[track_caller]
    fn new(b: &'k Builder, seeing: VisibleQBlocks<U32<'k>>) -> QBlocksVars<'k> {
        QBlocksVars(map(seeing, |number| b.var("seeing", number)))
    }

    fn get(&self) -> VisibleQBlocks<U32<'k>> {
        map(self.0, |var| var.get())
    }

    #[track_caller]
    fn set(&self, seeing: VisibleQBlocks<U32<'k>>) {
        let (vars, numbers) = (self.0, seeing);
        for (var, number) in [
            (vars.some[0], numbers.some[0]),
            (vars.some[1], numbers.some[1]),
            (vars.every[0], numbers.every[0]),
            (vars.every[1], numbers.every[1]),
            (vars.count, numbers.count),
        ] {
            var.set(number);
        }
    }
}

/// Applies `f` to each number of `seeing`.
fn map<T: Copy, U>(seeing: VisibleQBlocks<T>, mut f: impl FnMut(T) -> U) -> VisibleQBlocks<U> {
    VisibleQBlocks { some: seeing.some.map(&mut f), every: seeing.every.map(&mut f), count: f(seeing.count) }
}

#[track_caller]
fn select<'k>(
    condition: V<'k, Pred>,
    yes: VisibleQBlocks<U32<'k>>,
    no: VisibleQBlocks<U32<'k>>,
) -> VisibleQBlocks<U32<'k>> {
    let pick = |yes: U32<'k>, no: U32<'k>| condition.select::<B32>(yes, no);
    let both = |yes: [U32<'k>; 2], no: [U32<'k>; 2]| [pick(yes[0], no[0]), pick(yes[1], no[1])];
    VisibleQBlocks {
        some: both(yes.some, no.some),
        every: both(yes.every, no.every),
        count: pick(yes.count, no.count),
    }
}
