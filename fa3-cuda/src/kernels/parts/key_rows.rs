//! Rows of K and V as the threads of a warp load them to registers: rows of pages, or of memory.

use fa3_ir::lang::*;

use super::pages::{NOWHERE, PageSpan};

/// The rows of a sequence in memory.
pub(crate) enum SequenceRows<'k> {
    /// Rows of pages.
    OfPages(PageSpan<'k>),
    /// `count` rows from row `first` of memory on.
    Of { first: U32<'k>, count: U32<'k> },
}

/// The keys of a head of a sequence, whose blocks are loaded from the last to the first.
pub(crate) struct KeyRows<'k> {
    rows: SequenceRows<'k>,
    /// Columns that the tensor has.
    pub(crate) cols: u32,
    /// The address of the thread's first column in the head's first row of memory, and the bytes from a row to the
    /// next.
    from: U64<'k>,
    apart: U32<'k>,
    /// The first row of the block that is loaded first.
    pub(crate) last: U32<'k>,
}

/// The rows of a block that a thread loads parts of.
pub(crate) struct BlockRows<'k> {
    /// Rows of the sequence, counted from the block's first one.
    rows: Vec<U32<'k>>,
    /// Their rows of memory; [`NOWHERE`] if nothing is loaded.
    of_memory: Vec<Var<'k, B32>>,
    /// The pages of the rows that are loaded next.
    pages: Vec<Var<'k, B32>>,
}

impl<'k> KeyRows<'k> {
    /// Keys of `cols` columns. `head` is the address of the head's first row of memory, and the bytes from a row to the
    /// next.
    pub(crate) fn new(
        rows: SequenceRows<'k>,
        cols: u32,
        (from, apart): (U64<'k>, U32<'k>),
        last: U32<'k>,
    ) -> KeyRows<'k> {
        KeyRows { rows, cols, from, apart, last }
    }

    /// These keys for a thread that loads columns from `col` on, of e4m3.
    #[track_caller]
    pub(crate) fn at_column(self, col: U32<'k>) -> KeyRows<'k> {
        KeyRows { from: self.from + col.to_u64(), ..self }
    }
}

impl<'k> BlockRows<'k> {
    /// These rows of a block. They have pages if `in_pages`.
    #[track_caller]
    pub(crate) fn declare(b: &'k Builder, rows: Vec<U32<'k>>, in_pages: bool) -> BlockRows<'k> {
        let vars = |name| rows.iter().map(|_| b.var(name, 0)).collect::<Vec<_>>();
        let (of_memory, pages) = (vars("row"), if in_pages { vars("page") } else { Vec::new() });
        BlockRows { rows, of_memory, pages }
    }

    /// Reads the pages of the block that begins with row `first` of the sequence; of any pages, if it begins before the
    /// first row.
    #[track_caller]
    pub(crate) fn read_pages(&self, keys: &KeyRows<'k>, first: U32<'k>) {
        if let SequenceRows::OfPages(span) = &keys.rows {
            for (page, &row) in self.pages.iter().zip(&self.rows) {
                page.set(span.page(first + row));
            }
        }
    }

    /// Finds the rows of the block that begins with row `first`, whose pages have been read. There are none if the
    /// block does not exist.
    #[track_caller]
    pub(crate) fn find(&self, keys: &KeyRows<'k>, first: U32<'k>, exists: Option<V<'k, Pred>>) {
        for (at, (to, &row)) in self.of_memory.iter().zip(&self.rows).enumerate() {
            let row = first + row;
            let found = match &keys.rows {
                SequenceRows::OfPages(span) => span.row_of_memory(row, self.pages[at].get()),
                SequenceRows::Of { first, count } => row.lt(*count).select(*first + row, NOWHERE),
            };
            to.set(exists.map_or(found, |exists| exists.select(found, NOWHERE)));
        }
    }

    /// The addresses of the rows that have been found, and whether each is loaded.
    #[track_caller]
    pub(crate) fn addresses(&self, keys: &KeyRows<'k>) -> Vec<(U64<'k>, V<'k, Pred>)> {
        let rows = self.of_memory.iter().map(|row| row.get());
        rows.map(|row| (row.mad_wide(keys.apart, keys.from), row.ne(NOWHERE))).collect()
    }
}
