//! The words by which a row says which new keys it sees.

use std::ops::Range;

use fa3_ir::lang::*;

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

impl<'k> TreeWords<'k> {
    /// Bits that say which of the thread's columns `cols` the row sees: two of each eight columns, one after another.
    /// Keys must be counted from the thread's first column.
    #[track_caller]
    pub(super) fn bits(&self, cols: Range<u32>) -> U32<'k> {
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
