//! Tests of mbarriers, named barriers, clusters and the register pool.

use fa3_ir::lang::{B32, V};
use fa3_ir::{FenceInst, Launch, LoadOptions, Role};

use super::bench::micro;
use super::values::{Stream, words};
use super::{Micro, Rule};

pub(super) fn tests() -> Vec<Micro> {
    vec![parity(), bytes_before_arrivals(), remote_arrive(), named_barriers(), registers(), specials()]
}

/// Tests both parities after each step of two phases of an mbarrier, each of two arrivals.
fn parity() -> Micro {
    micro("parity", Launch::threads(32), Rule::Bits, |bench| {
        let b = bench.b;
        let mbar = b.mbarriers("mbar", 1, 2);
        let results = bench.output(4 * 2 * 6);
        b.if_lanes(bench.first(), || {
            b.mbarrier_init(mbar, 2);
            for step in 0..6 {
                for parity in [0, 1] {
                    let complete = b.mbarrier_test_wait(mbar, parity);
                    b.store::<B32>(results.at(4 * (2 * step + parity)), complete.select(1, 0));
                }
                b.mbarrier_arrive(mbar);
            }
        });
    })
}

/// A copy delivers bytes before an arrival expects them. The mbarrier's phase must stay open.
fn bytes_before_arrivals() -> Micro {
    micro("bytes before arrivals", Launch::threads(32), Rule::Bits, |bench| {
        let b = bench.b;
        let (mbar, other) = (b.mbarriers("mbar", 1, 1), b.mbarriers("other", 1, 1));
        let (tile, small) = (b.region("tile", 1024, 16), b.region("small", 16, 16));
        let from = bench.input(Stream::new("bytes before arrivals").bytes(1024));
        let flags = bench.output(8);
        b.if_lanes(bench.first(), || {
            b.mbarrier_init(mbar, 1);
            b.mbarrier_init(other, 1);
            b.fence(FenceInst::MbarrierInit);
            b.bulk_load(tile, from, 1024, mbar, LoadOptions::default());
            // When the other copy is complete, this copy is probably complete, too.
            b.mbarrier_arrive_expect(other, 16);
            b.bulk_load(small, from, 16, other, LoadOptions::default());
            b.mbarrier_wait(other, 0);
            let complete = b.mbarrier_test_wait(mbar, 0);
            b.store::<B32>(flags, complete.select(1, 0));
            b.mbarrier_expect(mbar, 1024);
            let complete = b.mbarrier_test_wait(mbar, 0);
            b.store::<B32>(flags.at(4), complete.select(1, 0));
            b.mbarrier_arrive(mbar);
            b.mbarrier_wait(mbar, 0);
        });
        b.sync_cta();
        b.mbarrier_wait(mbar, 0);
        let results = bench.output(1024);
        bench.dump(tile, results, 1024);
    })
}

/// Every CTA of a cluster waits for an arrival from the next CTA.
fn remote_arrive() -> Micro {
    micro("remote arrive", Launch::threads(32).cluster(4), Rule::Bits, |bench| {
        let b = bench.b;
        let mbar = b.mbarriers("mbar", 1, 1);
        let results = bench.output(4 * 4);
        let first = bench.first();
        b.if_lanes(first, || {
            b.mbarrier_init(mbar, 1);
            b.fence(FenceInst::MbarrierInit);
        });
        b.cluster_sync();
        b.if_lanes(first, || {
            let (rank, size) = (b.cluster_cta_rank(), b.cluster_size());
            let next = (rank + 1) & 3;
            b.mbarrier_arrive_remote(b.map_address(mbar, next));
            b.mbarrier_wait(mbar, 0);
            let at = rank.mad_wide(4, results);
            b.store(at, b.cluster_cta_x().mad(16, size));
        });
        b.cluster_sync();
    })
}

/// Two warps pass a word to each other through shared memory. Named barriers (sync and arrive) order the accesses.
fn named_barriers() -> Micro {
    micro("named barriers", Launch::threads(64), Rule::Bits, |bench| {
        let (b, tid) = (bench.b, bench.tid);
        let region = b.region("words", 128, 16);
        let (full, empty) = (b.barrier("full", 64), b.barrier("empty", 64));
        let results = bench.output(4 * 128);
        let start = b.address(region);
        let lane = tid & 31;
        let at = lane.mad(4, start);
        let to = lane.mad_wide(4, results);
        b.role(Role::new("writer", 0..1), || {
            for round in 0..4u32 {
                if round > 0 {
                    b.sync(empty);
                }
                b.store(at, lane.mad(3, round));
                b.arrive(full);
            }
        });
        b.role(Role::new("reader", 1..2), || {
            for round in 0..4 {
                b.sync(full);
                b.store(to.at(128 * round), b.load::<B32>(at));
                if round < 3 {
                    b.arrive(empty);
                }
            }
        });
    })
}

/// Three warpgroups: one releases registers, and the other two take all of them and use them.
fn registers() -> Micro {
    micro("registers", Launch::threads(384), Rule::Bits, |bench| {
        let (b, tid) = (bench.b, bench.tid);
        let from = bench.input(words((0..256).map(|index| index * 0x0101_0101)));
        let results = bench.output(4 * 384);
        let to = tid.mad_wide(4, results);
        b.role(Role::new("giver", 0..4).registers(24), || b.store(to, tid));
        b.role(Role::new("takers", 4..12).registers(240), || {
            // All registers are live before the first is used.
            let loaded: Vec<V<'_, B32>> = (0..128).map(|index| b.load(from.at(4 * index))).collect();
            b.store(to, loaded.into_iter().fold(tid, |sum, word| sum.mad(31, word)));
        });
    })
}

/// A kernel that stores the special registers of each thread.
fn specials() -> Micro {
    micro("specials", Launch::threads(64), Rule::Bits, |bench| {
        bench.grid(3);
        let (b, tid) = (bench.b, bench.tid);
        let results = bench.output(3 * 64 * 16);
        let (cta, grid, lane) = (b.cta_x(), b.grid_x(), b.lane_id());
        let at = cta.mad(64, tid).mad_wide(16, results);
        let (y, z) = (b.cta_y(), b.grid_z());
        b.store_vector(at, [grid, lane, cta, y.mad(16, z)]);
    })
}
