//! The layout of block scales.

use crate::Int;

/// The scales of a head of a tensor: one for each block of `rows` rows.
///
/// A block has rows of one sequence, and a sequence's first block begins with its first row. The scales of a dense
/// sequence's head are contiguous. Packed sequences share one array for each head; [`first_block`] gives the index of a
/// sequence's first scale. Some indices are unused.
///
/// ```text
/// scale of row r of sequence i = scales[head, cu_seqlens[i] / rows + i + r / rows]
/// ```
///
/// A sequence's first index follows from its own first row, so no code sums the blocks of earlier sequences. The rows
/// behind the last sequence count as one more sequence.
///
/// ```
/// use fa3_types::{ScaleBlocks, first_block};
///
/// // 300 rows: sequences of 130, 0 and 150 rows, and 20 rows behind them. Blocks of 128.
/// assert_eq!(ScaleBlocks::packed(300, 3, 128).count(), 6);
/// assert_eq!([(0, 0), (130, 1), (130, 2), (280, 3)].map(|(row, i)| first_block(row, i, 7_u32)), [0, 2, 3, 5]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ScaleBlocks {
    count: usize,
}

impl ScaleBlocks {
    /// The blocks of a sequence of `seqlen` rows, in blocks of `rows`.
    pub fn dense(seqlen: usize, rows: usize) -> ScaleBlocks {
        ScaleBlocks { count: seqlen.div_ceil(rows) }
    }

    /// The blocks of `sequences` packed sequences in `total` rows, in blocks of `rows`. The count is enough for any
    /// lengths of the sequences, and 0 if there are no rows.
    pub fn packed(total: usize, sequences: usize, rows: usize) -> ScaleBlocks {
        let most = (total / rows).saturating_add(sequences).saturating_add(1);
        ScaleBlocks { count: if total == 0 { 0 } else { most } }
    }

    /// Scales of a head.
    pub fn count(self) -> usize {
        self.count
    }
}

/// The index of the first block of packed sequence `sequence`, which begins with row `row` of its tensor. Blocks have 2
/// to the power of `shift` rows. No two sequences share a block.
pub fn first_block<T: Int>(row: T, sequence: T, shift: T) -> T {
    row.shr(shift) + sequence
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Block indices of all sequences, and of the rows after them, increase and stay below the count.
        #[test]
        fn no_two_blocks_have_one_number(
            lengths in proptest::collection::vec(0_u32..400, 0..12), behind in 0_u32..400, shift in 6_u32..8,
        ) {
            let (rows, mut end, mut next) = (1_u32 << shift, 0, 0);
            for (sequence, &length) in (0..).zip(lengths.iter().chain([&behind])) {
                let first = first_block(end, sequence, shift);
                if length > 0 {
                    prop_assert!(first >= next);
                    next = first + length.div_ceil(rows);
                }
                end += length;
            }
            let count = ScaleBlocks::packed(end as usize, lengths.len(), rows as usize).count();
            prop_assert!(next as usize <= count);
        }
    }
}
