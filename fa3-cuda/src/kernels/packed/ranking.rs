//! The rank of each thread's sequence among the sequences of all threads, by a merge sort in shared memory.

use fa3_ir::lang::*;
use fa3_sched::FastDiv;

/// Length of the runs with which sorting begins. Keys of a run are ranked by comparing all pairs, without a barrier.
const fn first_run(threads: u32) -> u32 {
    if threads > 64 { 32 } else { threads }
}

/// Number of runs that are merged at once. Merging more runs at once takes fewer barriers but more loads, and a large
/// CTA has enough loads.
const fn fan_in(threads: u32) -> u32 {
    if threads > 256 { 4 } else { 8 }
}

/// The word that holds the key at a place of sorted runs. One word of each 33 stays free, so that keys a power of two
/// apart, which a binary search compares, are in different banks. The words of two places are `padded(distance)` apart,
/// if one place is a multiple of 32, or if no multiple of 32 lies between them.
const fn padded(place: u32) -> u32 {
    place + place / 32
}

/// The halves of a power of two, in turn: `whole` / 2, `whole` / 4, and so on down to 1.
pub(super) fn halves(whole: u32) -> impl Iterator<Item = u32> {
    std::iter::successors(Some(whole / 2), |half| Some(half / 2)).take_while(|&half| half > 0)
}

/// Shared memory for two orders of keys and row blocks: while some threads still read one order, others write the next.
pub(super) struct Ranking<'k> {
    builder: &'k Builder,
    threads: u32,
    orders: [Order; 2],
}

/// Sorted keys, and the sum of row blocks up to each key.
#[derive(Clone, Copy)]
struct Order {
    keys: Region,
    sums: Region,
}

/// The rank of a key among other keys.
#[derive(Clone, Copy)]
pub(super) struct Rank<'k> {
    /// Number of larger keys.
    pub(super) rank: U32<'k>,
    /// Number of row blocks of the larger keys.
    pub(super) before: U32<'k>,
}

impl<'k> Rank<'k> {
    #[track_caller]
    fn and(self, other: Rank<'k>) -> Rank<'k> {
        Rank { rank: self.rank + other.rank, before: self.before + other.before }
    }
}

impl<'k> Ranking<'k> {
    /// Declares shared memory for the ranks of `threads` keys, a power of two.
    #[track_caller]
    pub(super) fn declare(b: &'k Builder, threads: u32) -> Ranking<'k> {
        let order = |keys: &str, sums: &str| Order {
            keys: b.region(keys, 4 * padded(threads), 16),
            sums: b.region(sums, 4 * threads, 16),
        };
        Ranking { builder: b, threads, orders: [order("keys", "sums"), order("next keys", "next sums")] }
    }

    /// The rank of this thread's key among the keys of all threads. No two keys are equal. The key has `blocks` row
    /// blocks.
    ///
    /// Runs of keys are sorted, then merged: a key's rank is its rank in its own run, plus its rank in each other run.
    #[track_caller]
    pub(super) fn of(&self, key: U32<'k>, blocks: U32<'k>) -> Rank<'k> {
        let b = self.builder;
        let mut run = first_run(self.threads);
        let mut start = b.tid() & !(run - 1);
        let mut place = self.in_first_run(key, blocks, start, run);
        let mut orders = self.orders.into_iter().cycle().skip(1);
        while run < self.threads {
            let order = orders.next().expect("orders take turns");
            let runs = fan_in(self.threads).min(self.threads / run);
            let at = start + place.rank;
            b.store((at + (at >> 5)).mad(4, b.address(order.keys)), key);
            b.store(at.mad(4, b.address(order.sums)), place.before + blocks);
            b.sync_cta();
            // The other runs that are merged with the run of this thread's key.
            let others: Vec<_> = (1..runs).map(|other| start ^ (other * run)).collect();
            place = self.in_sorted(order, key, &others, run).into_iter().fold(place, Rank::and);
            run *= runs;
            start = start & !(run - 1);
        }
        place
    }

    /// The rank of `key` among the keys of the `run` threads from `start` on.
    #[track_caller]
    fn in_first_run(&self, key: U32<'k>, blocks: U32<'k>, start: U32<'k>, run: u32) -> Rank<'k> {
        let b = self.builder;
        let Order { keys, sums } = self.orders[0];
        b.store(b.tid().mad(4, b.address(keys)), key);
        b.store(b.tid().mad(4, b.address(sums)), blocks);
        b.sync_cta();
        let [keys, blocks] = [keys, sums].map(|region| start.mad(4, b.address(region)));
        let mut place = Rank { rank: b.value(0), before: b.value(0) };
        for first in (0..run).step_by(4) {
            let [keys, blocks] =
                [keys, blocks].map(|array| b.load_vector::<B32, 4>(array.at(4 * first as i32)));
            for (other, blocks) in keys.into_iter().zip(blocks) {
                let is_larger = other.gt(key);
                let with = place.and(Rank { rank: b.value(1), before: blocks });
                place.rank = is_larger.select(with.rank, place.rank);
                place.before = is_larger.select(with.before, place.before);
            }
        }
        place
    }

    /// The ranks of `key` in several runs, which begin at the places `starts`. A run has `run` keys, the largest first.
    #[track_caller]
    fn in_sorted(&self, order: Order, key: U32<'k>, starts: &[U32<'k>], run: u32) -> Vec<Rank<'k>> {
        let b = self.builder;
        let is_larger = |at: SharedAddr| b.load::<B32>(at).gt(key);
        let address = |&start: &U32<'k>| (start + (start >> 5)).mad(4, b.address(order.keys));
        let firsts: Vec<_> = starts.iter().map(address).collect();
        // All keys before an end are known to be larger. The searches of the runs do not wait for each other.
        let mut ends = firsts.clone();
        for step in halves(run) {
            let last = |end: &U32<'k>| is_larger(end.at(4 * padded(step - 1) as i32));
            let are_larger: Vec<_> = ends.iter().map(last).collect();
            for (end, are_larger) in ends.iter_mut().zip(are_larger) {
                *end = are_larger.select(*end + 4 * padded(step), *end);
            }
        }
        let ranks = firsts.into_iter().zip(ends).map(|(first, end)| {
            let of_33 = FastDiv::new(33).map(|number| b.value(number));
            let words = (end - first) >> 2;
            words - of_33.quotient(words) + is_larger(end.at(0)).select::<B32>(1, 0)
        });
        let ranks: Vec<_> = ranks.collect();
        let places = starts.iter().zip(ranks).map(|(&start, rank)| {
            // The sum of row blocks up to the last larger key; 0 if no key is larger.
            let last = (start + rank.max(1)).mad(4, b.address(order.sums));
            let sum = b.load::<B32>(last.at(-4));
            Rank { rank, before: rank.gt(0).select::<B32>(sum, 0) }
        });
        places.collect()
    }
}
