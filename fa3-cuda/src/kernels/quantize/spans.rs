//! The rows of a tile of packed sequences. A search finds the sequence to which the tile's block belongs.

use fa3_ir::lang::*;
use fa3_sched::packed::ClampedRows;
use fa3_types::{Int, first_block};

use super::params::PackedRows;
use crate::kernels::params::InKernel;
use crate::kernels::parts::ragged::RowSpan;

/// The rows of the sequence to which a block belongs. They lie in the tensor, whatever `cu_seqlens` says.
#[derive(Clone, Copy)]
pub(super) struct Span<'k> {
    /// Index in the tensor of the sequence's first row.
    pub(super) first: U32<'k>,
    /// Number of rows whose codes are written.
    pub(super) rows: U32<'k>,
    /// Number of rows of the sequence that hold data: all, or 0 behind the last sequence. Other rows count as zeros.
    pub(super) len: U32<'k>,
    /// Index of the block in its sequence. It may lie behind the sequence's last block, and then has no rows.
    pub(super) block: U32<'k>,
}

/// The search for sequences. It keeps the last result, because most tiles of a run are heads of one block.
pub(super) struct Spans<'k> {
    builder: &'k Builder,
    packed: PackedRows<InKernel<'k>>,
    total: U32<'k>,
    /// The block whose sequence was found.
    block: Var<'k, B32>,
    /// The [`Span`] of that block.
    found: [Var<'k, B32>; 4],
}

impl<'k> Span<'k> {
    /// The rows of memory that are loaded.
    #[track_caller]
    pub(super) fn in_memory(&self) -> RowSpan<'k> {
        RowSpan::new(self.first, self.len)
    }
}

impl<'k> Spans<'k> {
    /// The state before the first search. The tensor has `total` rows.
    #[track_caller]
    pub(super) fn new(builder: &'k Builder, packed: &PackedRows<InKernel<'k>>, total: U32<'k>) -> Spans<'k> {
        let found =
            ["first row", "rows", "rows in use", "block of sequence"].map(|name| builder.var(name, 0));
        let packed = PackedRows { ..*packed };
        Spans { builder, packed, total, block: builder.var("block", u32::MAX), found }
    }

    /// The rows of the sequence to which block `block` belongs. All lanes that call this must ask for the same block.
    #[track_caller]
    pub(super) fn at(&self, block: U32<'k>) -> Span<'k> {
        self.builder.if_uniform(self.block.now().ne(block), || {
            self.block.set(block);
            let Span { first, rows, len, block } = self.find(block);
            self.found.iter().zip([first, rows, len, block]).for_each(|(to, number)| to.set(number));
        });
        let [first, rows, len, block] = self.found.each_ref().map(|found| found.get());
        Span { first, rows, len, block }
    }

    /// Finds the last sequence whose first block is not behind `block`, by bisection. The rows behind all sequences
    /// count as one more sequence.
    #[track_caller]
    fn find(&self, block: U32<'k>) -> Span<'k> {
        let (b, total, &PackedRows { sequences, shift, .. }) = (self.builder, self.total, &self.packed);
        let first_of = |sequence: U32<'k>| {
            let end = self.end_before(sequence);
            first_block(ClampedRows::packed([end, end], total).row, sequence, shift)
        };
        let (found, left) = (b.var("sequence", 0), b.var("left", sequences + 1));
        b.repeat(|| {
            b.break_if(left.now().le(1));
            let half = left.get() >> 1;
            let middle = found.get() + half;
            let is_before = first_of(middle).le(block);
            found.set(is_before.select(middle, found.get()));
            left.set(left.get() - half);
        });
        let sequence = found.get();
        let is_one = sequence.lt(sequences);
        let end = b.var("end", total);
        b.guarded(is_one, || end.set(self.end_before(sequence + 1)));
        let rows = ClampedRows::packed([self.end_before(sequence), end.get()], total);
        let block = block.sub_sat(first_block(rows.row, sequence, shift));
        Span { first: rows.row, rows: rows.rows, len: is_one.select(rows.rows, 0), block }
    }

    /// Loads an entry of `cu_seqlens`.
    #[track_caller]
    fn end_before(&self, sequence: U32<'k>) -> U32<'k> {
        // This must not be a read-only load: with PDL, an earlier kernel may still write the array at this time.
        self.builder.load(sequence.mad_wide(4, self.packed.cu_seqlens))
    }
}
