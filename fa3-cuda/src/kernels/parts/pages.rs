//! The rows of one sequence in pages: entries of a tensor's batch, which a table in the device's memory names.
//!
//! A tile is copied in blocks of rows, none of which goes beyond a page that has another behind it. Each is a
//! [`RowSpan`] of its own. Where no block has 8 rows, rows are loaded one by one, which [`gather`](super::gather) does.
//! Rows beyond the sequence's end, and those of a page that is not there, become zeros.

use fa3_ir::BufferId;
use fa3_ir::lang::*;
use fa3_sched::{FastDiv, packed};

use super::rows_view::{RowSpan, TileCoords};
use crate::kernels::params::{Form, Host, InKernel, Pass, Side};

/// Words of a line of L2.
const LINE: u32 = 32;

/// A row that memory does not have.
pub(crate) const NOWHERE: u32 = u32::MAX;

/// The pages of a launch.
#[derive(Clone, Copy)]
pub(crate) struct Pages<S: Side> {
    /// The numbers of pages: a row of them for each sequence.
    table: S::Pointer,
    /// Which row of the table is each sequence's, if it is not that of its number, and how many rows there are.
    index: Option<(S::Pointer, S::U32)>,
    /// Entries of a row.
    per_sequence: S::U32,
    /// From a row to the next, in entries.
    stride: S::U32,
    /// Rows of a page.
    rows: FastDiv<S::U32>,
    /// Pages that there are.
    entries: S::U32,
}

impl Pages<Form> {
    /// The form of all launches, with an index or without.
    pub(crate) fn form(has_index: bool) -> Pages<Form> {
        let index = has_index.then_some((Elem::U32, ()));
        Pages { table: Elem::U32, index, per_sequence: (), stride: (), rows: Form::div(), entries: () }
    }
}

impl Pages<Host> {
    /// The pages of a launch with this table, and with this index, if it has one.
    pub(crate) fn of(pages: &packed::Pages, table: BufferId, index: Option<BufferId>) -> Pages<Host> {
        let &packed::Pages { per_sequence, table_stride, rows, entries, indexed, .. } = pages;
        Pages {
            table,
            index: index.zip(indexed),
            per_sequence,
            stride: table_stride,
            rows: FastDiv::new(rows.max(1)),
            entries,
        }
    }
}

impl<A: Side> Pages<A> {
    /// Goes over its numbers.
    #[track_caller]
    pub(crate) fn pass<B: Side>(self, by: &mut impl Pass<A, B>) -> Pages<B> {
        Pages {
            table: by.pointer("page_table", self.table),
            index: self.index.map(|(index, rows)| {
                (by.pointer("cache_batch_idx", index), by.u32("rows_of_page_table", rows))
            }),
            per_sequence: by.u32("pages_of_sequence", self.per_sequence),
            rows: self.rows.map_named("page_rows", &mut |name: &str, number| by.u32(name, number)),
            entries: by.u32("pages", self.entries),
            stride: by.u32("page_table_stride", self.stride),
        }
    }
}

impl<'k> Pages<InKernel<'k>> {
    /// Brings the table of so many sequences to L2, a part in each CTA; of a slice of a wider one as many words.
    #[track_caller]
    pub(crate) fn prefetch(&self, b: &'k Builder, sequences: V<'k, B32>) {
        let rows = self.index.map_or(sequences, |(_, rows)| rows);
        let thread = b.cta_x().mad(b.launch().threads, b.tid());
        prefetch_words(b, thread, self.table, self.per_sequence * rows);
    }
}

/// Brings the words of an array to L2, of which thread number `thread` has a line.
#[track_caller]
pub(super) fn prefetch_words<'k>(b: &'k Builder, thread: V<'k, B32>, array: V<'k, B64>, words: V<'k, B32>) {
    let line = thread.mad_wide(4 * LINE, array);
    b.guarded((thread * LINE).lt(words), || b.prefetch(line));
}

