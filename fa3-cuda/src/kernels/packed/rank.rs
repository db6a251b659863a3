//! The place of each thread's key among those of all threads.

use fa3_ir::lang::*;
use fa3_sched::FastDiv;

/// Keys that are ranked by comparing each with each. More would take longer than a search in sorted runs.
const RUN: u32 = 64;

/// Runs that are merged at once. With more of them there are fewer barriers and more loads, of which a large CTA has
/// enough.
const fn fan_in(threads: u32) -> u32 {
    if threads > 512 { 2 } else { 4 }
}

/// The word in which the key at a place of sorted runs lies. One of 33 words stays free, so that the keys with which a
/// binary search compares, a power of two apart, are in different banks. The words of two places are as far apart as
/// those of 0 and their distance, if one place is a multiple of 32, or no multiple of 32 is between them.
const fn padded(place: u32) -> u32 {
    place + place / 32
}

/// Shared memory for keys, twice: while some threads still read one order, others write the next.
pub(super) struct Rank<'k> {
    builder: &'k Builder,
    threads: u32,
    keys: [Region; 2],
}

impl<'k> Rank<'k> {
    /// Declares what ranks of `threads` keys take, a power of two.
    #[track_caller]
    pub(super) fn declare(b: &'k Builder, threads: u32) -> Rank<'k> {
        let keys = ["keys", "next keys"].map(|name| b.region(name, 4 * padded(threads), 16));
        Rank { builder: b, threads, keys }
    }

    /// How many threads have a larger key. No two keys are equal, and all are below 2³¹.
    ///
    /// Runs of keys are sorted, then merged: a key's place is its place in its own run, and how many larger ones other
    /// runs have.
    #[track_caller]
    pub(super) fn of(&self, key: V<'k, B32>) -> V<'k, B32> {
        let b = self.builder;
        let mut run = RUN.min(self.threads);
        let start = b.tid() & !(run - 1);
        b.store(b.tid().mad(4, b.address(self.keys[0])), key);
        b.sync_cta();
        let mut place = start + self.larger_in_unsorted(key, start, run);
        let mut regions = self.keys.into_iter().cycle().skip(1);
        while run < self.threads {
            let keys = b.address(regions.next().expect("regions take turns"));
            let runs = fan_in(self.threads).min(self.threads / run);
            b.store((place + (place >> 5)).mad(4, keys), key);
            b.sync_cta();
            // The own run is number `own / run` of those that become one.
            let merged = place & !(runs * run - 1);
            let own = place & ((runs - 1) * run);
            let in_run = place & (run - 1);
            let larger = (1..runs).map(|other| {
                let start = merged + (own ^ (other * run));
                self.larger_in_sorted(key, (start + (start >> 5)).mad(4, keys), run)
            });
            place = merged + larger.fold(in_run, |sum, larger| sum + larger);
            run *= runs;
        }
        place
    }

    /// How many of `run` keys from place `start` on are larger.
    #[track_caller]
    fn larger_in_unsorted(&self, key: V<'k, B32>, start: V<'k, B32>, run: u32) -> V<'k, B32> {
        let b = self.builder;
        let at = start.mad(4, b.address(self.keys[0]));
        // Two sums do not wait for each other.
        let mut sums = [b.value(0); 2];
        for first in (0..run).step_by(4) {
            let others = b.load_vector::<B32, 4>(at.at(4 * first as i32));
            // The sign of a difference of two keys below 2³¹.
            let larger = others.map(|other| (key - other) >> 31);
            (0..4).for_each(|index| sums[index % 2] = sums[index % 2] + larger[index]);
        }
        sums[0] + sums[1]
    }

    /// How many of `run` sorted keys, the largest of which is at address `first`, are larger.
    #[track_caller]
    fn larger_in_sorted(&self, key: V<'k, B32>, first: V<'k, B32>, run: u32) -> V<'k, B32> {
        let b = self.builder;
        let is_larger = |at: SharedAddr| b.load::<B32>(at).gt(key);
        // Those before `at` are larger, by as many as are in question.
        let at = halves(run).fold(first, |at, step| {
            let last = at.at(4 * padded(step - 1) as i32);
            is_larger(last).select(at + 4 * padded(step), at)
        });
        let of_33 = FastDiv::new(33).map(|number| b.value(number));
        let words = (at - first) >> 2;
        let last = is_larger(at.at(0)).select::<B32>(1, 0);
        words - of_33.quotient(words) + last
    }
}

/// Half of a power of two, half of that, down to 1.
pub(super) fn halves(whole: u32) -> impl Iterator<Item = u32> {
    std::iter::successors(Some(whole / 2), |half| Some(half / 2)).take_while(|&half| half > 0)
}
