//! Row-wise `cp.async` loads of K and V, for pages that are too small, or too misaligned by padding on the left, for a
//! box of a tensor map.
//!
//! A warp loads a tile by copies of 16 bytes a thread. The threads of a row of a panel copy neighbouring chunks of it.
//! In the next step each thread copies as many rows further down as a step covers:
//!
//! ```text
//! a panel of 64 columns, 16 bits: 8 threads a row, 4 rows at a time
//!
//! thread                   copies row   finds the places of rows
//!  0,  1 ..  7                  4i        0,  4 .. 28      32, 36 .. 60     ..
//!  8,  9 .. 15                  4i + 1    1,  5 .. 29      33, 37 .. 61
//! 16, 17 .. 23                  4i + 2    2,  6 .. 30      34, 38 .. 62
//! 24, 25 .. 31                  4i + 3    3,  7 .. 31      35, 39 .. 63
//! ```
//!
//! Each thread looks up the memory rows of a few tile rows in the page table, and a shuffle brings a memory row to the
//! threads that copy it. Page numbers are loaded two tiles ahead, into the registers that the copies of a tile have
//! just finished with; loaded one tile ahead, every tile would wait for them. Zeros fill rows beyond the sequence's
//! end, rows of a missing page, and columns that the tensor does not have; nothing is read for them.

use fa3_ir::BufferId;
use fa3_ir::lang::*;
use fa3_sched::packed::MemoryRows;
use fa3_types::TensorDesc;

use super::pages::{NOWHERE, PageSpan};
use crate::kernels::params::{Form, Host, InKernel, Pass, Side};
use crate::kernels::tensors::strides;

/// Bytes that a thread copies at once.
const CHUNK: u32 = 16;

/// Threads of a warp.
const LANES: u32 = 32;

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

impl<'k> RowStrides<InKernel<'k>> {
    /// The address of the first row of `head`, and the bytes from a row to the next.
    #[track_caller]
    pub(crate) fn of_head(&self, head: U32<'k>) -> (U64<'k>, U32<'k>) {
        (head.to_u64() * self.head + self.address, self.row)
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

/// The division of a tile among a warp's threads.
#[derive(Clone, Copy)]
struct Cut<'k> {
    /// Threads that copy a row of a panel.
    threads: u32,
    /// Rows that are copied at once.
    rows: u32,
    /// The first of the threads that copy the same row of a panel as this one.
    first: U32<'k>,
    /// The index of this thread among them.
    nth: U32<'k>,
    /// The first row that this thread copies.
    row: U32<'k>,
}

impl<'k> Cut<'k> {
    #[track_caller]
    fn new(b: &'k Builder, shape: TileShape) -> Cut<'k> {
        let threads = (shape.swizzle.row_bytes() / CHUNK).min(LANES);
        let lane = b.lane_id();
        let nth = lane & (threads - 1);
        Cut { threads, rows: LANES / threads, first: lane - nth, nth, row: lane >> threads.ilog2() }
    }
}

/// The keys of a head of a sequence. A warp loads their tiles, of this shape, from the last to the first.
pub(crate) struct Gather<'k> {
    shape: TileShape,
    /// Columns that the tensor has.
    cols: u32,
    cut: Cut<'k>,
    span: PageSpan<'k>,
    /// The address of this thread's chunk in the head's first row of memory.
    from: U64<'k>,
    /// Bytes from a row to the next.
    apart: U32<'k>,
    /// The first row of a tile that this thread looks up.
    finds: U32<'k>,
    /// The pages of the rows that this thread looks up: one array for the next tile and one for the tile after it, in
    /// alternation.
    pages: [Vec<Var<'k, B32>>; 2],
}

impl<'k> Gather<'k> {
    /// The keys of `head`. The tile that begins with row `row` is loaded first. Page numbers are read at once, so there
    /// must be at least one page.
    #[track_caller]
    pub(crate) fn begin(
        b: &'k Builder,
        (shape, cols): (TileShape, u32),
        rows: &RowStrides<InKernel<'k>>,
        span: PageSpan<'k>,
        [head, row]: [U32<'k>; 2],
    ) -> Gather<'k> {
        let cut = Cut::new(b, shape);
        let finds = cut.nth.mad(cut.rows, cut.row);
        let from = (cut.nth * CHUNK).to_u64() + (head.to_u64() * rows.head + rows.address);
        let of_thread = (0..shape.rows).step_by(LANES as usize);
        let pages = [0, shape.rows].map(|below| {
            let row = row + finds - below;
            of_thread.clone().map(|at| b.var("page", span.page(row + at))).collect()
        });
        Gather { shape, cols, cut, span, from, apart: rows.row, finds, pages }
    }

