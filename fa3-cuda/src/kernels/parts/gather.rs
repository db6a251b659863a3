//! Row-wise `cp.async` loads of K and V, for pages that are too small, or too misaligned by padding on the left, for a
//! box of a tensor map, and for rows that lists name.
//!
//! Three warps load a tile by copies of 16 bytes a thread. Groups of rows, each a period of the swizzle, go to the
//! warps in turn. The threads of a row of a panel copy neighbouring chunks of it:
//!
//! ```text
//! a panel of 64 columns, 16 bits: 8 threads a row, 4 rows at a time
//!
//! rows    0 ..  7   warp 0    threads 0 .. 7 copy row 0, 8 .. 15 row 1, ..; then rows 4 to 7
//! rows    8 .. 15   warp 1
//! rows   16 .. 23   warp 2
//! rows   24 .. 31   warp 0
//! ..
//! ```
//!
//! Each thread looks up the memory row of one row of its warp, or of two, in the page table or in the list, and a
//! shuffle brings a memory row to the threads that copy it, first for K and then for V. Page numbers and indices are
//! loaded two tiles ahead, into the registers that the copies of a tile have just finished with; loaded one tile ahead,
//! every tile would wait for them. Zeros fill rows beyond the sequence's end, rows of a missing page, rows that do not
//! exist, and columns that the tensor does not have; nothing is read for them.

use std::ops::Range;

use fa3_ir::BufferId;
use fa3_ir::lang::*;
use fa3_sched::KvRange;
use fa3_sched::packed::MemoryRows;
use fa3_types::TensorDesc;

use super::lists::{ListSpan, UNIT};
use super::pages::{NOWHERE, PageSpan};
use super::seen::{COPIERS, SeenProducer};
use super::tma_pipeline::TmaPipeline;
use crate::kernels::params::{Form, Host, InKernel, Pass, Side};
use crate::kernels::tensors::strides;

/// Bytes that a thread copies at once.
const CHUNK: u32 = 16;

/// Threads of a warp.
const LANES: u32 = 32;

/// Rows of a period of the swizzle.
const PERIOD: u32 = 8;

/// A tensor with one stride between rows of memory, across all sequences.
#[derive(Clone, Copy)]
pub(crate) struct RowStrides<S: Side> {
    address: S::Pointer,
    /// Bytes from a row to the next.
    row: S::U32,
    /// Bytes from a head to the next.
    head: S::U64,
}

impl<A: Side> RowStrides<A> {
    #[track_caller]
    pub(crate) fn pass<B: Side>(self, by: &mut impl Pass<A, B>, name: &str) -> RowStrides<B> {
        RowStrides {
            address: by.pointer(name, self.address),
            row: by.u32(&format!("{name}_row_bytes"), self.row),
            head: by.u64(&format!("{name}_head_bytes"), self.head),
        }
    }
}

impl RowStrides<Form> {
    /// The parameters that a kernel declares for a tensor.
    pub(crate) fn form(elem: Elem) -> RowStrides<Form> {
        RowStrides { address: elem, row: (), head: () }
    }
}

impl RowStrides<Host> {
    /// A tensor of a launch, whose rows are less than 2³² bytes apart.
    pub(crate) fn of(buffer: BufferId, tensor: &TensorDesc, rows: MemoryRows) -> RowStrides<Host> {
        let ([_, head, _], row) = (strides(tensor), rows.stride * tensor.dtype.bytes() as u64);
        RowStrides { address: buffer, row: row as u32, head }
    }
}

/// A pipeline that copying warps fill: the part of K's or V's tiles that it has.
pub(crate) struct CopiedPart<'k> {
    producer: CpAsyncProducer<'k, 1>,
    /// The tensor: 0 for K, 1 for V.
    of: usize,
    /// The first column.
    col: u32,
    rows: Range<u32>,
}

