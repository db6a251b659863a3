//! The rows of a sequence in pages: batch entries of a tensor that a page table in device memory names.
//!
//! A tile is copied in blocks of rows. Each block lies within a page, and is one [`RowSpan`]. Where blocks would have
//! fewer than 8 rows, [`gather`](super::gather) copies rows one by one. Zeros fill rows beyond the sequence's end, and
//! rows of a missing page.

use fa3_ir::BufferId;
use fa3_ir::lang::*;
use fa3_sched::{FastDiv, packed};

use super::ragged::{RowSpan, TileCoords};
use crate::kernels::params::{Form, Host, InKernel, Pass, Side, copies, param, params};

/// Number of words of an L2 line.
const LINE: u32 = 32;

/// The row index that stands for a missing row.
pub(crate) const NOWHERE: u32 = u32::MAX;

params! {
    /// The page table of a launch.
    struct Pages {
        /// The page numbers. Each row of the table has the numbers of one sequence.
        table: pointer = "page_table",
        /// The table row of each sequence, and the number of table rows, with an indirect page table.
        index: maybe pointer = "cache_batch_idx",
        table_rows: maybe u32 = "rows_of_page_table",
        /// Number of entries of a table row.
        per_sequence: u32 = "pages_of_sequence",
        /// Number of rows of a page.
        rows: div = "page_rows",
        /// Number of pages in memory.
        entries: u32 = "pages",
        /// Number of entries from one table row to the next.
        stride: u32 = "page_table_stride",
    }
}

copies!(Pages);

impl Pages<Form> {
    /// The parameters that a kernel declares, with an indirect page table or without.
    pub(crate) fn form(has_index: bool) -> Pages<Form> {
        let (index, table_rows) = has_index.then_some((Elem::U32, ())).unzip();
        let (table, rows) = (Elem::U32, Form::div());
        Pages { table, index, table_rows, per_sequence: (), rows, entries: (), stride: () }
    }
}

impl Pages<Host> {
    /// The page table of a launch; `index` is cache_batch_idx, if the table is indirect.
    pub(crate) fn of(pages: &packed::PageLayout, table: BufferId, index: Option<BufferId>) -> Pages<Host> {
        let &packed::PageLayout { per_sequence, table_stride, rows, entries, indexed, .. } = pages;
        let (index, table_rows) = index.zip(indexed).unzip();
        let rows = FastDiv::new(rows.max(1));
        Pages { table, index, table_rows, per_sequence, rows, entries, stride: table_stride }
    }
}

impl<'k> Pages<InKernel<'k>> {
    /// Prefetches the page table of `sequences` sequences to L2; each CTA prefetches a part. If the stride of table
    /// rows exceeds their entries, the prefetches reach only some of the rows.
    #[track_caller]
    pub(crate) fn prefetch(&self, b: &'k Builder, sequences: U32<'k>) {
        let rows = self.table_rows.unwrap_or(sequences);
        let thread = b.cta_x().mad(b.launch().threads, b.tid());
        prefetch_words(b, thread, self.table, self.per_sequence * rows);
    }
}

/// Prefetches `words` words of an array to L2; thread `thread` prefetches one line.
#[track_caller]
pub(super) fn prefetch_words<'k>(b: &'k Builder, thread: U32<'k>, array: U64<'k>, words: U32<'k>) {
    let line = thread.mad_wide(4 * LINE, array);
    b.guarded((thread * LINE).lt(words), || b.prefetch(line));
}

/// The rows of a sequence in pages.
#[derive(Clone, Copy)]
pub(crate) struct PageSpan<'k> {
    builder: &'k Builder,
    /// The address of the number of the sequence's first page.
    table: U64<'k>,
    /// Number of entries of the sequence's table row.
    pages: U32<'k>,
    /// Number of rows of a page.
    page_rows: FastDiv<U32<'k>>,
    /// Number of pages in memory.
    entries: U32<'k>,
    /// Number of rows of memory from one page to the next.
    apart: U32<'k>,
    /// Number of rows of the first page that precede the sequence's first row.
    first: U32<'k>,
    /// Number of rows of the sequence.
    count: U32<'k>,
}

