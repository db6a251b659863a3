//! The keys that a query row may see.

use fa3_ir::lang::*;
use fa3_sched::VisibleKeys;

pub use super::tree_words::TreeWords;

/// The position of a query row in its sequence. The number of a row in a PackGQA tile is not a position, but a
/// `PackedRow` of the forward pass.
#[derive(Clone, Copy)]
pub struct Position<'k>(pub U32<'k>);

/// The keys that a row may see: `start .. end`, and a second interval under some masks.
pub struct Visible<'k> {
    /// First visible key; `None` if all keys before `end` are visible.
    pub start: Option<U32<'k>>,
    /// One past the last visible key.
    pub end: U32<'k>,
    /// The second interval of visible keys, if the row has one.
    pub other: Option<VisibleKeys<U32<'k>>>,
    /// The words that say which of the new keys are visible. Only `Visible::bits` reads them.
    pub tree: Option<Box<TreeWords<'k>>>,
}

impl<'k> Visible<'k> {
    /// The visible keys, counted from key `first`. The numbers are signed.
    #[track_caller]
    pub fn from(self, first: U32<'k>) -> Visible<'k> {
        let other = self
            .other
            .map(|VisibleKeys { start, end }| VisibleKeys { start: start - first, end: end - first });
        let tree = self.tree.map(|tree| Box::new(TreeWords { first: tree.first - first, ..*tree }));
        Visible { start: self.start.map(|start| start - first), end: self.end - first, other, tree }
    }

    /// Bits that say which of the thread's columns the row sees, in a fragment of `cols` columns. Keys must be counted
    /// from the thread's first column.
    #[track_caller]
    pub(super) fn bits(&self, cols: u32) -> SeenBits<'k> {
        let words = (0..cols.div_ceil(COLS_OF_WORD)).map(|word| {
            let first = word * COLS_OF_WORD;
            let before = |key: U32<'k>| {
                // Number of the thread's columns of this word that come before the key: two of each eight columns.
                let key = (key - first).max_s32(0).min(COLS_OF_WORD);
                (key & 7).min(2) + ((key >> 3) << 1)
            };
            let from = |key: U32<'k>| key.constant(u32::MAX) << before(key);
            let of = |start, end| from(start) & (from(end) ^ u32::MAX);
            let start = self.start.unwrap_or(self.end.constant(0));
            let one = of(start, self.end);
            let bits = self.other.map_or(one, |other| one | of(other.start, other.end));
            self.tree.as_ref().map_or(bits, |tree| bits & tree.bits(first..cols.min(first + COLS_OF_WORD)))
        });
        SeenBits(words.collect())
    }

    /// `x`, or `hidden` if the row does not see key `key`.
    #[track_caller]
    pub fn hide(&self, x: V<'k, F32>, key: u32, hidden: f32) -> V<'k, F32> {
        let after = self.end.le_s32(key);
        let outside = self.start.map_or(after, |start| after | start.gt_s32(key));
        let outside = match &self.other {
            None => outside,
            Some(other) => outside & (other.end.le_s32(key) | other.start.gt_s32(key)),
        };
        outside.select(hidden, x)
    }
}

/// Number of fragment columns whose bits share a word. The thread has two of each eight columns.
const COLS_OF_WORD: u32 = 128;

/// Bits that say whether a row sees each of a thread's columns.
pub(super) struct SeenBits<'k>(Vec<U32<'k>>);

impl<'k> SeenBits<'k> {
    /// `x`, or `hidden` if the row does not see column `col`.
    #[track_caller]
    pub(super) fn hide(&self, x: V<'k, F32>, col: u32, hidden: f32) -> V<'k, F32> {
        let word = self.0[(col / COLS_OF_WORD) as usize];
        let bit = 2 * (col % COLS_OF_WORD / 8) + col % 2;
        (word & (1 << bit)).ne(0).select(x, hidden)
    }
}
