//! Tensor and bulk copies.

use fa3_ir::lang::*;
use fa3_sim::{Policy, Rule};

use super::{case, fill, init, own_word, thread, warp};

const BOX: BoxShapeOf = BoxShapeOf;

/// 64 x 64 elements of 2 bytes with 128-byte swizzle: 8 KiB.
struct BoxShapeOf;

impl BoxShapeOf {
    fn map(&self, b: &Builder, name: &str) -> TensorMap {
        b.param_tensor_map(name, BoxShape::new(Elem::Bf16, &[64, 64], Swizzle::B128))
    }
}

/// Each thread reads a word of a region.
fn read(b: &Builder, region: Region) {
    let (tid, start) = (b.tid(), b.address(region));
    _ = b.load::<F32>(tid.mad(4, start));
}

#[test]
fn boxes_lie_at_whole_patterns() {
    case(Rule::T1, 32, |b, broken| {
        let map = BOX.map(b, "x");
        let (full, tile) = (b.mbarriers("full", 1, 1), b.region("tile", 16384, 1024));
        init(b, full, 1);
        let first = thread(b, 0);
        let offset = if broken { 128 } else { 1024 };
        b.if_lanes(first, || {
            b.mbarrier_arrive_expect(full, if broken { 0 } else { 8192 });
            b.tma_load(tile.at(offset), map, (0, 0), full, LoadOptions::default());
        });
        b.mbarrier_wait(full, 0);
    })
    .check();
}

/// An H100 answers other starts with an illegal instruction, in loads as in stores.
#[test]
fn rows_of_boxes_begin_at_multiples_of_16_bytes() {
    case(Rule::T1, 32, |b, broken| {
        let map = BOX.map(b, "x");
        let (full, tile) = (b.mbarriers("full", 1, 1), b.region("tile", 8192, 1024));
        init(b, full, 1);
        let first = thread(b, 0);
        b.if_lanes(first, || {
            b.mbarrier_arrive_expect(full, 8192);
            b.tma_load(tile, map, (if broken { -4 } else { -8 }, 0), full, LoadOptions::default());
        });
        b.mbarrier_wait(full, 0);
    })
    .check();
}

#[test]
fn stores_begin_in_the_tensor() {
    case(Rule::T1, 128, |b, broken| {
        let map = BOX.map(b, "y");
        let tile = b.region("tile", 8192, 1024);
        fill(b, tile);
        b.fence(FenceInst::ProxyAsyncShared);
        b.sync_cta();
        let first = thread(b, 0);
        b.if_lanes(first, || {
            b.tma_store(map, (0, -i32::from(broken)), tile);
            b.bulk_commit();
            b.bulk_wait_read(0);
        });
    })
    .check();
}

#[test]
fn generic_writes_are_fenced_before_stores_read_them() {
    case(Rule::W4, 128, |b, broken| {
        let map = BOX.map(b, "y");
        let tile = b.region("tile", 8192, 1024);
        fill(b, tile);
        if !broken {
            b.fence(FenceInst::ProxyAsyncShared);
        }
        b.sync_cta();
        let first = thread(b, 0);
        b.if_lanes(first, || {
            b.tma_store(map, (0, 0), tile);
            b.bulk_commit();
            b.bulk_wait_read(0);
        });
    })
    .check();
}

/// A ring of one stage, twice around: its readers fence before they release it.
#[test]
fn generic_reads_are_fenced_before_loads_overwrite() {
    case(Rule::W5, 64, |b, broken| ring(b, !broken, true)).check();
}

/// The producer waits for the readers.
#[test]
fn stages_are_released_before_they_are_filled_again() {
    case(Rule::Race, 64, |b, broken| ring(b, true, !broken)).check();
    // Where the copy comes after the read.
    let case = case(Rule::Race, 64, |b, _| ring(b, true, false));
    let findings = case.run(&case.kernel(true), Policy::Lazy).findings;
    let missing = findings[0].missing.unwrap();
    assert!(missing.starts_with("an empty mbarrier: readers arrive at it"), "{}", findings[0]);
}

