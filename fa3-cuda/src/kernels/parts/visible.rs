//! The keys that a query row may see.

use fa3_ir::lang::*;
use fa3_sched::VisibleKeys;

/// The position of a query row in its sequence. The number of a row in a tile of several query heads is none: see
/// `PackedRow` of the forward pass.
#[derive(Clone, Copy)]
pub struct Position<'k>(pub V<'k, B32>);

/// The keys that a row may see, `start .. end`; a mask without a left side has no start.
pub struct Visible<'k> {
    /// The first of them; all before `end` if there is none.
    pub start: Option<V<'k, B32>>,
    /// One past the last of them.
    pub end: V<'k, B32>,
    /// Others that it may see, too, if it has a second interval.
    pub other: Option<VisibleKeys<V<'k, B32>>>,
}

impl<'k> Visible<'k> {
    /// The same, counted from key `first`: signed numbers.
    #[track_caller]
    pub fn from(self, first: V<'k, B32>) -> Visible<'k> {
        let other = self
            .other
            .map(|VisibleKeys { start, end }| VisibleKeys { start: start - first, end: end - first });
        Visible { start: self.start.map(|start| start - first), end: self.end - first, other }
    }

    /// The thread's columns that the row sees, of so many columns of a fragment. Keys are counted from the thread's
    /// first column.
    #[track_caller]
    pub(super) fn bits(&self, cols: u32) -> SeenBits<'k> {
        let words = (0..cols.div_ceil(COLS_OF_WORD)).map(|word| {
            let first = word * COLS_OF_WORD;
            let before = |key: V<'k, B32>| {
                // How many of the word's columns come before the key: two of each eight.
                let key = (key - first).max_s32(0).min(COLS_OF_WORD);
                (key & 7).min(2) + ((key >> 3) << 1)
            };
            let from = |key: V<'k, B32>| key.constant(u32::MAX) << before(key);
            let of = |start, end| from(start) & (from(end) ^ u32::MAX);
            let start = self.start.unwrap_or(self.end.constant(0));
            let one = of(start, self.end);
            self.other.map_or(one, |other| one | of(other.start, other.end))
        });
        SeenBits(words.collect())
    }

    /// `hidden` in place of what a key has that the row does not see.
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

/// Columns whose bits are in one word: of each eight a thread has two.
const COLS_OF_WORD: u32 = 128;

/// A bit for each of a thread's columns: whether a row sees it.
pub(super) struct SeenBits<'k>(Vec<V<'k, B32>>);

impl<'k> SeenBits<'k> {
    /// `hidden` in place of what a column has that the row does not see.
    #[track_caller]
    pub(super) fn hide(&self, x: V<'k, F32>, col: u32, hidden: f32) -> V<'k, F32> {
        let word = self.0[(col / COLS_OF_WORD) as usize];
        let bit = 2 * (col % COLS_OF_WORD / 8) + col % 2;
        (word & (1 << bit)).ne(0).select(x, hidden)
    }
}
