//! Masks that are data (FlashMask): one or two intervals of keys for each query row.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::{Dtype, ProblemError, Shape};

/// The form of an interval mask: a contiguous i32 tensor (batch or 1, heads_q or 1, seqlen_q, 2 or 4), whose last axis
/// is `start, end` or `start, end, start, end`. A query row sees keys of its intervals `start .. end`, which may be in
/// any order, overlap and be empty. Bounds count keys from the sequence's first one, and are clamped to its keys.
/// Batch and seqlen_q are Q's: packed sequences have (1, heads_q or 1, total_q, 2 or 4).
///
/// In place of bounds, the tensor may say which sequences have a causal mask, (sequences, 1, 1, 1), or which new keys a
/// row sees, (batch, seqlen_q, words, 1), words being 2 or more. The new keys of a sequence are its last seqlen_q ones.
/// Bit i of word w is for new key 32 · w + i. A row sees all older keys, and no key that has no bit.
///
/// Or it says which blocks of keys a block of rows sees, (batch or 1, heads_q or 1, blocks of rows, words). Blocks have
/// 128 rows and keys if words is odd and 3 or more, and 64 if it is even and 6 or more ([`BlockSide`]). Bit i of word w
/// is for block 32 · w + i of keys, and blocks without a bit are not seen.
///
/// Interval masks express documents, prefixes, windows beside the first keys (attention sinks), chunks and padding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Intervals {
    /// Intervals of a row.
    pub of_row: IntervalsOfRow,
    /// Whether each entry of the batch has its own intervals; otherwise all share them.
    pub per_sequence: bool,
    /// Whether each query head has its own intervals; otherwise all share them.
    pub per_head: bool,
}

/// Number of intervals of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IntervalsOfRow {
    /// One.
    One,
    /// Two.
    Two,
    /// One, which a number of the row's sequence decides: if it is 0, rows see all keys, and otherwise the keys up to
    /// their own positions.
    Causal {
        /// The number of sequences.
        sequences: usize,
    },
    /// Any number: all keys but the new ones, and those new ones that the row's bits show, such as a draft's ancestors
    /// in a tree.
    Tree {
        /// The number of 32-bit words of a row.
        words: usize,
    },
    /// Any number: the blocks of keys that the bits of the row's block show.
    Blocks {
        /// The number of 32-bit words of a block of rows.
        words: usize,
        /// The number of rows, and of keys, of a block.
        side: BlockSide,
    },
}

/// The number of rows, and of keys, of a block, if bits say which blocks of keys a block of rows sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockSide {
    /// 64.
    Of64 = 64,
    /// 128.
    Of128 = 128,
}

impl BlockSide {
    /// The sides of blocks with `words` words for each block of rows; `None` if there is no such number of words.
    pub const fn of_words(words: usize) -> Option<BlockSide> {
        match words {
            3.. if words % 2 == 1 => Some(BlockSide::Of128),
            6.. => Some(BlockSide::Of64),
            _ => None,
        }
    }

    /// The least number of words that says this side, and has bits for `blocks` blocks of keys.
    pub fn words(self, blocks: usize) -> usize {
        let enough = blocks.div_ceil(32);
        match self {
            BlockSide::Of64 => enough.next_multiple_of(2).max(6),
            BlockSide::Of128 => (enough | 1).max(3),
        }
    }

    /// The number of rows, and of keys.
    pub const fn rows(self) -> usize {
        self as usize
    }
}

impl IntervalsOfRow {
    /// The number of intervals that kernels know: of a tree's row and under bits of blocks, the one that has all
    /// others.
    pub const fn count(self) -> usize {
        match self {
            IntervalsOfRow::One
            | IntervalsOfRow::Causal { .. }
            | IntervalsOfRow::Tree { .. }
            | IntervalsOfRow::Blocks { .. } => 1,
            IntervalsOfRow::Two => 2,
        }
    }

    /// The part on which a kernel's code depends: the variant, of no sequences and no words.
    #[must_use]
    pub const fn in_code(self) -> IntervalsOfRow {
        match self {
            IntervalsOfRow::Causal { .. } => IntervalsOfRow::Causal { sequences: 0 },
            IntervalsOfRow::Tree { .. } => IntervalsOfRow::Tree { words: 0 },
            IntervalsOfRow::Blocks { side, .. } => IntervalsOfRow::Blocks { words: 0, side },
            IntervalsOfRow::One | IntervalsOfRow::Two => self,
        }
    }
}

