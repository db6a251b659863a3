//! Row-wise `cp.async` loads of K and V, for pages that are too small, or too misaligned by padding on the left, for a
//! box of a tensor map.
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
//! Each thread looks up the memory row of one row of its warp, or of two, in the page table, and a shuffle brings a
//! memory row to the threads that copy it, first for K and then for V. Page numbers are loaded two tiles ahead, into the
//! registers that the copies of a tile have just finished with; loaded one tile ahead, every tile would wait for them.
//! Zeros fill rows beyond the sequence's end, rows of a missing page, and columns that the tensor does not have;
//! nothing is read for them.

use std::ops::Range;

use fa3_ir::BufferId;
use fa3_ir::lang::*;
use fa3_sched::packed::MemoryRows;
use fa3_types::TensorDesc;

use super::pages::{NOWHERE, PageSpan};
use super::tma_pipeline::TmaPipeline;
use crate::kernels::params::{Form, Host, InKernel, Pass, Side};
use crate::kernels::tensors::strides;

/// Warps of a CTA that copy rows.
pub(crate) const COPIERS: u32 = 3;

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
    /// The part of tensor `of` (0 for K, 1 for V) that this pipeline has; `None` if a tensor map loads it.
    #[track_caller]
    pub(crate) fn new(pipeline: &TmaPipeline<'k>, of: usize) -> Option<CopiedPart<'k>> {
        let (copied, col) = pipeline.copied()?;
        Some(CopiedPart { producer: copied.producer(), of, col, rows: pipeline.rows() })
    }
}

/// The keys or the values of a head of a sequence.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'k> {
    elem: Elem,
    /// Columns that the tensor has.
    cols: u32,
    /// Threads that copy a row of a panel, and columns of a panel.
    threads: u32,
    panel: u32,
    /// The index of this thread among those that copy the same row of a panel, and the first row that it copies.
    nth: U32<'k>,
    row: U32<'k>,
    span: PageSpan<'k>,
    /// The address of this thread's chunk in the head's first row of memory.
    from: U64<'k>,
    /// Bytes from a row to the next.
    apart: U32<'k>,
}

impl<'k> Rows<'k> {
    /// The first `cols` columns of `head`, which are loaded to tiles of this shape.
    #[track_caller]
    pub(crate) fn of(
        (shape, cols): (TileShape, u32),
        rows: &RowStrides<InKernel<'k>>,
        span: PageSpan<'k>,
        head: U32<'k>,
    ) -> Rows<'k> {
        let threads = (shape.swizzle.row_bytes() / CHUNK).min(LANES);
        let lane = span.builder().lane_id();
        let nth = lane & (threads - 1);
        let from = (nth * CHUNK).to_u64() + (head.to_u64() * rows.head + rows.address);
        let (row, panel) = (lane >> threads.ilog2(), shape.panel_cols());
        Rows { elem: shape.elem, cols, threads, panel, nth, row, span, from, apart: rows.row }
    }

    /// Rows that a warp copies at once.
    fn at_once(&self) -> u32 {
        LANES / self.threads
    }

    /// Begins to copy this thread's chunks of `count` columns of a row of memory, from column `first` on.
    #[track_caller]
    fn copy(&self, memory_row: U32<'k>, (first, count): (u32, u32), to: impl Fn(u32) -> SharedAddr) {
        let (from, is_there) = (memory_row.mad_wide(self.apart, self.from), memory_row.ne(NOWHERE));
        for cols in (0..count).step_by(self.panel as usize) {
            let from = from.at(((first + cols) * self.elem.bytes()) as i32);
            let is_there = match self.cols.saturating_sub(first + cols) {
                inside if inside >= self.panel => is_there,
                inside => is_there & (self.nth * (CHUNK / self.elem.bytes())).lt(inside),
            };
            self.span.builder().copy_async(to(cols), from, is_there.select::<B32>(CHUNK, 0));
        }
    }
}

