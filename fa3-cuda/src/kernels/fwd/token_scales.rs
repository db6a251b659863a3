//! Scales of the rows of e4m3 K and V, which the warps that dequantize a block multiply its rows by.
//!
//! Neighbouring threads have parts of the same few rows of a block. Each of them loads the scales of some of these rows
//! one block ahead, and the numbers of their pages two blocks ahead, so that no block waits for two loads in a row. A
//! shuffle gives a scale to the others. Nothing is loaded for rows beyond the sequence's end and rows of a missing
//! page, which are zeros.

use fa3_ir::lang::*;
use fa3_ir::{BufferId, Program};
use fa3_types::{Problem, TensorDesc};

use super::buffers;
use super::dequantized::{Chunks, PART};
use super::state::Fwd;
use crate::kernels::params::{Form, Host, Pass, Side, param, params};
use crate::kernels::parts::geometry::WorkTile;
use crate::kernels::parts::pages::PageSpan;
use crate::kernels::parts::strided::Strided;

params! {
    /// The scales of the rows of K and V.
    struct TokenScales {
        k: named Strided = "k_scales",
        v: named Strided = "v_scales",
    }
}

impl TokenScales<Form> {
    /// The parameters that a kernel declares.
    pub(super) fn form() -> TokenScales<Form> {
        TokenScales { k: Strided::form(Elem::F32), v: Strided::form(Elem::F32) }
    }
}

impl TokenScales<Host> {
    /// The scales of a problem, if its tokens have some.
    pub(super) fn of<K>(problem: &Problem, program: &Program<K>) -> Option<TokenScales<Host>> {
        let scales = problem.token_scales()?;
        let of = |buffer: BufferId, mut tensor: TensorDesc| {
            if problem.seqs_k().is_packed() {
                tensor.strides.batch = 0;
            }
            Strided::of(buffer, &tensor)
        };
        let [k, v] = [program.find(buffers::K_SCALES)?, program.find(buffers::V_SCALES)?];
        Some(TokenScales { k: of(k, scales.k), v: of(v, scales.v) })
    }
}

/// A tensor of which a thread converts rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Keys {
    K,
    V,
}

/// The scales of a warp's rows of K or V, in the block that is converted next.
pub(super) struct RowScales<'k> {
    builder: &'k Builder,
    of: Keys,
    /// Keys of a block.
    keys: u32,
    /// Rows of a block that a thread converts parts of, and threads that share such rows.
    count: u32,
    threads: u32,
    /// The first of these threads.
    first_thread: U32<'k>,
    looked_up: Vec<LookedUp<'k>>,
}

/// A row of which a thread loads the scale.
struct LookedUp<'k> {
    /// The row, counted from the block's first one.
    row: U32<'k>,
    scale: Var<'k, F32>,
    /// The page of the row of the block behind it, if the cache is paged.
    page: Option<Var<'k, B32>>,
}

/// The rows of a head of a sequence, by which a work tile's scales are found.
pub(super) struct ScaledRows<'k> {
    pages: Option<PageSpan<'k>>,
    /// The address of the scale of the head's first row in memory, and the bytes from a page and a row to the next.
    from: U64<'k>,
    apart: [U64<'k>; 2],
    /// Number of rows of the sequence.
    count: U32<'k>,
    /// Number of blocks that the work tile visits, and the first key of the one that comes first.
    blocks: U32<'k>,
    begin: U32<'k>,
}

