//! A sequence, as the table has it.

use super::ClampedRows;
use crate::Int;

/// Rows and keys of a sequence, and its row blocks. All numbers are below 2³¹ and lie within the tensors, whatever
/// `cu_seqlens` and `seqused` say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record<T> {
    /// The first row of Q and O: in a packed tensor, or 0 in a dense one.
    pub q_row: T,
    /// Rows of O, which are all written.
    pub q_rows: T,
    /// The first of them, which take part in attention. The others see no key.
    pub q_len: T,
    /// The first row of K and V: in a packed tensor, or 0 in a dense one.
    pub k_row: T,
    /// Keys that take part in attention.
    pub k_len: T,
    /// The number of its first row block.
    pub first_block: T,
    /// How many row blocks it has.
    pub blocks: T,
    /// The number of the sequence in its batch.
    pub sequence: T,
}

impl<T: Int> Record<T> {
    /// The record of a sequence of these rows, which are `blocks` row blocks. No others come before them.
    pub fn new(q: ClampedRows<T>, k: ClampedRows<T>, blocks: T, sequence: T) -> Record<T> {
        Record {
            q_row: q.row,
            q_rows: q.rows,
            q_len: q.len,
            k_row: k.row,
            k_len: k.len,
            first_block: blocks.lit(0),
            blocks,
            sequence,
        }
    }

    /// The same behind `first_block` others, cut off where all of them would be more than `capacity`.
    #[must_use]
    pub fn placed(self, first_block: T, capacity: T) -> Record<T> {
        let blocks = self.blocks.at_most(capacity.sub_sat(first_block));
        Record { first_block, blocks, ..self }
    }
}

impl<T: Copy> Record<T> {
    /// 32-bit words of a record.
    pub const WORDS: u32 = 8;

    /// The words in memory.
    pub fn words(&self) -> [T; 8] {
        let Record { q_row, q_rows, q_len, k_row, k_len, first_block, blocks, sequence } = *self;
        [q_row, q_rows, q_len, k_row, k_len, first_block, blocks, sequence]
    }

    /// The record that has these words.
    pub fn from_words(
        [q_row, q_rows, q_len, k_row, k_len, first_block, blocks, sequence]: [T; 8],
    ) -> Record<T> {
        Record { q_row, q_rows, q_len, k_row, k_len, first_block, blocks, sequence }
    }
}