fn ring(b: &Builder, fence: bool, wait: bool) {
    let x = b.param_pointer("x", Elem::F32);
    let [first, second, empty] = ["first", "second", "empty"].map(|name| b.mbarriers(name, 1, 1));
    let tile = b.region("tile", 256, 16);
    let leader = thread(b, 0);
    b.guarded(leader, || {
        for mbarrier in [first, second, empty] {
            b.mbarrier_init(mbarrier, 1);
        }
    });
    b.fence(FenceInst::MbarrierInit);
    b.sync_cta();
    b.role(Role::new("producer", 0..1), || {
        b.if_lanes(b.elect(), || {
            b.mbarrier_arrive_expect(first, 256);
            b.bulk_load(tile, x, 256, first, LoadOptions::default());
            // Without the wait for the readers it still knows that the first load is over.
            b.mbarrier_wait(if wait { empty } else { first }, 0);
            b.mbarrier_arrive_expect(second, 256);
            b.bulk_load(tile, x, 256, second, LoadOptions::default());
        });
    });
    b.role(Role::new("consumer", 1..2), || {
        for full in [first, second] {
            b.mbarrier_wait(full, 0);
            let (lane, start) = (b.lane_id(), b.address(tile));
            _ = b.load::<F32>(lane.mad(4, start));
            if fence {
                b.fence(FenceInst::ProxyAsyncShared);
            }
            b.warp_sync();
            let elected = b.elect();
            if full == first {
                b.guarded(elected, || b.mbarrier_arrive(empty));
            }
        }
    });
}

#[test]
fn sources_of_stores_are_not_overwritten() {
    case(Rule::T2, 128, |b, broken| {
        let y = b.param_pointer("y", Elem::F32);
        let tile = b.region("tile", 8192, 1024);
        fill(b, tile);
        b.fence(FenceInst::ProxyAsyncShared);
        b.sync_cta();
        let first = thread(b, 0);
        b.if_lanes(first, || {
            b.bulk_store(y, tile, 8192);
            b.bulk_commit();
            b.bulk_wait_read(u32::from(broken));
        });
        b.sync_cta();
        fill(b, tile);
        b.if_lanes(first, || b.bulk_wait_read(0));
    })
    .check();
}

#[test]
fn results_of_stores_are_there_after_the_whole_wait() {
    case(Rule::T2, 128, |b, broken| {
        let y = b.param_pointer("y", Elem::F32);
        let tile = b.region("tile", 8192, 1024);
        fill(b, tile);
        b.fence(FenceInst::ProxyAsyncShared);
        b.sync_cta();
        let first = thread(b, 0);
        b.if_lanes(first, || {
            b.bulk_store(y, tile, 8192);
            b.bulk_commit();
            if broken {
                b.bulk_wait_read(0);
            } else {
                b.bulk_wait(0);
            }
            _ = b.load::<F32>(y);
        });
    })
    .check();
}

/// Two CTAs add in an order that a flag in global memory says: only a whole wait makes the first addition visible.
#[test]
fn a_flag_after_the_source_is_read_orders_nothing() {
    case(Rule::T2, 128, |b, broken| {
        let (x, flag) = (b.param_pointer("x", Elem::F32), b.param_pointer("s", Elem::U32));
        let tile = b.region("tile", 8192, 1024);
        fill(b, tile);
        b.fence(FenceInst::ProxyAsyncShared);
        b.sync_cta();
        let (cta, first) = (b.cta_x(), thread(b, 0));
        let leads = cta.eq(0);
        b.if_lanes(first, || {
            b.if_else_lanes(
                leads,
                || {
                    b.bulk_reduce_add_f32(x, tile, 8192);
                    b.bulk_commit();
                    if broken {
                        b.bulk_wait_read(0);
                    } else {
                        b.bulk_wait(0);
                    }
                    b.store_release(flag, 1);
                },
                || {
                    b.repeat(|| b.break_if(b.load_acquire(flag).eq(1)));
                    _ = b.load::<F32>(x);
                },
            );
        });
    })
    .grid(2)
    .check();
}

