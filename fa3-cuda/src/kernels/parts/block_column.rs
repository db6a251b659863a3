//! The blocks of rows that see a tile of keys, where bits say which blocks of keys a block of rows sees. A kernel may
//! have smaller blocks of rows, which divide the listed ones. A tile of keys may have several listed blocks.

use fa3_ir::lang::*;

/// The bits of a tile of keys in the words of each block of rows of a head. A lane reads the bits of each 32nd block.
#[derive(Clone, Copy)]
pub(crate) struct BlockColumn<'k> {
    pub(super) builder: &'k Builder,
    /// The address of the first block's word with these bits.
    pub(super) address: U64<'k>,
    /// Bytes from a block's words to the next block's.
    pub(super) bytes: U32<'k>,
    /// The number of the first bit in its word, and the number of bits: one for each block of keys of the tile.
    pub(super) bit: U32<'k>,
    pub(super) bits: u32,
    /// Log2 of the number of a kernel's blocks in a listed block.
    pub(super) log2: u32,
}

impl<'k> BlockColumn<'k> {
    /// The first block from `first` on, and below `end`, that sees some keys; a number of at least `end` if none does.
    /// All lanes of a warp must call this.
    #[track_caller]
    pub(crate) fn first_from(&self, first: U32<'k>, end: U32<'k>) -> U32<'k> {
        let (b, log2) = (self.builder, self.log2);
        let at = b.var("seen", first);
        b.repeat(|| {
            let first = at.get();
            b.break_if(first.ge(end));
            let [listed, last] = [first, end - 1].map(|block| block >> log2);
            let row = (listed + b.lane_id()).min(last);
            let [word]: [U32<'k>; 1] = b.load_read_only(row.mad_wide(self.bytes, self.address));
            let bits = self.bits_of(word).ne(0).ballot();
            // The number of zeros below the lowest one, or 32. All lanes have it: the shuffle tells the compiler.
            let before = ((bits - 1) & (bits ^ u32::MAX)).popc().shfl_idx(0);
            at.set(((listed + before) << log2).max(first));
            b.break_if(before.lt(32));
        });
        at.get()
    }

    /// The bits of the tile's blocks of keys, if it has several: which of them block `block` sees. All lanes of a warp
    /// must call this.
    #[track_caller]
    pub(crate) fn each(&self, block: U32<'k>) -> Option<U32<'k>> {
        (self.bits > 1).then(|| {
            let row = if self.log2 == 0 { block } else { block >> self.log2 };
            let [word]: [U32<'k>; 1] = self.builder.load_read_only(row.mad_wide(self.bytes, self.address));
            self.bits_of(word.shfl_idx(0))
        })
    }

    /// The bits of the tile in its word.
    #[track_caller]
    fn bits_of(&self, word: U32<'k>) -> U32<'k> {
        (word >> self.bit) & ((1 << self.bits) - 1)
    }

    /// Runs `body` for every block of a range that sees some keys, in ascending order.
    #[track_caller]
    pub(crate) fn for_each(&self, (first, end): (U32<'k>, U32<'k>), body: impl FnOnce(U32<'k>)) {
        let b = self.builder;
        let next = b.var("block", first);
        b.repeat(|| {
            let block = self.first_from(next.get(), end);
            b.break_if(block.ge(end));
            next.set(block + 1);
            body(block);
        });
    }
}
