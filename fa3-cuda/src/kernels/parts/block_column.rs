//! The blocks of rows that see a block of keys, where bits say which blocks of keys a block of rows sees. A kernel may
//! have smaller blocks of rows, which divide the listed ones.

use fa3_ir::lang::*;

/// The bit of a block of keys in the words of each block of rows of a head. A lane reads the bit of each 32nd block.
#[derive(Clone, Copy)]
pub(crate) struct BlockColumn<'k> {
    pub(super) builder: &'k Builder,
    /// The address of the first block's word with this bit.
    pub(super) address: U64<'k>,
    /// Bytes from a block's words to the next block's.
    pub(super) bytes: U32<'k>,
    /// The number of the bit in its word.
    pub(super) bit: U32<'k>,
    /// Log2 of the number of a kernel's blocks in a listed block.
    pub(super) log2: u32,
}

impl<'k> BlockColumn<'k> {
    /// The first block from `first` on, and below `end`, that sees the keys; a number of at least `end` if none does.
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
            let bits = ((word >> self.bit) & 1).ne(0).ballot();
            // The number of zeros below the lowest one, or 32. All lanes have it: the shuffle tells the compiler.
            let before = ((bits - 1) & (bits ^ u32::MAX)).popc().shfl_idx(0);
            at.set(((listed + before) << log2).max(first));
            b.break_if(before.lt(32));
        });
        at.get()
    }

    /// Runs `body` for every block of a range that sees the keys, in ascending order.
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
