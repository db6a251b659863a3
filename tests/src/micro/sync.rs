//! mbarriers, named barriers, clusters, the register pool.

use fa3_ir::{B32, Builder, FenceInst, Launch, LoadOptions, Role, V};

use super::bench::Bench;
use super::values::{Stream, words};
use super::{Micro, Rule};

pub(super) fn tests() -> Vec<Micro> {
    vec![parity(), bytes_before_arrivals(), remote_arrive(), named_barriers(), registers(), specials()]
}

/// One thread asks for both parities after each step of an mbarrier's life: two phases of two arrivals.
fn parity() -> Micro {
    let mut bench = Bench::new("parity", Launch::threads(32));
    let mbar = bench.b.mbarriers("mbar", 1, 2);
    let results = bench.output(4 * 2 * 6);
    let first = bench.first();
    bench.b.if_lanes(first, |b| {
        b.mbarrier_init(mbar, 2);
        for step in 0..6 {
            for parity in [0, 1] {
                let complete = b.mbarrier_test_wait(mbar, parity);
                let complete = b.select(complete, 1, 0);
                b.store(results.at(4 * (2 * step + parity)), complete);
            }
            b.mbarrier_arrive(mbar);
        }
    });
    bench.finish(Rule::Bits)
}

/// A copy's bytes are counted before anyone has said that they are expected, and the phase stays open.
fn bytes_before_arrivals() -> Micro {
    let mut bench = Bench::new("bytes before arrivals", Launch::threads(32));
    let (mbar, other) = (bench.b.mbarriers("mbar", 1, 1), bench.b.mbarriers("other", 1, 1));
    let (tile, small) = (bench.b.region("tile", 1024, 16), bench.b.region("small", 16, 16));
    let from = bench.input(Stream::new("bytes before arrivals").bytes(1024));
    let flags = bench.output(8);
    let first = bench.first();
    bench.b.if_lanes(first, |b| {
        b.mbarrier_init(mbar, 1);
        b.mbarrier_init(other, 1);
        b.fence(FenceInst::MbarrierInit);
        b.bulk_load(tile, from, 1024, mbar, LoadOptions::default());
        // By the time that another copy is complete, this one probably is.
        b.mbarrier_arrive_expect(other, 16);
        b.bulk_load(small, from, 16, other, LoadOptions::default());
        b.mbarrier_wait(other, 0);
        let complete = b.mbarrier_test_wait(mbar, 0);
        let complete = b.select(complete, 1, 0);
        b.store(flags, complete);
        b.mbarrier_expect(mbar, 1024);
        let complete = b.mbarrier_test_wait(mbar, 0);
        let complete = b.select(complete, 1, 0);
        b.store(flags.at(4), complete);
        b.mbarrier_arrive(mbar);
        b.mbarrier_wait(mbar, 0);
    });
    bench.b.sync_cta();
    bench.b.mbarrier_wait(mbar, 0);
    let results = bench.output(1024);
    bench.dump(tile, results, 1024);
    bench.finish(Rule::Bits)
}

/// Every CTA of a cluster waits for an arrival from the next one.
fn remote_arrive() -> Micro {
    let mut bench = Bench::new("remote arrive", Launch::threads(32).cluster(4));
    let mbar = bench.b.mbarriers("mbar", 1, 1);
    let results = bench.output(4 * 4);
    let first = bench.first();
    bench.b.if_lanes(first, |b| {
        b.mbarrier_init(mbar, 1);
        b.fence(FenceInst::MbarrierInit);
    });
    bench.b.cluster_arrive();
    bench.b.cluster_wait();
    bench.b.if_lanes(first, |b| {
        let (rank, size) = (b.cluster_cta_rank(), b.cluster_size());
        let next = b.add(rank, 1);
        let next = b.and(next, 3);
        let remote = b.map_address(mbar, next);
        b.mbarrier_arrive_remote(remote);
        b.mbarrier_wait(mbar, 0);
        let at = b.mad_wide_u32(rank, 4, results);
        let place = b.cluster_cta_x();
        let word = b.mad_u32(place, 16, size);
        b.store(at, word);
    });
    bench.b.cluster_arrive();
    bench.b.cluster_wait();
    bench.finish(Rule::Bits)
}

/// Two warps hand a word to each other through shared memory, by named barriers: sync and arrive.
fn named_barriers() -> Micro {
    let mut bench = Bench::new("named barriers", Launch::threads(64));
    let region = bench.b.region("words", 128, 16);
    let (full, empty) = (bench.b.barrier("full", 64), bench.b.barrier("empty", 64));
    let results = bench.output(4 * 128);
    let (b, tid) = (&mut bench.b, bench.tid);
    let start = b.address(region);
    let lane = b.and(tid, 31);
    let at = b.mad_u32(lane, 4, start);
    let to = b.mad_wide_u32(lane, 4, results);
    b.role(Role::new("writer", 0..1), |b| {
        for round in 0..4u32 {
            if round > 0 {
                b.sync(empty);
            }
            let word = b.mad_u32(lane, 3, round);
            b.store(at, word);
            b.arrive(full);
        }
    });
    b.role(Role::new("reader", 1..2), |b| {
        for round in 0..4 {
            b.sync(full);
            let word = b.load::<B32>(at);
            b.store(to.at(128 * round), word);
            if round < 3 {
                b.arrive(empty);
            }
        }
    });
    bench.finish(Rule::Bits)
}

/// Three warpgroups: one gives registers away, two take as many as that allows and use them.
fn registers() -> Micro {
    let mut bench = Bench::new("registers", Launch::threads(384));
    let from = bench.input(words((0..256).map(|index| index * 0x0101_0101)));
    let results = bench.output(4 * 384);
    let (b, tid) = (&mut bench.b, bench.tid);
    let to = b.mad_wide_u32(tid, 4, results);
    b.role(Role::new("giver", 0..4).registers(24), |b| b.store(to, tid));
    b.role(Role::new("takers", 4..12).registers(240), |b| {
        // All of them are alive before the first is used.
        let loaded: Vec<V<B32>> = (0..128).map(|index| b.load::<B32>(from.at(4 * index))).collect();
        let sum = loaded.into_iter().fold(tid, |sum, word| weigh(b, sum, word));
        b.store(to, sum);
    });
    bench.finish(Rule::Bits)
}

fn weigh(b: &mut Builder, sum: V<B32>, word: V<B32>) -> V<B32> {
    b.mad_u32(sum, 31, word)
}

/// What a thread knows of its place.
fn specials() -> Micro {
    let mut bench = Bench::new("specials", Launch::threads(64)).grid(3);
    let results = bench.output(3 * 64 * 16);
    let (b, tid) = (&mut bench.b, bench.tid);
    let (cta, grid, lane) = (b.cta_x(), b.grid_x(), b.lane_id());
    let index = b.mad_u32(cta, 64, tid);
    let at = b.mad_wide_u32(index, 16, results);
    let (y, z) = (b.cta_y(), b.grid_z());
    let word = b.mad_u32(y, 16, z);
    b.store_vector(at, [grid, lane, cta, word]);
    bench.finish(Rule::Bits)
}