impl Intervals {
    /// The form of a tensor of shape `given` for Q of shape `q`.
    ///
    /// # Errors
    /// [`ProblemError::IntervalsShape`].
    pub fn of_shape(given: [usize; 4], q: Shape) -> Result<Intervals, ProblemError> {
        let Shape { batch, seqlen, heads, .. } = q;
        if let [sequences, 1, 1, 1] = given {
            return Ok(Intervals::of_causal(sequences));
        }
        if let [of_batch, rows, words, 1] = given
            && [of_batch, rows] == [batch, seqlen]
            && words > 1
        {
            return Ok(Intervals::of_tree(words));
        }
        let (of_row, rows) = match given[3] {
            2 => (Some(IntervalsOfRow::One), seqlen),
            4 => (Some(IntervalsOfRow::Two), seqlen),
            words => match BlockSide::of_words(words) {
                Some(side) => (Some(IntervalsOfRow::Blocks { words, side }), seqlen.div_ceil(side.rows())),
                None => (None, seqlen),
            },
        };
        let fits =
            [(given[0], batch), (given[1], heads)].into_iter().all(|(given, all)| [1, all].contains(&given));
        match of_row {
            Some(of_row) if fits && given[2] == rows => {
                Ok(Intervals { of_row, per_sequence: given[0] != 1, per_head: given[1] != 1 })
            }
            _ => Err(ProblemError::IntervalsShape { given, batch, heads, rows: seqlen }),
        }
    }

    /// The form of the tensor that says which of `sequences` sequences have a causal mask.
    pub const fn of_causal(sequences: usize) -> Intervals {
        Intervals { of_row: IntervalsOfRow::Causal { sequences }, per_sequence: true, per_head: false }
    }

    /// The form of the tensor that says by `words` words for each row which new keys it sees.
    pub const fn of_tree(words: usize) -> Intervals {
        Intervals { of_row: IntervalsOfRow::Tree { words }, per_sequence: true, per_head: false }
    }

    /// Checks the number of sequences, that bits of blocks are for dense ones, that elements have 16 bits or more, and
    /// that there is no `qv`.
    pub(crate) fn check(
        self,
        (sequences, are_packed): (usize, bool),
        dtypes: [Dtype; 2],
        has_qv: bool,
    ) -> Result<(), ProblemError> {
        if let IntervalsOfRow::Causal { sequences: given } = self.of_row
            && (given != sequences || given == 0)
        {
            return Err(ProblemError::CausalCount { given, sequences });
        }
        if are_packed && self.are_blocks() {
            return Err(ProblemError::BlocksPacked);
        }
        if let Some(given) = dtypes.into_iter().find(|dtype| matches!(dtype, Dtype::E4m3 | Dtype::Int8)) {
            return Err(ProblemError::IntervalsDtype { given });
        }
        if has_qv { Err(ProblemError::IntervalsLatent) } else { Ok(()) }
    }

    /// Whether bits say which blocks of keys a block of rows sees.
    pub const fn are_blocks(self) -> bool {
        self.block_side().is_some()
    }

    /// The number of rows, and of keys, of a block, if bits say which blocks of keys a block of rows sees.
    pub const fn block_side(self) -> Option<BlockSide> {
        match self.of_row {
            IntervalsOfRow::Blocks { side, .. } => Some(side),
            IntervalsOfRow::One
            | IntervalsOfRow::Two
            | IntervalsOfRow::Causal { .. }
            | IntervalsOfRow::Tree { .. } => None,
        }
    }

    /// The simplest form of the same tensor for Q of this shape: the only entry of a batch shares its intervals.
    pub(crate) fn simplified(self, q: Shape) -> Intervals {
        Intervals { per_sequence: self.per_sequence && q.batch > 1, ..self }
    }

    /// The shape of the tensor for Q of this shape.
    pub fn shape(self, q: Shape) -> [usize; 4] {
        let each = |own: bool, all: usize| if own { all } else { 1 };
        let of_bounds =
            |numbers| [each(self.per_sequence, q.batch), each(self.per_head, q.heads), q.seqlen, numbers];
        match self.of_row {
            IntervalsOfRow::One => of_bounds(2),
            IntervalsOfRow::Two => of_bounds(4),
            IntervalsOfRow::Causal { sequences } => [sequences, 1, 1, 1],
            IntervalsOfRow::Tree { words } => [q.batch, q.seqlen, words, 1],
            IntervalsOfRow::Blocks { words, side } => {
                let [batch, heads, _, words] = of_bounds(words);
                [batch, heads, q.seqlen.div_ceil(side.rows()), words]
            }
        }
    }
}