#[test]
fn the_thread_that_commits_waits() {
    case(Rule::T3, 128, |b, broken| {
        let y = b.param_pointer("y", Elem::F32);
        let tile = b.region("tile", 8192, 1024);
        fill(b, tile);
        b.fence(FenceInst::ProxyAsyncShared);
        b.sync_cta();
        let (first, waits) = (thread(b, 0), thread(b, u32::from(broken)));
        b.if_lanes(first, || {
            b.bulk_store(y, tile, 8192);
            b.bulk_commit();
        });
        b.if_lanes(waits, || b.bulk_wait_read(0));
    })
    .check();
}

/// All lanes may commit and wait where one copies.
#[test]
fn copies_are_committed_by_their_thread() {
    case(Rule::T3, 128, |b, broken| {
        let y = b.param_pointer("y", Elem::F32);
        let tile = b.region("tile", 8192, 1024);
        fill(b, tile);
        b.fence(FenceInst::ProxyAsyncShared);
        b.sync_cta();
        let (leads, copies, other) = (warp(b, 0), thread(b, 31), thread(b, 3));
        b.if_uniform(leads, || {
            b.guarded(copies, || b.bulk_store(y, tile, 8192));
            if broken {
                b.guarded(other, || b.bulk_commit());
            }
            b.bulk_commit();
            b.bulk_wait_read(0);
        });
    })
    .check();
}

#[test]
fn loads_of_the_same_bytes_are_ordered() {
    case(Rule::T4, 32, |b, broken| {
        let x = b.param_pointer("x", Elem::F32);
        let (full, tile) = (b.mbarriers("full", 1, 1), b.region("tile", 512, 16));
        init(b, full, 1);
        let first = thread(b, 0);
        b.if_lanes(first, || {
            b.mbarrier_arrive_expect(full, 512);
            b.bulk_load(tile, x, 256, full, LoadOptions::default());
            b.bulk_load(tile.at(if broken { 128 } else { 256 }), x, 256, full, LoadOptions::default());
        });
        b.mbarrier_wait(full, 0);
    })
    .check();
}

#[test]
fn stores_of_the_same_bytes_are_ordered() {
    case(Rule::T4, 128, |b, broken| {
        let y = b.param_pointer("y", Elem::F32);
        let tile = b.region("tile", 8192, 1024);
        fill(b, tile);
        b.fence(FenceInst::ProxyAsyncShared);
        b.sync_cta();
        let first = thread(b, 0);
        b.if_lanes(first, || {
            b.bulk_store(y, tile, 4096);
            b.bulk_store(y.at(if broken { 0 } else { 4096 }), tile, 4096);
            b.bulk_commit();
            b.bulk_wait_read(0);
        });
    })
    .check();
}

#[test]
fn nobody_exits_while_a_copy_reads_its_memory() {
    case(Rule::T5, 128, |b, broken| {
        let y = b.param_pointer("y", Elem::F32);
        let tile = b.region("tile", 8192, 1024);
        fill(b, tile);
        b.fence(FenceInst::ProxyAsyncShared);
        b.sync_cta();
        let first = thread(b, 0);
        b.if_lanes(first, || {
            b.bulk_store(y, tile, 8192);
            b.bulk_commit();
            if !broken {
                b.bulk_wait_read(0);
            }
        });
    })
    .check();
}

#[test]
fn a_cta_outlives_the_arrivals_of_others() {
    case(Rule::T5, 32, |b, broken| {
        let done = b.mbarriers("done", 1, 1);
        let (rank, first) = (b.cluster_cta_rank(), thread(b, 0));
        b.guarded(first, || b.mbarrier_init(done, 1));
        b.fence(FenceInst::MbarrierInit);
        b.cluster_arrive();
        b.cluster_wait();
        let leads = rank.eq(0);
        b.if_else_uniform(
            leads,
            || {
                if !broken {
                    b.mbarrier_wait(done, 0);
                }
            },
            || {
                let remote = b.map_address(done, 0);
                b.guarded(first, || b.mbarrier_arrive_remote(remote));
            },
        );
    })
    .cluster(2)
    .check();
}

