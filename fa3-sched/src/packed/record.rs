//! A sequence's record in the varlen table.

use super::ClampedRows;
use crate::Int;

/// Rows and keys of a sequence, and its row blocks. All numbers are below 2³¹ and lie within the tensors, whatever
/// `cu_seqlens` and `seqused` say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceRecord<T> {
    /// The first row of Q and O: in a packed tensor, or 0 in a dense one.
    pub q_row: T,
    /// Number of rows of Q and O. All rows of O are written.
    pub q_rows: T,
    /// Number of query rows in use. The remaining `q_rows - q_len` rows are fully masked.
    pub q_len: T,
    /// The first row of K and V: in a packed tensor, or 0 in a dense one.
    pub k_row: T,
    /// Number of keys in use.
    pub k_len: T,
    /// The number of its first row block.
    pub first_block: T,
    /// Number of row blocks.
    pub blocks: T,
    /// Index of the sequence in its batch.
    pub sequence: T,
}

impl<T: Int> SequenceRecord<T> {
    /// The record of a sequence with these rows, in `blocks` row blocks. No other blocks come before them.
    pub fn new(q: ClampedRows<T>, k: ClampedRows<T>, blocks: T, sequence: T) -> SequenceRecord<T> {
        SequenceRecord {
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

    /// This record after `first_block` other row blocks, cut off where the total would exceed `capacity`.
    #[must_use]
    pub fn placed(self, first_block: T, capacity: T) -> SequenceRecord<T> {
        let blocks = self.blocks.at_most(capacity.sub_sat(first_block));
        SequenceRecord { first_block, blocks, ..self }
    }
}

impl<T: Copy> SequenceRecord<T> {
    /// 32-bit words of a record.
    pub const WORDS: u32 = 8;

    /// The words in memory.
    pub fn words(&self) -> [T; 8] {
        let SequenceRecord { q_row, q_rows, q_len, k_row, k_len, first_block, blocks, sequence } = *self;
        [q_row, q_rows, q_len, k_row, k_len, first_block, blocks, sequence]
    }

    /// The record that has these words.
    pub fn from_words(
        [q_row, q_rows, q_len, k_row, k_len, first_block, blocks, sequence]: [T; 8],
    ) -> SequenceRecord<T> {
        SequenceRecord { q_row, q_rows, q_len, k_row, k_len, first_block, blocks, sequence }
    }
}