impl fmt::Display for Intervals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self.of_row {
            IntervalsOfRow::One => "intervals",
            IntervalsOfRow::Two => "two intervals",
            IntervalsOfRow::Causal { .. } => "causal sequences",
            IntervalsOfRow::Tree { .. } => "a tree of new keys",
            IntervalsOfRow::Blocks { .. } => "blocks of keys",
        })
    }
}

/// The intervals of an interval mask: its data. Clones share them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IntervalRows {
    shape: [usize; 4],
    bounds: Arc<[i32]>,
}

impl IntervalRows {
    /// Intervals of this form for Q of this shape, in the order of the tensor.
    ///
    /// # Errors
    /// [`ProblemError::IntervalsCount`] if the number of bounds is wrong.
    pub fn new(
        form: Intervals,
        q: Shape,
        bounds: impl Into<Arc<[i32]>>,
    ) -> Result<IntervalRows, ProblemError> {
        let (shape, bounds) = (form.shape(q), bounds.into());
        match (bounds.len(), shape.into_iter().product()) {
            (given, expected) if given != expected => Err(ProblemError::IntervalsCount { given, expected }),
            _ => Ok(IntervalRows { shape, bounds }),
        }
    }

    /// The bounds, in the order of the tensor.
    pub fn bounds(&self) -> &[i32] {
        &self.bounds
    }

    /// Whether a sequence has a causal mask, if the tensor says which sequences have one.
    pub(crate) fn is_causal(&self, sequence: usize) -> Option<bool> {
        (self.shape[1..] == [1; 3]).then(|| self.bounds[sequence] != 0)
    }

    /// The words of the row at this place of Q (entry of the batch, row), if they say which new keys it sees.
    pub(crate) fn words(&self, [entry, row]: [usize; 2]) -> Option<&[i32]> {
        let [_, rows, words, numbers] = self.shape;
        let first = (entry * rows + row) * words;
        (numbers == 1 && words > 1).then(|| &self.bounds[first..first + words])
    }

    /// The words of a row's block at this place of Q (entry of the batch, head, row), and the keys of a block, if they
    /// say which blocks of keys it sees.
    pub(crate) fn block_words(&self, at @ [.., row]: [usize; 3]) -> Option<(&[i32], usize)> {
        let [.., words] = self.shape;
        let side = BlockSide::of_words(words)?.rows();
        let first = self.first_number(at, row / side);
        Some((&self.bounds[first..first + words], side))
    }

    /// The place of the first number of row `row` of the tensor, for a row at this place of Q.
    fn first_number(&self, [entry, head, _]: [usize; 3], row: usize) -> usize {
        let [batch, heads, rows, numbers] = self.shape;
        let own = |index: usize, all: usize| if all == 1 { 0 } else { index };
        ((own(entry, batch) * heads + own(head, heads)) * rows + row) * numbers
    }