impl<'k> RowScales<'k> {
    /// Declares the registers of one tensor's scales, if rows have scales.
    #[track_caller]
    pub(super) fn declare(fwd: &Fwd<'k>, of: Keys) -> Option<RowScales<'k>> {
        fwd.params.token_scales.as_ref()?;
        let (b, tile) = (fwd.builder, &fwd.spec.tile);
        let cols = if of == Keys::K { tile.head_dim } else { tile.head_dim_v };
        let panel = TileShape::new(fwd.spec.elem, tile.tile_n, cols).panel_cols();
        let chunks = Chunks::new(b, panel);
        let (count, threads) = (tile.tile_n.div_ceil(chunks.rows), panel / PART);
        let lane = b.lane_id();
        let nth = lane & (threads.min(count.next_power_of_two()) - 1);
        let looked_up = (0..count).step_by(threads as usize).map(|first| LookedUp {
            row: (nth + first).mad(chunks.rows, chunks.row),
            scale: b.var("scale", 0.0),
            page: fwd.params.pages.is_some().then(|| b.var("page", 0)),
        });
        let looked_up = looked_up.collect();
        let first_thread = lane & !(threads - 1);
        Some(RowScales { builder: b, of, keys: tile.tile_n, count, threads, first_thread, looked_up })
    }

    /// Begins to load the scales of the first block of a work tile, which has blocks.
    #[track_caller]
    pub(super) fn begin(&self, fwd: &Fwd<'k>, work: &WorkTile<'k>) -> Option<ScaledRows<'k>> {
        let scales = fwd.params.token_scales.as_ref()?;
        let (tensor, number) = if self.of == Keys::K { (&scales.k, 1) } else { (&scales.v, 2) };
        let (tensor, pages) = (tensor.global(), fwd.pages(work, number));
        let first = work.varlen.map_or(self.builder.value(0), |varlen| varlen.k_row);
        let [page, _, row] = tensor.strides;
        let zero = self.builder.value(0);
        let rows = ScaledRows {
            from: match pages {
                Some(_) => tensor.at([zero, work.kv_head, zero]),
                None => tensor.at([work.batch, work.kv_head, first]),
            },
            pages,
            apart: [page, row],
            count: work.lens.k,
            blocks: work.kv.end - work.kv.first,
            begin: (work.kv.end - 1) * self.keys,
        };
        self.read_pages(&rows, zero);
        self.load(&rows, zero);
        self.read_pages(&rows, self.builder.value(1));
        Some(rows)
    }

    /// Gives the scales of this thread's rows in the next block of a work tile, of which `done` blocks have been
    /// converted, and begins to load the ones of the block after it.
    #[track_caller]
    pub(super) fn next(&self, rows: &ScaledRows<'k>, done: U32<'k>) -> Vec<V<'k, F32>> {
        let scales = (0..self.count).map(|number| {
            let LookedUp { scale, .. } = self.looked_up[(number / self.threads) as usize];
            scale.get().shfl_idx(self.first_thread + number % self.threads)
        });
        let scales = scales.collect();
        self.load(rows, done + 1);
        self.read_pages(rows, done + 2);
        scales
    }

    /// Begins to load the scales of block number `number` of a work tile, whose pages have been read. There are none if
    /// the block does not exist.
    #[track_caller]
    fn load(&self, rows: &ScaledRows<'k>, number: U32<'k>) {
        let (b, first, exists) = (self.builder, rows.begin - number * self.keys, number.lt(rows.blocks));
        for LookedUp { row, scale, page } in &self.looked_up {
            let (from, is_there) = rows.find(first + *row, page.map(|page| page.get()));
            scale.set(0.0);
            b.guarded(exists & is_there, || scale.set(b.load::<F32>(from)));
        }
    }

    /// Reads the pages of block number `number` of a work tile; any pages, if it begins before the first row.
    #[track_caller]
    fn read_pages(&self, rows: &ScaledRows<'k>, number: U32<'k>) {
        let Some(span) = &rows.pages else { return };
        let first = rows.begin - number * self.keys;
        for LookedUp { row, page, .. } in &self.looked_up {
            page.iter().for_each(|page| page.set(span.page(first + *row)));
        }
    }
}

impl<'k> ScaledRows<'k> {
    /// The address of the scale of row `row` of the sequence, which is on page `page`, and whether there is such a row.
    #[track_caller]
    fn find(&self, row: U32<'k>, page: Option<U32<'k>>) -> (U64<'k>, V<'k, Pred>) {
        let [of_page, of_row] = self.apart;
        match self.pages.as_ref().zip(page) {
            Some((span, page)) => {
                let (within, is_there) = span.within(row, page);
                (page.to_u64() * of_page + within.to_u64() * of_row + self.from, is_there)
            }
            None => (row.to_u64() * of_row + self.from, row.lt(self.count)),
        }
    }
}