/// To the cluster's barrier an exit is an arrival: who waits there outlives who has exited.
#[test]
fn an_exit_is_an_arrival_at_the_clusters_barrier() {
    case(Rule::T5, 64, |b, broken| {
        let done = b.mbarriers("done", 1, 1);
        let (rank, first) = (b.cluster_cta_rank(), thread(b, 0));
        b.guarded(first, || b.mbarrier_init(done, 1));
        b.fence(FenceInst::MbarrierInit);
        b.cluster_arrive();
        b.cluster_wait();
        let visits = rank.eq(1);
        let remote = b.map_address(done, 0);
        b.role(Role::new("visitor", 0..1), || {
            let elected = b.elect();
            b.if_uniform(visits, || b.guarded(elected, || b.mbarrier_arrive_remote(remote)));
        });
        b.role(Role::new("holder", 1..2), || {
            if !broken {
                b.cluster_arrive();
                b.cluster_wait();
            }
        });
    })
    .cluster(2)
    .check();
}

/// A box goes to both CTAs of a cluster: each expects all of its bytes.
#[test]
fn every_target_of_a_multicast_expects_its_bytes() {
    case(Rule::M5, 128, |b, broken| {
        let map = BOX.map(b, "x");
        let (full, tile) = (b.mbarriers("full", 1, 1), b.region("tile", 8192, 1024));
        let (rank, first) = (b.cluster_cta_rank(), thread(b, 0));
        let leads = rank.eq(0);
        let bytes = leads.select(8192, if broken { 4096 } else { 8192 });
        b.if_lanes(first, || {
            b.mbarrier_init(full, 1);
            b.fence(FenceInst::MbarrierInit);
            b.mbarrier_arrive_expect(full, bytes);
        });
        b.cluster_arrive();
        b.cluster_wait();
        let issues = first & leads;
        b.if_lanes(issues, || b.tma_load(tile, map, (0, 0), full, LoadOptions::multicast(3u16)));
        b.mbarrier_wait(full, 0);
        read(b, tile);
        b.cluster_arrive();
        b.cluster_wait();
    })
    .cluster(2)
    .check();
}

/// Writes to global memory that the tensor memory accelerator loads later are fenced.
#[test]
fn generic_writes_of_global_memory_are_fenced() {
    case(Rule::W4, 64, |b, broken| {
        let x = b.param_pointer("x", Elem::F32);
        let (full, tile) = (b.mbarriers("full", 1, 1), b.region("tile", 256, 16));
        init(b, full, 1);
        let at = own_word(b, x);
        b.store(at, 1.0);
        b.fence(if broken { FenceInst::ProxyAsyncShared } else { FenceInst::ProxyAsyncGlobal });
        b.sync_cta();
        let first = thread(b, 0);
        b.if_lanes(first, || {
            b.mbarrier_arrive_expect(full, 256);
            b.bulk_load(tile, x, 256, full, LoadOptions::default());
        });
        b.mbarrier_wait(full, 0);
    })
    .check();
}

/// cp.async arrives at an mbarrier when it is complete.
#[test]
fn asynchronous_copies_are_waited_for() {
    case(Rule::Race, 64, |b, broken| {
        let x = b.param_pointer("x", Elem::F32);
        let (full, tile) = (b.mbarriers("full", 1, 32), b.region("tile", 512, 16));
        init(b, full, 32);
        let (copies, lane, start) = (warp(b, 0), b.lane_id(), b.address(tile));
        let (to, from) = (lane.mad(16, start), lane.mad_wide(16, x));
        b.if_else_uniform(
            copies,
            || {
                b.copy_async(to, from, 16);
                if broken {
                    b.mbarrier_arrive(full);
                } else {
                    b.mbarrier_arrive_copied(full);
                }
            },
            || {
                b.mbarrier_wait(full, 0);
                _ = b.load::<F32>(to);
            },
        );
    })
    .check();
}
