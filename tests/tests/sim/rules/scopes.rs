//! Scope of a fence, an arrival or a wait: the accesses of one lane, of one CTA, of those before it.

use fa3_ir::lang::*;
use fa3_sim::{Memory, Rule, SimError, Simulation};

use super::{case, init, own_word, thread};

/// Each lane copies 16 bytes by cp.async and reads what lane 31 - lane copied, after `publish`.
fn copied(b: &Builder, mbarrier: Region, publish: impl FnOnce(&Builder)) {
    let (x, tile) = (b.param_pointer("x", Elem::F32), b.region("tile", 512, 16));
    let (lane, start) = (b.lane_id(), b.address(tile));
    let (from, to) = (lane.mad_wide(16, x), lane.mad(16, start));
    init(b, mbarrier, 1);
    b.copy_async(to, from, 16);
    publish(b);
    _ = b.load::<F32>((lane ^ 31).mad(16, start));
}

/// The arrival of one lane says nothing of the copies of others.
#[test]
fn an_arrival_follows_the_copies_of_its_own_lane() {
    case(Rule::Race, 32, |b, broken| {
        let full = b.mbarriers("full", 1, 1);
        copied(b, full, |b| {
            let first = thread(b, 0);
            if !broken {
                b.copy_async_commit();
                b.copy_async_wait(0);
                b.warp_sync();
            }
            b.guarded(first, || b.mbarrier_arrive_copied(full));
            b.mbarrier_wait(full, 0);
        });
    })
    .check();
}

/// Nor does its wait.
#[test]
fn a_wait_is_for_the_copies_of_its_own_lane() {
    case(Rule::Race, 32, |b, broken| {
        let full = b.mbarriers("full", 1, 1);
        copied(b, full, |b| {
            let some = b.lane_id().lt(if broken { 31 } else { 32 });
            b.copy_async_commit();
            b.guarded(some, || b.copy_async_wait(0));
            b.warp_sync();
        });
    })
    .check();
}

/// Lanes that commit apart wait apart.
#[test]
fn copies_are_committed_by_their_own_lane() {
    case(Rule::Race, 32, |b, broken| {
        let full = b.mbarriers("full", 1, 1);
        copied(b, full, |b| {
            let low = b.lane_id().lt(16);
            b.guarded(low, || b.copy_async_commit());
            if !broken {
                b.guarded(!low, || b.copy_async_commit());
            }
            b.copy_async_wait(0);
            b.warp_sync();
        });
    })
    .check();
}

#[test]
fn lanes_do_not_copy_to_one_place() {
    case(Rule::Lanes, 32, |b, broken| {
        let (x, tile) = (b.param_pointer("x", Elem::F32), b.region("tile", 512, 16));
        let (lane, start) = (b.lane_id(), b.address(tile));
        let to = if broken { lane & 15 } else { lane };
        let (from, to) = (lane.mad_wide(16, x), to.mad(16, start));
        b.copy_async(to, from, 16);
        b.copy_async_commit();
        b.copy_async_wait(0);
    })
    .check();
}

/// The fence of initialisations is a release of its own: the arrival after it may be relaxed.
#[test]
fn a_relaxed_arrival_brings_fenced_initialisations() {
    case(Rule::M6, 32, |b, broken| {
        let full = b.mbarriers("full", 1, 1);
        let (rank, first) = (b.cluster_cta_rank(), thread(b, 0));
        b.guarded(first, || b.mbarrier_init(full, 1));
        if !broken {
            b.fence(FenceInst::MbarrierInit);
        }
        b.cluster_arrive_relaxed();
        b.cluster_wait();
        let theirs = b.map_address(full, rank ^ 1);
        b.guarded(first, || b.mbarrier_arrive_remote(theirs));
        b.mbarrier_wait(full, 0);
    })
    .cluster(2)
    .check();
}

/// Too late, the fence releases nothing.
#[test]
fn initialisations_are_fenced_before_they_are_published() {
    case(Rule::M6, 64, |b, broken| {
        let full = b.mbarriers("full", 1, 1);
        let (first, other) = (thread(b, 0), thread(b, 32));
        b.guarded(first, || b.mbarrier_init(full, 1));
        if !broken {
            b.fence(FenceInst::MbarrierInit);
        }
        b.sync_cta();
        if broken {
            b.fence(FenceInst::MbarrierInit);
        }
        b.guarded(other, || b.mbarrier_arrive(full));
        b.mbarrier_wait(full, 0);
    })
    .check();
}

