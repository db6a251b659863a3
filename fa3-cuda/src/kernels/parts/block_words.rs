//! The words that say which blocks of keys a block of rows sees. A kernel may have smaller blocks, which divide the
//! listed ones.

use fa3_ir::lang::*;

/// The most blocks of rows of a tile.
pub(super) const MOST_ROWS: usize = 3;

/// The words of a tile's blocks of rows. Bit i of word w is for block 32 · w + i of keys. A block is seen if it has a
/// bit in the words of some block of rows.
#[derive(Clone, Copy)]
pub(crate) struct BlockWords<'k> {
    pub(super) builder: &'k Builder,
    /// The addresses of the words of each block of rows, of which there are `rows`, and the number of its words.
    pub(super) addresses: [U64<'k>; MOST_ROWS],
    pub(super) rows: usize,
    pub(super) count: U32<'k>,
    /// The address of the words of a warpgroup's own block of rows, if the tile has several.
    pub(super) own: Option<U64<'k>>,
    /// Log2 of the number of a kernel's blocks in a listed block.
    pub(super) log2: u32,
    /// Whether all lanes of a warp read them. Otherwise one thread does.
    pub(super) in_warp: bool,
}

impl<'k> BlockWords<'k> {
    /// Like [`BlockWords::end_below`], for any `end`. Blocks behind the last word are not seen.
    #[track_caller]
    pub(crate) fn last_end(&self, end: U32<'k>, first: U32<'k>) -> U32<'k> {
        self.end_below(end.min(self.count << (5 + self.log2)), first)
    }

    /// One past the last block below `end` that is seen; `first` if no block from `first` on is. There are words up to
    /// `end`.
    #[track_caller]
    pub(crate) fn end_below(&self, end: U32<'k>, first: U32<'k>) -> U32<'k> {
        let b = self.builder;
        let at = b.var("seen_end", end);
        b.repeat(|| {
            let end = at.get();
            b.break_if(end.le(first));
            let last = self.listed_before(end);
            let [first, others @ ..] = &self.addresses[..self.rows] else { unreachable!("a tile has rows") };
            let word = self.word(*first, last);
            let word = others.iter().fold(word, |word, other| word | self.word(*other, last));
            // All lanes have the same word, and the shuffle tells the compiler so.
            let word = if self.in_warp { word.shfl_idx(0) } else { word };
            // The bits of blocks up to the last one, which has the highest bit.
            let bits = word << (last.constant(31) - (last & 31));
            let is_seen = bits.ne(0);
            let [seen, unseen] = match self.log2 {
                0 => [end - bits.clz(), last & !31],
                log2 => [((last + 1 - bits.clz()) << log2).min(end), (last & !31) << log2],
            };
            at.set(is_seen.select::<B32>(seen, unseen));
            b.break_if(is_seen);
        });
        at.get().max(first)
    }

    /// Whether a warpgroup has its own block of rows, because the tile has several.
    pub(crate) fn are_own(self) -> bool {
        self.own.is_some()
    }

    /// Whether the warpgroup's own rows see the block before block `end`, if the tile has several blocks of rows. All
    /// lanes of a warp must call this.
    #[track_caller]
    pub(crate) fn is_own(&self, end: U32<'k>) -> Option<V<'k, Pred>> {
        let (own, block) = (self.own?, self.listed_before(end));
        let word = self.word(own, block).shfl_idx(0);
        Some(((word >> (block & 31)) & 1).ne(0))
    }

    /// The listed block that has the block before block `end`.
    #[track_caller]
    fn listed_before(&self, end: U32<'k>) -> U32<'k> {
        if self.log2 == 0 { end - 1 } else { (end - 1) >> self.log2 }
    }

    /// The word at this address and behind it that has the bit of listed block `block`.
    #[track_caller]
    fn word(&self, address: U64<'k>, block: U32<'k>) -> U32<'k> {
        let [word] = self.builder.load_read_only((block >> 5).mad_wide(4, address));
        word
    }
}
