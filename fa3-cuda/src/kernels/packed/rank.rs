//! The place of each thread's key among those of all threads.

use fa3_ir::lang::*;

/// Keys that are ranked by comparing each with each. More would take longer than a search in sorted runs.
const RUN: u32 = 64;

/// Runs that are merged at once. With more of them there are fewer barriers and more searches.
const FAN_IN: u32 = 4;

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
        let keys = ["keys", "next keys"].map(|name| b.region(name, 4 * threads, 16));
        Rank { builder: b, threads, keys }
    }

    /// How many threads have a larger key. No two keys are equal.
    ///
    /// Runs of keys are sorted, then merged: a key's place is its place in its own run, and how many larger ones other
    /// runs have.
    #[track_caller]
    pub(super) fn of(&self, key: V<'k, B32>) -> V<'k, B32> {
        let b = self.builder;
        let mut run = RUN.min(self.threads);
        let start = b.tid() & !(run - 1);
        self.store(self.keys[0], b.tid(), key);
        let mut place = start + self.larger_in_unsorted(key, start, run);
        let mut regions = self.keys.into_iter().cycle().skip(1);
        while run < self.threads {
            let keys = regions.next().expect("regions take turns");
            let runs = FAN_IN.min(self.threads / run);
            self.store(keys, place, key);
            // The own run is number `own` of those that become one.
            let merged = place & !(runs * run - 1);
            let own = place & ((runs - 1) * run);
            let in_run = place & (run - 1);
            let larger =
                (1..runs).map(|other| self.larger_in_sorted(keys, key, merged + (own ^ (other * run)), run));
            place = merged + larger.fold(in_run, |sum, larger| sum + larger);
            run *= runs;
        }
        place
    }

    /// Stores every thread's key at a place of its own.
    #[track_caller]
    fn store(&self, keys: Region, place: V<'k, B32>, key: V<'k, B32>) {
        let b = self.builder;
        b.store(place.mad(4, b.address(keys)), key);
        b.sync_cta();
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

    /// How many of `run` sorted keys from place `start` on, the largest first, are larger.
    #[track_caller]
    fn larger_in_sorted(&self, keys: Region, key: V<'k, B32>, start: V<'k, B32>, run: u32) -> V<'k, B32> {
        let b = self.builder;
        let first = start.mad(4, b.address(keys));
        let halves = std::iter::successors(Some(run / 2), |half| Some(half / 2)).take_while(|&half| half > 0);
        // The first `at - first` are larger. The last comparison is with the only one that is left.
        let at = halves.chain([1]).fold(first, |at, step| {
            let other = b.load::<B32>(at.at(4 * (step as i32 - 1)));
            other.gt(key).select(at + 4 * step, at)
        });
        (at - first) >> 2
    }
}
