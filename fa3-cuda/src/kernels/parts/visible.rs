//! The keys that a query row may see.

use std::ops::Range;

use fa3_ir::lang::*;
use fa3_sched::VisibleKeys;

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

/// The words of a row that say which new keys it sees. It sees all keys before the new ones, and no key that has no
/// bit.
#[derive(Clone, Copy)]
pub struct TreeWords<'k> {
    pub(super) builder: &'k Builder,
    /// The address of the row's words, and their number.
    pub(super) address: U64<'k>,
    pub(super) count: U32<'k>,
    /// The key of the first bit. The number is signed.
    pub(super) first: U32<'k>,
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

impl<'k> TreeWords<'k> {
    /// Bits that say which of the thread's columns `cols` the row sees, as [`Visible::bits`] has them. Keys must be
    /// counted from the thread's first column.
    #[track_caller]
    fn bits(&self, cols: Range<u32>) -> U32<'k> {
        let bit = self.first.constant(cols.start) - self.first;
        let (word, shift) = (bit.shr_s32(5), bit & 31);
        let words = (0..=cols.len().div_ceil(32)).map(|at| self.word(word + at as u32)).collect::<Vec<_>>();
        let back = shift.constant(32) - shift;
        let parts = words.windows(2).zip([0, 8, 16, 24]).map(|(pair, place)| {
            let of_thread = ((pair[0] >> shift) | (pair[1] << back)) & 0x0303_0303;
            let pairs = of_thread | (of_thread >> 6) | (of_thread >> 12) | (of_thread >> 18);
            (pairs & 0xff) << place
        });
        parts.reduce(|one, other| one | other).expect("there are columns")
    }

    /// Word `index`, which may be negative or beyond the last word.
    #[track_caller]
    fn word(&self, index: U32<'k>) -> U32<'k> {
        let inside = index.max_s32(0).min(self.count - 1);
        let [word] = self.builder.load_read_only(inside.mad_wide(4, self.address));
        let word = index.ge_s32(self.count).select::<B32>(0, word);
        index.lt_s32(0).select(u32::MAX, word)
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
