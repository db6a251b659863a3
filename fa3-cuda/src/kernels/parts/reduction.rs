//! The message about a tile whose keys several CTAs have split, from the attention kernel to the reduction kernel.

use fa3_ir::lang::*;

/// Bytes of a vector.
const VECTOR: i32 = 16;

/// The rows of a tile whose keys are split, and their splits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reduction<'k> {
    /// Number of rows of the tile; 0 if nothing is to be reduced.
    pub(crate) rows: U32<'k>,
    /// Number of splits of each row.
    pub(crate) splits: U32<'k>,
    /// Index of the sequence.
    pub(crate) batch: U32<'k>,
    /// Index of the group of heads whose rows share the tile.
    pub(crate) heads: U32<'k>,
    /// First row of the sequence's O in memory.
    pub(crate) q_row: U32<'k>,
    /// Position of the tile's first row in its sequence.
    pub(crate) first: U32<'k>,
    /// Number of rows of the sequence that take part in attention.
    pub(crate) used: U32<'k>,
    /// Index of the CTA that has the first split.
    pub(crate) cta: U32<'k>,
}

impl<'k> Reduction<'k> {
    /// Number of words of the message.
    pub(crate) const WORDS: u32 = 8;

    /// The address of message `number` of an array.
    #[track_caller]
    pub(crate) fn at(array: U64<'k>, number: U32<'k>) -> U64<'k> {
        number.mad_wide(4 * Reduction::WORDS, array)
    }

    /// Stores a message by which nothing is to be reduced.
    #[track_caller]
    pub(crate) fn store_none(b: &'k Builder, at: U64<'k>) {
        let zero = b.value(0);
        [0, VECTOR].into_iter().for_each(|half| b.store_vector(at.at(half), [zero; 4]));
    }

    /// Stores the message.
    #[track_caller]
    pub(crate) fn store(self, b: &'k Builder, at: U64<'k>) {
        let Reduction { rows, splits, batch, heads, q_row, first, used, cta } = self;
        b.store_vector(at.at(0), [rows, splits, batch, heads]);
        b.store_vector(at.at(VECTOR), [q_row, first, used, cta]);
    }

    /// Loads the message.
    #[track_caller]
    pub(crate) fn load(b: &'k Builder, at: U64<'k>) -> Reduction<'k> {
        let [rows, splits, batch, heads] = b.load_vector::<B32, 4>(at.at(0));
        let [q_row, first, used, cta] = b.load_vector::<B32, 4>(at.at(VECTOR));
        Reduction { rows, splits, batch, heads, q_row, first, used, cta }
    }
}