/// The first CTA writes global memory and arrives at the other's mbarrier, which is a release in its own CTA only.
#[test]
fn remote_arrivals_publish_no_data() {
    case(Rule::Race, 32, |b, broken| {
        let (x, full) = (b.param_pointer("x", Elem::F32), b.mbarriers("full", 1, 1));
        let (rank, first) = (b.cluster_cta_rank(), thread(b, 0));
        b.guarded(first, || b.mbarrier_init(full, 1));
        b.fence(FenceInst::MbarrierInit);
        b.cluster_arrive();
        b.cluster_wait();
        let leads = rank.eq(0);
        let at = own_word(b, x);
        b.if_uniform(leads, || b.store(at, 1.0));
        if !broken {
            b.cluster_arrive();
            b.cluster_wait();
        }
        let theirs = b.map_address(full, 1);
        b.if_else_uniform(
            leads,
            || {
                b.warp_sync();
                b.guarded(first, || b.mbarrier_arrive_remote(theirs));
            },
            || {
                b.mbarrier_wait(full, 0);
                _ = b.load::<F32>(at);
            },
        );
    })
    .cluster(2)
    .check();
}

/// CTAs store numbers for each other, twice to the same place: a phase says that a number is there, and that the other
/// CTA has read the one before.
#[test]
fn remote_stores_are_waited_for() {
    case(Rule::Race, 32, |b, broken| {
        let (numbers, full) = (b.region("numbers", 8, 8), b.mbarriers("full", 2, 1));
        let (rank, first) = (b.cluster_cta_rank(), thread(b, 0));
        b.init_mbarriers();
        let [theirs, signals] = [numbers, full].map(|region| b.map_address(region, rank ^ 1));
        for (half, phase) in [(0, 0), (1, 0), (0, 1)] {
            b.warp_sync();
            b.guarded(first, || {
                b.store_async(theirs + 4 * half, 1.0, signals + 8 * half);
                b.mbarrier_arrive_expect(full.at(8 * half), 4);
            });
            let read = || _ = b.load::<F32>(numbers.at(4 * half));
            if broken && half == 1 {
                read();
            }
            b.mbarrier_wait(full.at(8 * half), phase);
            if !broken || half == 0 {
                read();
            }
        }
    })
    .cluster(2)
    .check_either(Rule::I1);
}

/// An mbarrier ends when its copies are known to be complete.
#[test]
fn an_mbarrier_ends_after_its_copies() {
    case(Rule::M1, 32, |b, broken| {
        let (x, full, tile) =
            (b.param_pointer("x", Elem::F32), b.mbarriers("full", 1, 1), b.region("tile", 16, 16));
        init(b, full, 1);
        let first = thread(b, 0);
        b.if_lanes(first, || {
            b.mbarrier_arrive_expect(full, 16);
            b.bulk_load(tile, x, 16, full, LoadOptions::default());
        });
        if !broken {
            b.mbarrier_wait(full, 0);
        }
        b.guarded(first, || b.mbarrier_invalidate(full));
    })
    .check();
}

/// A buffer of another memory is an error.
#[test]
fn buffers_are_of_the_memory_that_the_kernel_runs_on() {
    let kernel = Kernel::build("nothing", Launch::threads(32), |b| b.sync_cta());
    let buffer = Memory::new().alloc("z", 16);
    let outcome = Simulation::new(&kernel).predecessor_writes(vec![buffer]).run(&mut Memory::new());
    assert_eq!(outcome, Err(SimError::Buffer { address: buffer.address(), bytes: 16 }));
}

/// A fence before a relaxed arrival at the cluster's barrier is as good as its release.
#[test]
fn a_relaxed_arrival_publishes_what_a_fence_released() {
    case(Rule::Race, 32, |b, broken| {
        let x = b.param_pointer("x", Elem::F32);
        let leads = b.cluster_cta_rank().eq(0);
        let at = own_word(b, x);
        b.if_uniform(leads, || b.store(at, 1.0));
        if !broken {
            b.fence(FenceInst::AcqRelCluster);
        }
        b.cluster_arrive_relaxed();
        b.cluster_wait();
        b.if_uniform(!leads, || _ = b.load::<F32>(at));
    })
    .cluster(2)
    .check();
}