impl<'k> CopiedPart<'k> {
    /// The part of tensor `of` (0 for K, 1 for V) that this pipeline has, of which a tile is filled in each round;
    /// `None` if a tensor map loads it.
    #[track_caller]
    pub(crate) fn new(pipeline: &TmaPipeline<'k>, of: usize, rounds: Rounds<'k>) -> Option<CopiedPart<'k>> {
        let (copied, col) = pipeline.copied()?;
        Some(CopiedPart { producer: copied.producer_by(rounds), of, col, rows: pipeline.rows() })
    }
}

impl<'k> RowStrides<InKernel<'k>> {
    /// The rows of a head: the address of its first row of memory, and the bytes from a row to the next.
    #[track_caller]
    pub(crate) fn of_head(&self, head: U32<'k>) -> (U64<'k>, U32<'k>) {
        (head.to_u64() * self.head + self.address, self.row)
    }
}

/// The columns of K or V, and the threads that copy them.
#[derive(Clone, Copy)]
pub(crate) struct Columns<'k> {
    elem: Elem,
    /// Columns that the tensor has.
    count: u32,
    /// Threads that copy a row of a panel, and columns of a panel.
    threads: u32,
    panel: u32,
    /// The index of this thread among the threads that copy the same row of a panel, and the first row that it copies.
    nth: U32<'k>,
    row: U32<'k>,
}

impl<'k> Columns<'k> {
    /// The first `count` columns of tiles of this shape.
    #[track_caller]
    pub(crate) fn new(b: &'k Builder, shape: TileShape, count: u32) -> Columns<'k> {
        let threads = (shape.swizzle.row_bytes() / CHUNK).min(LANES);
        let lane = b.lane_id();
        let (nth, row, panel) = (lane & (threads - 1), lane >> threads.ilog2(), shape.panel_cols());
        Columns { elem: shape.elem, count, threads, panel, nth, row }
    }

    /// Rows that a warp copies at once.
    fn at_once(&self) -> u32 {
        LANES / self.threads
    }
}

/// Rows of memory, as a thread copies them.
#[derive(Clone, Copy)]
struct Rows<'k> {
    builder: &'k Builder,
    columns: Columns<'k>,
    /// The address of this thread's chunk in the first row of memory.
    from: U64<'k>,
    /// Bytes from a row to the next.
    apart: U32<'k>,
}

impl<'k> Rows<'k> {
    #[track_caller]
    fn new(builder: &'k Builder, columns: Columns<'k>, (address, apart): (U64<'k>, U32<'k>)) -> Rows<'k> {
        Rows { builder, columns, from: (columns.nth * CHUNK).to_u64() + address, apart }
    }

    /// Begins to copy this thread's chunks of `count` columns of a row of memory, from column `first` on.
    #[track_caller]
    fn copy(&self, memory_row: U32<'k>, (first, count): (u32, u32), to: impl Fn(u32) -> SharedAddr) {
        let Columns { elem, panel, nth, count: of_tensor, .. } = self.columns;
        let (from, is_there) = (memory_row.mad_wide(self.apart, self.from), memory_row.ne(NOWHERE));
        for cols in (0..count).step_by(panel as usize) {
            let from = from.at(((first + cols) * elem.bytes()) as i32);
            let is_there = match of_tensor.saturating_sub(first + cols) {
                inside if inside >= panel => is_there,
                inside => is_there & (nth * (CHUNK / elem.bytes())).lt(inside),
            };
            self.builder.copy_async(to(cols), from, is_there.select::<B32>(CHUNK, 0));
        }
    }
}