    /// The keys that the row at this place of Q (entry of the batch, head, row) sees in a sequence of `keys` keys, as
    /// two disjoint ranges.
    ///
    /// # Panics
    /// If there is no such row.
    pub(crate) fn of_row(&self, at @ [.., row]: [usize; 3], keys: usize) -> [Range<usize>; 2] {
        let [_, _, rows, numbers] = self.shape;
        assert!(row < rows, "row {row} of {rows}");
        let first = self.first_number(at, row);
        let inside = |bound: i32| usize::try_from(bound).unwrap_or(0).min(keys);
        let mut all =
            self.bounds[first..first + numbers].as_chunks::<2>().0.iter().map(|bounds| bounds.map(inside));
        let one = all.next().unwrap_or([0, 0]);
        let other = all.next().unwrap_or([keys, keys]);
        let ([start, end], [other, other_end]) = if one <= other { (one, other) } else { (other, one) };
        let end = end.max(start);
        let other = other.max(end);
        [start..end, other..other_end.max(other)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const Q: Shape = Shape { batch: 2, seqlen: 3, heads: 4, head_dim: 8 };

    #[test]
    fn shapes_say_the_form() {
        for given in
            [[1, 1, 3, 2], [2, 1, 3, 4], [1, 4, 3, 4], [2, 4, 3, 2], [2, 1, 1, 3], [1, 4, 1, 5], [1, 1, 1, 6]]
        {
            let form = Intervals::of_shape(given, Q).unwrap();
            assert_eq!(form.shape(Q), given);
            assert_eq!((form.per_sequence, form.per_head), (given[0] == 2, given[1] == 4));
        }
        for given in
            [[3, 1, 3, 2], [0, 1, 3, 2], [1, 2, 3, 2], [1, 1, 4, 2], [1, 1, 3, 3], [1, 1, 3, 0], [1, 1, 3, 6]]
        {
            let error = Intervals::of_shape(given, Q).unwrap_err();
            assert_eq!(error, ProblemError::IntervalsShape { given, batch: 2, heads: 4, rows: 3 });
        }
    }

    #[test]
    fn words_say_the_side_of_blocks() {
        let q = Shape { seqlen: 129, ..Q };
        for (shape, side) in [([1, 1, 2, 5], BlockSide::Of128), ([1, 1, 3, 8], BlockSide::Of64)] {
            let form = Intervals::of_shape(shape, q).unwrap();
            assert_eq!((form.block_side(), form.shape(q)), (Some(side), shape));
        }
        for blocks in 0..400 {
            for side in [BlockSide::Of64, BlockSide::Of128] {
                let words = side.words(blocks);
                assert_eq!(BlockSide::of_words(words), Some(side));
                assert!(32 * words >= blocks && words <= (blocks.div_ceil(32) + 1).max(6));
            }
        }
        assert!([0, 1, 2, 4].into_iter().all(|words| BlockSide::of_words(words).is_none()));
    }

    #[test]
    fn rows_have_their_own_bounds_or_shared_ones() {
        let bounds: Vec<i32> = (0..2 * 4 * 3 * 4).collect();
        let rows = |shape: [usize; 4]| {
            let count: usize = shape.iter().product();
            IntervalRows::new(Intervals::of_shape(shape, Q).unwrap(), Q, &bounds[..count]).unwrap()
        };
        let of = |shape, at| rows(shape).of_row(at, 1000);
        assert_eq!(of([2, 4, 3, 4], [1, 2, 1]), [76..77, 78..79]);
        assert_eq!(of([1, 4, 3, 4], [1, 2, 1]), [28..29, 30..31]);
        assert_eq!(of([2, 1, 3, 2], [1, 2, 1]), [8..9, 1000..1000]);
        let form = Intervals::of_shape([1, 1, 3, 2], Q).unwrap();
        let error = IntervalRows::new(form, Q, vec![0; 5]).unwrap_err();
        assert_eq!(error, ProblemError::IntervalsCount { given: 5, expected: 6 });
    }

    #[test]
    fn bounds_are_cut_off_at_the_ends() {
        let q = Shape { batch: 1, seqlen: 1, heads: 1, head_dim: 8 };
        let form = Intervals::of_shape([1, 1, 1, 4], q).unwrap();
        for (bounds, expected) in [
            ([i32::MIN, 3, 5, i32::MAX], [0..3, 5..7]),
            ([4, 2, 9, 12], [4..4, 7..7]),
            ([-3, -1, i32::MAX, i32::MIN], [0..0, 7..7]),
        ] {
            assert_eq!(IntervalRows::new(form, q, bounds).unwrap().of_row([0; 3], 7), expected);
        }
    }

    proptest::proptest! {
        #[test]
        fn rows_see_the_keys_of_both(bounds in proptest::array::uniform4(-2..12_i32), keys in 0usize..10) {
            let q = Shape { batch: 1, seqlen: 1, heads: 1, head_dim: 8 };
            let form = Intervals::of_shape([1, 1, 1, 4], q).unwrap();
            let [one, other] = IntervalRows::new(form, q, bounds).unwrap().of_row([0; 3], keys);
            proptest::prop_assert!(one.end <= other.start && other.end <= keys, "{:?} {:?}", one, other);
            for key in 0..12 {
                let [a, b, c, d] = bounds;
                let sees = ((a..b).contains(&key) || (c..d).contains(&key)) && (key as usize) < keys;
                let key = key as usize;
                proptest::prop_assert_eq!(one.contains(&key) || other.contains(&key), sees);
            }
        }
    }
}
