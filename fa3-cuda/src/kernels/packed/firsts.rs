//! The first row block of each sequence, in an array in which a search finds the sequence of any row block.

use fa3_ir::lang::*;

use super::ranking::{Rank, halves};

/// Shared memory for the first row block of each sequence, in the order of ranks, and for the end of all row blocks.
pub(super) struct Firsts<'k> {
    builder: &'k Builder,
    threads: u32,
    firsts: Region,
}

impl<'k> Firsts<'k> {
    /// Declares shared memory for `threads` sequences, a power of two.
    #[track_caller]
    pub(super) fn declare(b: &'k Builder, threads: u32) -> Firsts<'k> {
        Firsts { builder: b, threads, firsts: b.region("first blocks", 4 * (threads + 1), 16) }
    }

    /// Numbers the row blocks of all threads' sequences from `begin` on, in the order of ranks, and clamps the numbers
    /// to `capacity`. Gives the first number of this thread's sequence, and the end of all numbers.
    #[track_caller]
    pub(super) fn number(
        &self,
        Rank { rank, before }: Rank<'k>,
        blocks: U32<'k>,
        [begin, capacity]: [U32<'k>; 2],
    ) -> [U32<'k>; 2] {
        let (b, end) = (self.builder, self.firsts.at(4 * self.threads as i32));
        let first = begin + before;
        let own = first.min(capacity);
        b.store(rank.mad(4, b.address(self.firsts)), own);
        let after = first + blocks;
        b.guarded(rank.eq(self.threads - 1), || b.store(end, after));
        b.sync_cta();
        [own, b.load::<B32>(end).min(capacity)]
    }

    /// The rank of the sequence that has row block `block`.
    #[track_caller]
    pub(super) fn search(&self, block: U32<'k>) -> U32<'k> {
        let b = self.builder;
        let first = b.address(self.firsts);
        // The search finds the last sequence that does not begin behind the block. A sequence without blocks is never
        // the last one: it precedes the sequence that begins at the same block.
        let at = halves(self.threads).fold(first, |at, step| {
            let begins = b.load::<B32>(at.at(4 * step as i32));
            begins.le(block).select(at + 4 * step, at)
        });
        (at - first) >> 2
    }
}