impl<'k> PageSpan<'k> {
    /// `count` rows of a sequence, from row `first` of its pages on. Pages are `apart` rows of memory apart.
    #[track_caller]
    pub(crate) fn new(
        builder: &'k Builder,
        pages: Pages<InKernel<'k>>,
        sequence: U32<'k>,
        apart: U32<'k>,
        [first, count]: [U32<'k>; 2],
    ) -> PageSpan<'k> {
        let (table, count) = match pages.index.zip(pages.table_rows) {
            None => ((sequence * pages.stride).mad_wide(4, pages.table), count),
            Some((index, rows)) => {
                // A sequence of length 0 may be the entry behind the last sequence, for which the array has no element.
                let row = builder.var("row of table", 0);
                builder.guarded(count.gt(0), || row.set(builder.load::<B32>(sequence.mad_wide(4, index))));
                // All pages of a missing table row are missing.
                let (row, there) = (row.get().min(rows - 1), row.get().lt(rows).select::<B32>(count, 0));
                ((row.mul_wide(pages.stride) << 2) + pages.table, there)
            }
        };
        let Pages { per_sequence, rows: page_rows, entries, .. } = pages;
        PageSpan { builder, table, pages: per_sequence, page_rows, entries, apart, first, count }
    }

    /// The rows of another tensor of the cache, whose pages are `apart` rows of memory apart.
    pub(crate) fn of_tensor(self, apart: U32<'k>) -> PageSpan<'k> {
        PageSpan { apart, ..self }
    }

    /// The builder of the kernel that the span belongs to.
    pub(crate) fn builder(&self) -> &'k Builder {
        self.builder
    }

    /// The coordinates of `count` blocks of `rows` rows of `head`, from row `row` of the sequence on. Each block must
    /// lie within a page. All lanes of a warp must call this: each lane looks up a block.
    #[track_caller]
    pub(crate) fn blocks(
        &self,
        head: U32<'k>,
        row: U32<'k>,
        (count, rows): (u32, u32),
    ) -> Vec<TileCoords<'k>> {
        let b = self.builder;
        let of_lane = self.block(row + b.lane_id() * rows, rows);
        // The coordinates are taken from a known lane, so that the compiler knows that they are equal in all lanes.
        (0..count).map(|block| of_lane.of_lane(block).coords(head, b.value(0))).collect()
    }

    /// Loads the number of the page that has row `row` of the sequence, or of the last page if no page has the row.
    #[track_caller]
    pub(crate) fn page(&self, row: U32<'k>) -> U32<'k> {
        let number = self.page_rows.quotient(self.first + row);
        self.builder.load(number.min(self.pages - 1).mad_wide(4, self.table))
    }

    /// The index in memory of row `row` of the sequence, which is on page `page`; [`NOWHERE`] if there is no such row.
    #[track_caller]
    pub(crate) fn row_of_memory(&self, row: U32<'k>, page: U32<'k>) -> U32<'k> {
        let (within, is_there) = self.within(row, page);
        is_there.select(page.mad(self.apart, within), NOWHERE)
    }

    /// The place of row `row` of the sequence on page `page`, which has it, and whether there is such a row.
    #[track_caller]
    pub(crate) fn within(&self, row: U32<'k>, page: U32<'k>) -> (U32<'k>, V<'k, Pred>) {
        let (_, within) = self.page_rows.div_rem(self.first + row);
        (within, row.lt(self.count) & page.lt(self.entries))
    }

    /// `rows` rows of one page, from row `row` of the sequence on.
    #[track_caller]
    fn block(&self, row: U32<'k>, rows: u32) -> RowSpan<'k> {
        let b = self.builder;
        let (number, within) = self.page_rows.div_rem(self.first + row);
        // A block beyond the sequence's end may also lie beyond the sequence's pages. None of its rows is read.
        let at = number.min(self.pages - 1).mad_wide(4, self.table);
        let page = b.load::<B32>(at).min(self.entries);
        let left = fa3_sched::Int::sub_sat(self.count, row).min(rows);
        RowSpan::new(page.mad(self.apart, within), left)
    }
}
