//! The message about a tile whose keys several CTAs have split. The attention kernel writes it, and the reduction
//! kernel reads it.

use fa3_ir::lang::*;

/// Bytes of a vector.
const VECTOR: i32 = 16;

/// Rows whose keys are split, and the splits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reduction<'k> {
    /// Rows of the tile; 0 if nothing is to be reduced.
    pub(crate) rows: V<'k, B32>,
    /// Splits of each row.
    pub(crate) splits: V<'k, B32>,
    /// Sequence.
    pub(crate) batch: V<'k, B32>,
    /// Index of the group of heads whose rows share the tile.
    pub(crate) heads: V<'k, B32>,
    /// First row of the sequence's O in memory.
    pub(crate) q_row: V<'k, B32>,
    /// Position of the tile's first row in its sequence.
    pub(crate) first: V<'k, B32>,
    /// Rows of the sequence that take part in attention.
    pub(crate) used: V<'k, B32>,
    /// CTA that has the first split.
    pub(crate) cta: V<'k, B32>,
}

impl<'k> Reduction<'k> {
    /// Words of the message.
    pub(crate) const WORDS: u32 = 8;

    /// The address of message `number` of an array.
    #[track_caller]
    pub(crate) fn at(array: V<'k, B64>, number: V<'k, B32>) -> V<'k, B64> {
        number.mad_wide(4 * Reduction::WORDS, array)
    }

    /// Stores a message that nothing is to be reduced.
    #[track_caller]
    pub(crate) fn store_none(b: &'k Builder, at: V<'k, B64>) {
        let zero = b.value(0);
        [0, VECTOR].into_iter().for_each(|half| b.store_vector(at.at(half), [zero; 4]));
    }

    /// Stores the message.
    #[track_caller]
    pub(crate) fn store(self, b: &'k Builder, at: V<'k, B64>) {
        let Reduction { rows, splits, batch, heads, q_row, first, used, cta } = self;
        b.store_vector(at.at(0), [rows, splits, batch, heads]);
        b.store_vector(at.at(VECTOR), [q_row, first, used, cta]);
    }

    /// Loads the message.
    #[track_caller]
    pub(crate) fn load(b: &'k Builder, at: V<'k, B64>) -> Reduction<'k> {
        let [rows, splits, batch, heads] = b.load_vector::<B32, 4>(at.at(0));
        let [q_row, first, used, cta] = b.load_vector::<B32, 4>(at.at(VECTOR));
        Reduction { rows, splits, batch, heads, q_row, first, used, cta }
    }
}