/// Where the rows of K and V are found.
#[allow(clippy::large_enum_variant, reason = "a kernel has one of them while it is built")]
pub(crate) enum Found<'k> {
    /// In pages, from the last to the first: for K and for V the rows, and the head's address and the bytes from a row
    /// to the next.
    InPages([PageSpan<'k>; 2], [(U64<'k>, U32<'k>); 2]),
    /// By lists, from the first to the last.
    InLists(ListSpan<'k>),
}

impl<'k> Found<'k> {
    fn builder(&self) -> &'k Builder {
        match self {
            Found::InPages([span, _], _) => span.builder(),
            Found::InLists(span) => span.builder(),
        }
    }

    /// Loads the number of the page of row `at` of a tile, or its index, unless the list ends before. The tile has
    /// `tile` rows and this number.
    #[track_caller]
    fn load(&self, to: &Var<'k, B32>, [number, at]: [U32<'k>; 2], tile: u32) {
        match self {
            Found::InPages([span, _], _) => to.set(span.page(number.mad(tile, at))),
            Found::InLists(span) => span.load(to, [number, at]),
        }
    }

    /// The row of memory of row `at` of a tile in K and in V, or [`NOWHERE`]; `word` is its page number or its index.
    #[track_caller]
    fn memory_rows(&self, word: U32<'k>, [number, at]: [U32<'k>; 2], tile: u32) -> [U32<'k>; 2] {
        match self {
            Found::InPages(spans, _) => spans.map(|span| span.row_of_memory(number.mad(tile, at), word)),
            Found::InLists(span) => span.units([number, at], word),
        }
    }

    /// The addresses from which rows of memory count in K and in V, and the bytes from a row to the next, for tile
    /// `number`.
    #[track_caller]
    fn places(&self, number: U32<'k>) -> [(U64<'k>, U32<'k>); 2] {
        match self {
            Found::InPages(_, places) => *places,
            Found::InLists(span) => span.addresses(number).map(|from| (from, number.constant(UNIT))),
        }
    }
}

