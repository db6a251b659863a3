//! The first row block of each sequence, in the order of their ranks.

use fa3_ir::lang::*;

use super::rank::halves;

/// Shared memory for sums over a CTA's threads.
pub(super) struct Prefix<'k> {
    builder: &'k Builder,
    threads: u32,
    /// Row blocks of the sequence of each rank.
    blocks: Region,
    /// Their sums, of each warp.
    sums: Region,
    /// The first row block of the sequence of each rank.
    firsts: Region,
}

/// The place of a thread's row blocks among those of all threads.
pub(super) struct Placed<'k> {
    /// The number of the first one.
    pub(super) first: V<'k, B32>,
    /// One past the last one of the last thread.
    pub(super) end: V<'k, B32>,
}

impl<'k> Prefix<'k> {
    /// Declares what sums over `threads` threads take, a power of two.
    #[track_caller]
    pub(super) fn declare(b: &'k Builder, threads: u32) -> Prefix<'k> {
        let [blocks, firsts] = ["blocks", "first blocks"].map(|name| b.region(name, 4 * threads, 16));
        Prefix { builder: b, threads, blocks, sums: b.region("sums", threads / 8, 16), firsts }
    }

    /// The place of this thread's `blocks` among those of all threads in the order of their ranks, of which the first
    /// is number `begin`. No number is above `capacity`.
    #[track_caller]
    pub(super) fn of(
        &self,
        rank: V<'k, B32>,
        blocks: V<'k, B32>,
        begin: V<'k, B32>,
        capacity: V<'k, B32>,
    ) -> Placed<'k> {
        let (b, warps) = (self.builder, self.threads / 32);
        self.store(self.blocks, rank, blocks.min(capacity));
        let (thread, lane, warp) = (b.tid(), b.lane_id(), b.tid() >> 5);
        let own = self.load(self.blocks, thread);
        let sum = self.scan(own, 32);
        let of_warp = warp.mad(4, b.address(self.sums));
        b.guarded(lane.eq(31), || b.store(of_warp, sum));
        b.sync_cta();
        let of_warp = self.load(self.sums, lane.min(warps - 1));
        let of_warps = self.scan(of_warp, warps);
        let before = (of_warps - of_warp).shfl_idx(warp);
        let all = of_warps.shfl_idx(warps - 1);
        self.store(self.firsts, thread, (begin + before + (sum - own)).min(capacity));
        Placed { first: self.load(self.firsts, rank), end: (begin + all).min(capacity) }
    }

    /// The rank of the sequence that has row block `block`.
    #[track_caller]
    pub(super) fn search(&self, block: V<'k, B32>) -> V<'k, B32> {
        let b = self.builder;
        let first = b.address(self.firsts);
        // The last one whose first block is not above. Sequences without blocks come before those that begin with them.
        let at = halves(self.threads).fold(first, |at, step| {
            let begins = b.load::<B32>(at.at(4 * step as i32));
            begins.le(block).select(at + 4 * step, at)
        });
        (at - first) >> 2
    }

    /// The sums of the numbers of this lane and those below it, in the first `lanes` lanes.
    #[track_caller]
    fn scan(&self, number: V<'k, B32>, lanes: u32) -> V<'k, B32> {
        let lane = self.builder.lane_id();
        let steps = std::iter::successors(Some(1), |step| Some(step * 2)).take_while(|&step| step < lanes);
        steps.fold(number, |sum, step| sum + lane.ge(step).select::<B32>(sum.shfl_up(step), 0))
    }

    #[track_caller]
    fn load(&self, array: Region, index: V<'k, B32>) -> V<'k, B32> {
        let b = self.builder;
        b.load(index.mad(4, b.address(array)))
    }

    /// Stores a number of each thread.
    #[track_caller]
    fn store(&self, array: Region, index: V<'k, B32>, number: V<'k, B32>) {
        let b = self.builder;
        b.store(index.mad(4, b.address(array)), number);
        b.sync_cta();
    }
}
