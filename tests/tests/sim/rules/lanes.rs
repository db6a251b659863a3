//! Rule LANES: the lanes of a warp do not run in lockstep.

use fa3_ir::lang::*;
use fa3_ir::{Elem, FenceInst};
use fa3_sim::{Policy, Rule};

use super::{Case, case, init, own_word, says, thread, warp};

/// Each lane stores a word to shared memory, and reads another lane's word after `order`.
fn exchange(b: &Builder, order: impl FnOnce(V<'_, B32>)) {
    let (words, lane) = (b.region("words", 128, 16), b.lane_id());
    let start = b.address(words);
    b.store(lane.mad(4, start), lane);
    order(lane);
    _ = b.load::<B32>((lane ^ 1).mad(4, start));
}

/// Synchronizes the warp, but not in the broken version.
fn sync_unless(b: &Builder, broken: bool) {
    if !broken {
        b.warp_sync();
    }
}

pub(super) const CASES: &[Case] = &[
    // Lanes may store equal values.
    case("lanes do not store different values at one place", Rule::Lanes, 32, |b, broken| {
        b.store(b.region("cell", 4, 4), if broken { b.lane_id() } else { b.copy(7) });
    }),
    // Eight lanes count in each bin. Each lane reads what the other lanes write, even if the numbers are equal.
    case("a histogram needs atomics", Rule::Lanes, 32, |b, broken| {
        let bin = (b.lane_id() & 3).mad_wide(4, b.param_pointer("x", Elem::U32));
        if broken { b.store(bin, b.load::<B32>(bin) + 1) } else { b.reduce_add_u32(bin, 1) }
    }),
    // A shuffle or a vote exchanges registers, and orders no memory.
    case("shuffles and votes order no memory", Rule::Lanes, 32, |b, broken| {
        exchange(b, |lane| {
            _ = (lane.shfl_bfly(1), lane.eq(0).vote_any());
            sync_unless(b, broken);
        });
    }),
    case("the barrier of the CTA orders lanes", Rule::Lanes, 32, |b, broken| {
        exchange(b, |_| {
            if !broken {
                b.sync_cta()
            }
        })
    }),
    case("named barriers order lanes", Rule::Lanes, 64, |b, broken| {
        let both = b.barrier("both", 64);
        let (words, tid) = (b.region("words", 256, 16), b.tid());
        let start = b.address(words);
        b.store(tid.mad(4, start), tid);
        if broken {
            b.arrive(both);
            b.arrive(both);
        } else {
            b.sync(both);
        }
        _ = b.load::<B32>((tid ^ 1).mad(4, start));
    })
    .or(Rule::B2),
    // Accesses between a lane's arrival at the cluster's barrier and its wait are not ordered.
    case("arrivals at the cluster barrier order what was before", Rule::Lanes, 32, |b, broken| {
        if broken {
            b.cluster_arrive();
        }
        exchange(b, |_| {
            if !broken {
                b.cluster_arrive();
            }
            b.cluster_wait();
        });
    })
    .cluster(2),
    // All lanes arrive at an mbarrier. A lane that has waited for them may read the words that they stored.
    case("mbarriers order the lanes that wait", Rule::Lanes, 32, |b, broken| {
        let all = b.mbarriers("all", 1, 32);
        init(b, all, 32);
        exchange(b, |lane| {
            b.mbarrier_arrive(all);
            if broken {
                b.if_lanes(lane.eq(0), || b.mbarrier_wait(all, 0));
            } else {
                b.mbarrier_wait(all, 0);
            }
        });
    }),
    // A lane that arrives for its warp releases its own accesses, and accesses of other lanes only if a barrier has
    // ordered them before.
    case("one lane releases what a barrier has ordered", Rule::Lanes, 64, |b, broken| {
        let (full, words) = (b.mbarriers("full", 1, 1), b.region("words", 128, 16));
        init(b, full, 1);
        let (lane, start) = (b.lane_id(), b.address(words));
        let writes = || {
            b.store(lane.mad(4, start), lane);
            sync_unless(b, broken);
            b.guarded(b.elect(), || b.mbarrier_arrive(full));
        };
        let reads = || {
            b.mbarrier_wait(full, 0);
            _ = b.load::<B32>(lane.mad(4, start));
        };
        b.if_else_uniform(warp(b, 0), writes, reads);
    }),
    // The lane's own store needs no barrier before the lane's arrival.
    case("one lane releases what it has done", Rule::Race, 64, |b, broken| {
        let (full, word) = (b.mbarriers("full", 1, 1), b.region("word", 4, 4));
        init(b, full, 1);
        b.if_lanes(thread(b, 0), || {
            b.store(word, 1.0);
            b.mbarrier_arrive(full);
        });
        if !broken {
            b.mbarrier_wait(full, 0);
        }
        b.if_uniform(warp(b, 1), || _ = b.load::<F32>(word));
    })
    .or(Rule::I1),
    // A copy that one lane begins reads bytes that the other lanes stored and fenced.
    case("copies are ordered behind the other lanes", Rule::Lanes, 32, |b, broken| {
        let (y, tile) = (b.param_pointer("y", Elem::F32), b.region("tile", 128, 128));
        b.store(b.lane_id().mad(4, b.address(tile)), 1.0);
        b.fence(FenceInst::ProxyAsyncShared);
        sync_unless(b, broken);
        b.if_lanes(thread(b, 0), || {
            b.bulk_store(y, tile, 128);
            b.bulk_commit();
            b.bulk_wait_read(0);
        });
    }),
    // A lane's wait for its own cp.async does not cover another lane's cp.async.
    case("copies of other lanes are behind a barrier", Rule::Lanes, 32, |b, broken| {
        let (x, tile) = (b.param_pointer("x", Elem::F32), b.region("tile", 512, 16));
        let (lane, start) = (b.lane_id(), b.address(tile));
        b.copy_async(lane.mad(16, start), lane.mad_wide(16, x), 16);
        b.copy_async_commit();
        b.copy_async_wait(0);
        sync_unless(b, broken);
        _ = b.load::<F32>((lane ^ 1).mad(16, start));
    }),
    // Every lane gives a part of a matrix, and every lane gets a part.
    case("matrices are ordered with the lanes that stored them", Rule::Lanes, 32, |b, broken| {
        let at = b.lane_id().mad(16, b.address(b.region("tile", 512, 16)));
        b.store_vector(at, [0.0; 4]);
        sync_unless(b, broken);
        _ = b.ldmatrix::<4>(at, false);
    }),
    case("global memory is ordered as well", Rule::Lanes, 32, |b, broken| {
        let x = b.param_pointer("x", Elem::U32);
        b.store(own_word(b, x), 1);
        sync_unless(b, broken);
        _ = b.load::<B32>((b.lane_id() ^ 1).mad_wide(4, x));
    }),
];

#[test]
fn the_report_names_the_lanes_and_the_barrier() {
    let report = case("exchange", Rule::Lanes, 32, |b, _| exchange(b, |_| ())).report(Policy::Eager);
    says(
        &report,
        &[
            "read after write by lanes 1 and 0 of one warp, unordered",
            "missing: bar.warp.sync, or a wider barrier, between the two",
        ],
    );
}