/// A sequence's rows.
#[derive(Clone, Copy)]
pub(crate) struct PageSpan<'k> {
    builder: &'k Builder,
    /// The number of the sequence's first page.
    table: V<'k, B64>,
    /// Entries from there on.
    pages: V<'k, B32>,
    /// Rows of a page.
    page_rows: FastDiv<V<'k, B32>>,
    /// Pages that there are.
    entries: V<'k, B32>,
    /// Rows of memory from a page to the next.
    apart: V<'k, B32>,
    /// Rows of the first page before the sequence's first one.
    first: V<'k, B32>,
    /// Rows of the sequence.
    count: V<'k, B32>,
}

impl<'k> PageSpan<'k> {
    /// `count` rows of a sequence from row `first` of its pages on, which are `apart` rows of memory apart.
    #[track_caller]
    pub(crate) fn new(
        builder: &'k Builder,
        pages: Pages<InKernel<'k>>,
        sequence: V<'k, B32>,
        apart: V<'k, B32>,
        [first, count]: [V<'k, B32>; 2],
    ) -> PageSpan<'k> {
        let (table, count) = match pages.index {
            None => ((sequence * pages.stride).mad_wide(4, pages.table), count),
            Some((index, rows)) => {
                // Without rows it may be the work behind the last sequence.
                let row = builder.var("row of table", 0);
                builder.guarded(count.gt(0), || row.set(builder.load::<B32>(sequence.mad_wide(4, index))));
                // The pages of a row that is not there are not there.
                let (row, there) = (row.get().min(rows - 1), row.get().lt(rows).select::<B32>(count, 0));
                ((row.mul_wide(pages.stride) << 2) + pages.table, there)
            }
        };
        let Pages { per_sequence, rows: page_rows, entries, .. } = pages;
        PageSpan { builder, table, pages: per_sequence, page_rows, entries, apart, first, count }
    }

    /// The kernel that it belongs to.
    pub(crate) fn builder(&self) -> &'k Builder {
        self.builder
    }

    /// The places of `count` blocks of `rows` rows of `head`, from row `row` of the sequence on. Rows of a block
    /// are of one page. In a whole warp: each lane finds a block.
    #[track_caller]
    pub(crate) fn blocks(
        &self,
        head: V<'k, B32>,
        row: V<'k, B32>,
        (count, rows): (u32, u32),
    ) -> Vec<TileCoords<'k>> {
        let b = self.builder;
        let of_lane = self.block(row + b.lane_id() * rows, rows);
        // From a known lane, so that the compiler knows that all lanes have the same.
        (0..count).map(|block| of_lane.of_lane(block).place(head, b.value(0))).collect()
    }

    /// The number of the page that has row `row` of the sequence, or of the last page, if none has. It is read now.
    #[track_caller]
    pub(crate) fn page(&self, row: V<'k, B32>) -> V<'k, B32> {
        let number = self.page_rows.quotient(self.first + row);
        self.builder.load(number.min(self.pages - 1).mad_wide(4, self.table))
    }

    /// The row of memory that is row `row` of the sequence, on page `page`; [`NOWHERE`] if there is none.
    #[track_caller]
    pub(crate) fn row_of_memory(&self, row: V<'k, B32>, page: V<'k, B32>) -> V<'k, B32> {
        let (_, within) = self.page_rows.div_rem(self.first + row);
        let is_there = row.lt(self.count) & page.lt(self.entries);
        is_there.select(page.mad(self.apart, within), NOWHERE)
    }

    /// `rows` rows of one page, from row `row` of the sequence on.
    #[track_caller]
    fn block(&self, row: V<'k, B32>, rows: u32) -> RowSpan<'k> {
        let b = self.builder;
        let (number, within) = self.page_rows.div_rem(self.first + row);
        // A block behind the sequence's end may be behind its pages, too. Nothing is read of it.
        let at = number.min(self.pages - 1).mad_wide(4, self.table);
        let page = b.load::<B32>(at).min(self.entries);
        let left = fa3_sched::Int::sub_sat(self.count, row).min(rows);
        RowSpan::new(page.mad(self.apart, within), left)
    }
}