    /// Begins to load `rows` rows, tile by tile, from the last tile, which begins with row `last`, to the first. Each
    /// pipeline takes the columns of a tile that begin with its column.
    #[track_caller]
    pub(crate) fn load(&self, pipelines: &mut [(CpAsyncProducer<'k, 1>, u32)], last: U32<'k>, rows: U32<'k>) {
        let (b, tile) = (self.span.builder(), self.shape.rows);
        b.for_each((0, rows), 2 * tile, |loaded| {
            self.load_tiles(pipelines, 0, last - loaded);
            b.if_uniform((loaded + tile).lt(rows), || self.load_tiles(pipelines, 1, last - loaded - tile));
        });
    }

    /// Begins to load the tiles that begin with row `row`, and then reads the pages of the tiles two steps ahead.
    #[track_caller]
    fn load_tiles(&self, pipelines: &mut [(CpAsyncProducer<'k, 1>, u32)], turn: usize, row: U32<'k>) {
        for (pipeline, col) in pipelines {
            self.load_tile(pipeline, turn, (row, *col));
        }
        let next = row + self.finds - 2 * self.shape.rows;
        for (page, at) in self.pages[turn].iter().zip((0..).step_by(LANES as usize)) {
            page.set(self.span.page(next + at));
        }
    }

    /// Begins to load the tile that begins with this row and column.
    #[track_caller]
    fn load_tile(&self, pipeline: &mut CpAsyncProducer<'k, 1>, turn: usize, (row, col): (U32<'k>, u32)) {
        let pages = self.pages[turn].iter().zip((0..).step_by(LANES as usize));
        pipeline.fill(|[tile]| {
            let Cut { threads, rows, first, nth, row: of_thread } = self.cut;
            // The swizzle repeats every 8 rows.
            let to = (0..8_u32.div_ceil(rows))
                .map(|turn| tile.elements(of_thread + turn * rows, nth * (CHUNK / self.shape.elem.bytes())));
            let to: Vec<_> = to.collect();
            for (page, at) in pages {
                let memory_row = self.span.row_of_memory(row + self.finds + at, page.get());
                let left = (self.shape.rows - at).min(LANES);
                for turn in 0..left / rows {
                    let below = at + turn * rows;
                    let memory_row = memory_row.shfl_idx(first + turn % threads);
                    let whole = below / 8 * 8;
                    self.copy(memory_row, (col, tile.shape().cols), |cols| {
                        to[((below - whole) / rows) as usize].at(whole, cols)
                    });
                }
            }
        });
    }

    /// Begins to copy this thread's chunks of `count` columns of a row of memory, from column `first` on.
    #[track_caller]
    fn copy(&self, memory_row: U32<'k>, (first, count): (u32, u32), to: impl Fn(u32) -> SharedAddr) {
        let panel = self.shape.panel_cols();
        let (from, is_there) = (memory_row.mad_wide(self.apart, self.from), memory_row.ne(NOWHERE));
        for cols in (0..count).step_by(panel as usize) {
            let from = from.at(((first + cols) * self.shape.elem.bytes()) as i32);
            let is_there = match self.cols.saturating_sub(first + cols) {
                inside if inside >= panel => is_there,
                inside => is_there & (self.cut.nth * (CHUNK / self.shape.elem.bytes())).lt(inside),
            };
            self.span.builder().copy_async(to(cols), from, is_there.select::<B32>(CHUNK, 0));
        }
    }
}
