//! Rows of K and V as the threads of a warp load them to registers: rows of pages, of memory, or of a list.

use fa3_ir::lang::*;

use super::lists::ListSpan;
use super::pages::{NOWHERE, PageSpan};

/// The rows of a sequence in memory.
#[allow(clippy::large_enum_variant, reason = "a kernel has one of them while it is built")]
pub(crate) enum SequenceRows<'k> {
    /// Rows of pages.
    OfPages(PageSpan<'k>),
    /// `count` rows from row `first` of memory on.
    Of { first: U32<'k>, count: U32<'k> },
    /// Rows that a list names, in units of memory, of K (0) or V (1).
    Listed(Box<ListSpan<'k>>, usize),
}

/// The keys of a head of a sequence, whose blocks are loaded from the last to the first, or from the first to the last
/// if a list names them.
pub(crate) struct KeyRows<'k> {
    rows: SequenceRows<'k>,
    /// Columns that the tensor has, and bytes of an element.
    pub(crate) cols: u32,
    pub(crate) bytes: u32,
    /// The address of the thread's first column in the head's first row of memory, and the bytes from a row to the
    /// next.
    from: U64<'k>,
    apart: U32<'k>,
    /// The address of the scales of the first row of memory, if rows have their own ones.
    scales: Option<U64<'k>>,
    /// The first row of the block that is loaded first.
    pub(crate) begin: U32<'k>,
}

/// The rows of a block that a thread loads parts of.
pub(crate) struct BlockRows<'k> {
    /// Rows of the sequence, counted from the block's first one.
    rows: Vec<U32<'k>>,
    /// Their rows of memory; [`NOWHERE`] if nothing is loaded.
    of_memory: Vec<Var<'k, B32>>,
    /// The pages of the rows that are loaded next, or their indices.
    pages: Vec<Var<'k, B32>>,
}

impl<'k> KeyRows<'k> {
    /// Keys of `cols` columns with elements of `bytes`. The place is the address of the head's first row of memory, and
    /// the bytes from a row to the next.
    pub(crate) fn new(
        rows: SequenceRows<'k>,
        [cols, bytes]: [u32; 2],
        (from, apart): (U64<'k>, U32<'k>),
        begin: U32<'k>,
    ) -> KeyRows<'k> {
        KeyRows { rows, cols, bytes, from, apart, scales: None, begin }
    }

    /// These keys, with this address of the scales of the first row of memory.
    pub(crate) fn scaled_by(self, scales: Option<U64<'k>>) -> KeyRows<'k> {
        KeyRows { scales, ..self }
    }

    /// These keys for a thread that loads columns from `col` on.
    #[track_caller]
    pub(crate) fn at_column(self, col: U32<'k>) -> KeyRows<'k> {
        let bytes = if self.bytes == 1 { col } else { col * self.bytes };
        KeyRows { from: self.from + bytes.to_u64(), ..self }
    }

    /// The first row of the block that is loaded `rows` rows after the block that begins with row `first`.
    #[track_caller]
    pub(crate) fn after(&self, first: U32<'k>, rows: impl Arg<Ty = B32>) -> U32<'k> {
        match self.rows {
            SequenceRows::Listed(..) => first + rows,
            SequenceRows::OfPages(_) | SequenceRows::Of { .. } => first - rows,
        }
    }
}

impl<'k> BlockRows<'k> {
    /// These rows of a block, which pages have or a list names if `are_found`.
    #[track_caller]
    pub(crate) fn declare(b: &'k Builder, rows: Vec<U32<'k>>, are_found: bool) -> BlockRows<'k> {
        let vars = |name| rows.iter().map(|_| b.var(name, 0)).collect::<Vec<_>>();
        let (of_memory, pages) = (vars("row"), if are_found { vars("page") } else { Vec::new() });
        BlockRows { rows, of_memory, pages }
    }

    /// Reads the pages or indices of the block that begins with row `first` of the sequence; any pages, if it begins
    /// before the first row.
    #[track_caller]
    pub(crate) fn read_pages(&self, keys: &KeyRows<'k>, first: U32<'k>) {
        for (page, &row) in self.pages.iter().zip(&self.rows) {
            match &keys.rows {
                SequenceRows::OfPages(span) => page.set(span.page(first + row)),
                SequenceRows::Of { .. } => {}
                SequenceRows::Listed(span, _) => span.load(page, [span.number(first), row]),
            }
        }
    }

    /// Finds the rows of the block that begins with row `first`, whose pages have been read. There are none if the
    /// block does not exist.
    #[track_caller]
    pub(crate) fn find(&self, keys: &KeyRows<'k>, first: U32<'k>, exists: Option<V<'k, Pred>>) {
        for (at, (to, &row)) in self.of_memory.iter().zip(&self.rows).enumerate() {
            let found = match &keys.rows {
                SequenceRows::OfPages(span) => span.row_of_memory(first + row, self.pages[at].get()),
                SequenceRows::Of { first: begin, count } => {
                    let row = first + row;
                    row.lt(*count).select(*begin + row, NOWHERE)
                }
                SequenceRows::Listed(span, of) => {
                    span.units([span.number(first), row], self.pages[at].get())[*of]
                }
            };
            to.set(exists.map_or(found, |exists| exists.select(found, NOWHERE)));
        }
    }

    /// The rows of the block, and the rows of memory that have been found; [`NOWHERE`] for rows that do not exist.
    pub(crate) fn found(&self) -> impl Iterator<Item = (U32<'k>, U32<'k>)> {
        self.rows.iter().copied().zip(self.of_memory.iter().map(|row| row.get()))
    }

    /// The addresses of the scales of the rows that have been found, and whether each row exists.
    #[track_caller]
    pub(crate) fn scales(&self, keys: &KeyRows<'k>) -> Vec<(U64<'k>, V<'k, Pred>)> {
        let found = keys.scales.into_iter().flat_map(|from| self.found().map(move |(_, row)| (from, row)));
        found.map(|(from, row)| (row.mad_wide(keys.apart, from), row.ne(NOWHERE))).collect()
    }

    /// The addresses of the rows that have been found, and whether each is loaded.
    #[track_caller]
    pub(crate) fn addresses(&self, keys: &KeyRows<'k>) -> Vec<(U64<'k>, V<'k, Pred>)> {
        let rows = self.of_memory.iter().map(|row| row.get());
        rows.map(|row| (row.mad_wide(keys.apart, keys.from), row.ne(NOWHERE))).collect()
    }
}