/// The keys and values of a head of a sequence, whose tiles copying warps load.
pub(crate) struct Gather<'k> {
    builder: &'k Builder,
    found: Found<'k>,
    /// Columns of K and of V.
    columns: [Columns<'k>; 2],
    /// Rows of a tile, and of a group of them that a warp copies.
    tile: u32,
    group: u32,
    /// The tiles.
    kv: KvRange<U32<'k>>,
    /// The number of this warp among the copying warps.
    warp: U32<'k>,
    /// The first row of a tile that this thread looks up.
    finds: U32<'k>,
    /// Page numbers or indices of the rows that this thread looks up: one array for the next tile and one for the tile
    /// after it, in alternation.
    words: [Vec<Var<'k, B32>>; 2],
}

impl<'k> Gather<'k> {
    /// Begins with the tiles `kv` of `tile` rows, at least one tile, in copying warp number `warp`, which all lanes
    /// know alike. Page numbers are read at once, so the sequence has a page at least.
    #[track_caller]
    pub(crate) fn begin(
        found: Found<'k>,
        columns: [Columns<'k>; 2],
        (tile, kv): (u32, KvRange<U32<'k>>),
        warp: U32<'k>,
    ) -> Gather<'k> {
        let group = columns.iter().map(Columns::at_once).fold(PERIOD, u32::max);
        let builder = found.builder();
        let lane = builder.lane_id();
        let finds = (lane >> group.ilog2()).mad(COPIERS, warp).mad(group, lane & (group - 1));
        let lookups = (tile / group).div_ceil(COPIERS).div_ceil(LANES / group);
        let words = [(); 2].map(|()| (0..lookups).map(|_| builder.var("word", NOWHERE)).collect());
        let gather = Gather { builder, found, columns, tile, group, kv, warp, finds, words };
        for turn in [0, 1] {
            gather.load_words(turn, builder.value(turn as u32));
        }
        gather
    }

    /// The number of the tile that is loaded after `step` others.
    #[track_caller]
    fn number(&self, step: U32<'k>) -> U32<'k> {
        match self.found {
            Found::InPages(..) => self.kv.end - 1 - step,
            Found::InLists(_) => self.kv.first + step,
        }
    }

    /// The page number or index of each row that this thread looks up, and the row's distance from the first.
    fn looked_up(&self, turn: usize) -> impl Iterator<Item = (&Var<'k, B32>, u32)> {
        self.words[turn].iter().zip((0..).step_by((COPIERS * LANES) as usize))
    }

    #[track_caller]
    fn load_words(&self, turn: usize, step: U32<'k>) {
        let number = self.number(step);
        self.looked_up(turn)
            .for_each(|(word, at)| self.found.load(word, [number, self.finds + at], self.tile));
    }

    /// Begins to load all tiles, each in a round, and says which of their keys exist.
    #[track_caller]
    pub(crate) fn load(
        &self,
        parts: &mut [CopiedPart<'k>],
        mut seen: Option<&mut SeenProducer<'k>>,
        rounds: Rounds<'k>,
    ) {
        let (b, count) = (self.builder, self.kv.end - self.kv.first);
        b.for_each((0, count), 2, |step| {
            self.load_tiles(parts, seen.as_deref_mut(), 0, step);
            rounds.next();
            b.if_uniform((step + 1).lt(count), || {
                self.load_tiles(parts, seen, 1, step + 1);
                rounds.next();
            });
        });
    }

    /// Begins to load this warp's rows of the tiles of K and V that come after `step` others, and then loads the words
    /// of the tiles two steps ahead.
    #[track_caller]
    fn load_tiles(
        &self,
        parts: &mut [CopiedPart<'k>],
        seen: Option<&mut SeenProducer<'k>>,
        turn: usize,
        step: U32<'k>,
    ) {
        let number = self.number(step);
        let rows = self.looked_up(turn).map(|(word, at)| {
            let at = self.finds + at;
            (at, self.found.memory_rows(word.get(), [number, at], self.tile))
        });
        let rows: Vec<_> = rows.collect();
        if let Some(seen) = seen {
            seen.store(rows.iter().map(|&(at, [row, _])| (at, row)));
        }
        let places = self.found.places(number);
        for part in parts {
            let memory_rows: Vec<_> = rows.iter().map(|(_, rows)| rows[part.of]).collect();
            let tensor = Rows::new(self.builder, self.columns[part.of], places[part.of]);
            self.load_part(part, &tensor, &memory_rows);
        }
        self.load_words(turn, step + 2);
    }

    /// Begins to load this warp's rows of a part of a tile; threads of the warp have these memory rows.
    #[track_caller]
    fn load_part(
        &self,
        CopiedPart { producer, col, rows, .. }: &mut CopiedPart<'k>,
        tensor: &Rows<'k>,
        memory_rows: &[U32<'k>],
    ) {
        let (b, group, columns) = (self.builder, self.group, &tensor.columns);
        let of_part = rows.start / group..rows.end / group;
        producer.fill(|[tile]| {
            let first = self.warp.mad(group, columns.row);
            let col_of_thread = columns.nth * (CHUNK / columns.elem.bytes());
            let steps = (0..group).step_by(columns.at_once() as usize);
            let to: Vec<_> =
                steps.map(|below| (below, tile.elements(first + below, col_of_thread))).collect();
            // The warps' groups number `nth` are groups `first` to `first` + 2 of the tile.
            for (nth, first) in (0..self.tile / group).step_by(COPIERS as usize).enumerate() {
                let [begin, end] =
                    [of_part.start, of_part.end].map(|bound| bound.saturating_sub(first).min(COPIERS));
                let copy = || {
                    let memory_row = nth as u32 * group;
                    let of_lanes = memory_rows[(memory_row / LANES) as usize];
                    for (below, to) in &to {
                        let memory_row = of_lanes.shfl_idx(columns.row + (memory_row % LANES + below));
                        tensor.copy(memory_row, (*col, tile.shape().cols), |cols| to.at(first * group, cols));
                    }
                };
                match (begin, end) {
                    (begin, end) if begin >= end => {}
                    (0, COPIERS) => copy(),
                    (0, end) => b.if_uniform(self.warp.lt(end), copy),
                    (begin, COPIERS) => b.if_uniform(self.warp.ge(begin), copy),
                    (begin, end) => b.if_uniform(self.warp.ge(begin) & self.warp.lt(end), copy),
                }
            }
        });
    }
}
