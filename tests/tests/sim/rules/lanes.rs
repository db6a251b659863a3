//! Rule LANES: the lanes of a warp are not in step.

use fa3_ir::lang::*;
use fa3_ir::{Elem, FenceInst};
use fa3_sim::Rule;

use super::{case, init, own_word, thread, warp};

#[test]
fn lanes_do_not_store_different_values_at_one_place() {
    case(Rule::Lanes, 32, |b, broken| {
        let cell = b.region("cell", 4, 4);
        let lane = b.lane_id();
        // Equal values leave nothing to chance.
        b.store(cell, if broken { lane } else { b.copy(7) });
    })
    .check();
}

/// Eight lanes count in each bin. Each reads what the others write, even if they write the same number.
#[test]
fn a_histogram_needs_atomics() {
    case(Rule::Lanes, 32, |b, broken| {
        let x = b.param_pointer("x", Elem::U32);
        let bin = (b.lane_id() & 3).mad_wide(4, x);
        if broken {
            b.store(bin, b.load::<B32>(bin) + 1);
        } else {
            b.reduce_add_u32(bin, 1);
        }
    })
    .check();
}

/// Each lane stores a word of shared memory, and reads another lane's behind `order`.
fn exchange(b: &Builder, order: impl FnOnce(V<'_, B32>)) {
    let (words, lane) = (b.region("words", 128, 16), b.lane_id());
    let start = b.address(words);
    b.store(lane.mad(4, start), lane);
    order(lane);
    _ = b.load::<B32>((lane ^ 1).mad(4, start));
}

/// A shuffle or a vote exchanges registers, and orders no memory.
#[test]
fn shuffles_and_votes_order_no_memory() {
    case(Rule::Lanes, 32, |b, broken| {
        exchange(b, |lane| {
            _ = lane.shfl_bfly(1);
            _ = lane.eq(0).vote_any();
            if !broken {
                b.warp_sync();
            }
        });
    })
    .check();
}

#[test]
fn barriers_order_lanes() {
    case(Rule::Lanes, 32, |b, broken| {
        exchange(b, |_| {
            if !broken {
                b.sync_cta()
            }
        })
    })
    .check();
    case(Rule::Lanes, 64, |b, broken| {
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
    .check_either(Rule::B2);
}

/// A lane's accesses between its arrival at the cluster's barrier and its wait are not ordered.
#[test]
fn arrivals_at_the_cluster_barrier_order_what_was_before() {
    case(Rule::Lanes, 32, |b, broken| {
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
    .cluster(2)
    .check();
}

/// All lanes arrive at an mbarrier: who has waited for them may read what they stored.
#[test]
fn mbarriers_order_the_lanes_that_wait() {
    case(Rule::Lanes, 32, |b, broken| {
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
    })
    .check();
}

/// One lane that arrives for its warp releases what it has done itself, and what a barrier has ordered before.
#[test]
fn one_lane_releases_what_a_barrier_has_ordered() {
    case(Rule::Lanes, 64, |b, broken| {
        let (full, words) = (b.mbarriers("full", 1, 1), b.region("words", 128, 16));
        init(b, full, 1);
        let (lane, start) = (b.lane_id(), b.address(words));
        b.if_else_uniform(
            warp(b, 0),
            || {
                b.store(lane.mad(4, start), lane);
                if !broken {
                    b.warp_sync();
                }
                b.guarded(b.elect(), || b.mbarrier_arrive(full));
            },
            || {
                b.mbarrier_wait(full, 0);
                _ = b.load::<B32>(lane.mad(4, start));
            },
        );
    })
    .check();
}

/// The lane's own store needs no barrier before its arrival.
#[test]
fn one_lane_releases_what_it_has_done() {
    case(Rule::Race, 64, |b, broken| {
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
    .check_either(Rule::I1);
}

/// A copy that one lane begins reads what the others stored, and fenced.
#[test]
fn copies_are_ordered_behind_the_other_lanes() {
    case(Rule::Lanes, 32, |b, broken| {
        let (y, tile) = (b.param_pointer("y", Elem::F32), b.region("tile", 128, 128));
        let lane = b.lane_id();
        b.store(lane.mad(4, b.address(tile)), 1.0);
        b.fence(FenceInst::ProxyAsyncShared);
        if !broken {
            b.warp_sync();
        }
        b.if_lanes(thread(b, 0), || {
            b.bulk_store(y, tile, 128);
            b.bulk_commit();
            b.bulk_wait_read(0);
        });
    })
    .check();
}

/// A lane's wait for its own cp.async says nothing to its neighbour.
#[test]
fn copies_of_other_lanes_are_behind_a_barrier() {
    case(Rule::Lanes, 32, |b, broken| {
        let (x, tile) = (b.param_pointer("x", Elem::F32), b.region("tile", 512, 16));
        let (lane, start) = (b.lane_id(), b.address(tile));
        b.copy_async(lane.mad(16, start), lane.mad_wide(16, x), 16);
        b.copy_async_commit();
        b.copy_async_wait(0);
        if !broken {
            b.warp_sync();
        }
        _ = b.load::<F32>((lane ^ 1).mad(16, start));
    })
    .check();
}

/// A matrix comes from all lanes and goes to all lanes.
#[test]
fn matrices_are_ordered_with_the_lanes_that_stored_them() {
    case(Rule::Lanes, 32, |b, broken| {
        let tile = b.region("tile", 512, 16);
        let (lane, start) = (b.lane_id(), b.address(tile));
        let at = lane.mad(16, start);
        b.store_vector(at, [0.0; 4]);
        if !broken {
            b.warp_sync();
        }
        _ = b.ldmatrix::<4>(at, false);
    })
    .check();
}

#[test]
fn global_memory_is_ordered_as_well() {
    case(Rule::Lanes, 32, |b, broken| {
        let x = b.param_pointer("x", Elem::U32);
        b.store(own_word(b, x), 1);
        if !broken {
            b.warp_sync();
        }
        _ = b.load::<B32>((b.lane_id() ^ 1).mad_wide(4, x));
    })
    .check();
}

#[test]
fn the_report_names_the_lanes_and_the_barrier() {
    let case = case(Rule::Lanes, 32, |b, _| exchange(b, |_| ()));
    let report = case.report();
    assert!(report.contains("read after write by lanes 1 and 0 of one warp, unordered"), "{report}");
    assert!(report.contains("missing: bar.warp.sync, or a wider barrier, between the two"), "{report}");
}