/// The keys and values of a head of a sequence. Copying warps load their tiles from the last to the first.
pub(crate) struct Gather<'k> {
    /// Rows of a tile, and of a group of them that a warp copies.
    tile: u32,
    group: u32,
    /// The number of this warp among the copying warps.
    warp: U32<'k>,
    /// K and V.
    tensors: [Rows<'k>; 2],
    /// The first row of a tile that this thread looks up.
    finds: U32<'k>,
    /// The pages of the rows that this thread looks up: one array for the next tile and one for the tile after it, in
    /// alternation.
    pages: [Vec<Var<'k, B32>>; 2],
}

impl<'k> Gather<'k> {
    /// K and V, in copying warp number `warp`, which must be the same in all lanes. The tile of `tile` rows that begins
    /// with row `row` is loaded first. Page numbers are read at once, so there must be at least one page.
    #[track_caller]
    pub(crate) fn begin(tensors: [Rows<'k>; 2], tile: u32, [warp, row]: [U32<'k>; 2]) -> Gather<'k> {
        let group = tensors.iter().map(Rows::at_once).fold(PERIOD, u32::max);
        let [Rows { span, .. }, _] = tensors;
        let b = span.builder();
        let lane = b.lane_id();
        let finds = (lane >> group.ilog2()).mad(COPIERS, warp).mad(group, lane & (group - 1));
        let lookups = (tile / group).div_ceil(COPIERS).div_ceil(LANES / group);
        let pages = [0, tile].map(|below| {
            let row = row + finds - below;
            (0..lookups).map(|nth| b.var("page", span.page(row + nth * COPIERS * LANES))).collect()
        });
        Gather { tile, group, warp, tensors, finds, pages }
    }

    fn builder(&self) -> &'k Builder {
        let [Rows { span, .. }, _] = self.tensors;
        span.builder()
    }

    /// Begins to load `rows` rows, tile by tile, from the last tile, which begins with row `last`, to the first.
    #[track_caller]
    pub(crate) fn load(&self, parts: &mut [CopiedPart<'k>], last: U32<'k>, rows: U32<'k>) {
        let (b, tile) = (self.builder(), self.tile);
        b.for_each((0, rows), 2 * tile, |loaded| {
            self.load_tiles(parts, 0, last - loaded);
            b.if_uniform((loaded + tile).lt(rows), || self.load_tiles(parts, 1, last - loaded - tile));
        });
    }

    /// Begins to load this warp's rows of the tiles that begin with row `row`, and then reads the pages of the tiles two
    /// steps ahead.
    #[track_caller]
    fn load_tiles(&self, parts: &mut [CopiedPart<'k>], turn: usize, row: U32<'k>) {
        let looked_up = || self.pages[turn].iter().zip((0..).step_by((COPIERS * LANES) as usize));
        let memory_rows = self.tensors.map(|tensor| {
            looked_up()
                .map(|(page, at)| tensor.span.row_of_memory(row + self.finds + at, page.get()))
                .collect::<Vec<_>>()
        });
        for part in parts {
            self.load_part(part, &memory_rows[part.of]);
        }
        let (next, [Rows { span, .. }, _]) = (row + self.finds - 2 * self.tile, self.tensors);
        for (page, at) in looked_up() {
            page.set(span.page(next + at));
        }
    }

    /// Begins to load this warp's rows of a part of a tile; threads of the warp have these memory rows.
    #[track_caller]
    fn load_part(
        &self,
        CopiedPart { producer, of, col, rows }: &mut CopiedPart<'k>,
        memory_rows: &[U32<'k>],
    ) {
        let (b, group, tensor) = (self.builder(), self.group, &self.tensors[*of]);
        let at_once = tensor.at_once();
        let of_part = rows.start / group..rows.end / group;
        producer.fill(|[tile]| {
            let first = self.warp.mad(group, tensor.row);
            let col_of_thread = tensor.nth * (CHUNK / tensor.elem.bytes());
            let to = (0..group)
                .step_by(at_once as usize)
                .map(|below| (below, tile.elements(first + below, col_of_thread)));
            let to: Vec<_> = to.collect();
            // The warps' groups number `nth` are groups `first` to `first` + 2 of the tile.
            for (nth, first) in (0..self.tile / group).step_by(COPIERS as usize).enumerate() {
                let [begin, end] =
                    [of_part.start, of_part.end].map(|bound| bound.saturating_sub(first).min(COPIERS));
                let copy = || {
                    let memory_row = nth as u32 * group;
                    let of_lanes = memory_rows[(memory_row / LANES) as usize];
                    for (below, to) in &to {
                        let memory_row = of_lanes.shfl_idx(tensor.row + (memory_row % LANES + below));
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
