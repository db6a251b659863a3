//! Scope of a fence, an arrival or a wait: the accesses of one lane, of one CTA, or of all preceding operations.

use fa3_ir::lang::*;
use fa3_sim::{Memory, Rule, SimError, Simulation};

use super::{Case, begin_load, case, init, own_word, thread};

/// Each lane copies 16 bytes by cp.async and reads the bytes of lane 31 - lane after `publish`.
fn copied(b: &Builder, publish: impl FnOnce(Region)) {
    let (x, tile) = (b.param_pointer("x", Elem::F32), b.region("tile", 512, 16));
    let full = b.mbarriers("full", 1, 1);
    init(b, full, 1);
    let (lane, start) = (b.lane_id(), b.address(tile));
    b.copy_async(lane.mad(16, start), lane.mad_wide(16, x), 16);
    publish(full);
    _ = b.load::<F32>((lane ^ 31).mad(16, start));
}

/// Whether this CTA leads its pair, and the address of this thread's word. The leading CTA writes, the other reads.
fn pair(b: &Builder) -> (V<'_, Pred>, V<'_, B64>) {
    (b.cluster_cta_rank().eq(0), own_word(b, b.param_pointer("x", Elem::F32)))
}

pub(super) const CASES: &[Case] = &[
    // The arrival of one lane does not cover the copies of other lanes.
    case("an arrival follows the copies of its own lane", Rule::Race, 32, |b, broken| {
        copied(b, |full| {
            if !broken {
                b.copy_async_commit();
                b.copy_async_wait(0);
                b.warp_sync();
            }
            b.guarded(thread(b, 0), || b.mbarrier_arrive_copied(full));
            b.mbarrier_wait(full, 0);
        });
    }),
    // The wait of one lane does not cover the copies of other lanes.
    case("a wait is for the copies of its own lane", Rule::Race, 32, |b, broken| {
        copied(b, |_| {
            b.copy_async_commit();
            b.guarded(b.lane_id().lt(if broken { 31 } else { 32 }), || b.copy_async_wait(0));
            b.warp_sync();
        });
    }),
    // Lanes that commit separately wait separately.
    case("copies are committed by their own lane", Rule::Race, 32, |b, broken| {
        copied(b, |_| {
            let low = b.lane_id().lt(16);
            b.guarded(low, || b.copy_async_commit());
            if !broken {
                b.guarded(!low, || b.copy_async_commit());
            }
            b.copy_async_wait(0);
            b.warp_sync();
        });
    }),
    case("lanes do not copy to one place", Rule::Lanes, 32, |b, broken| {
        let (x, tile) = (b.param_pointer("x", Elem::F32), b.region("tile", 512, 16));
        let (lane, start) = (b.lane_id(), b.address(tile));
        let to = if broken { lane & 15 } else { lane };
        b.copy_async(to.mad(16, start), lane.mad_wide(16, x), 16);
        b.copy_async_commit();
        b.copy_async_wait(0);
    }),
    // The fence of mbarrier initializations is itself a release, so the arrival after it may be relaxed.
    case("a relaxed arrival brings fenced initialisations", Rule::M6, 32, |b, broken| {
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
    .cluster(2),
    // A fence after the publication releases nothing.
    case("initialisations are fenced before they are published", Rule::M6, 64, |b, broken| {
        let full = b.mbarriers("full", 1, 1);
        b.guarded(thread(b, 0), || b.mbarrier_init(full, 1));
        if !broken {
            b.fence(FenceInst::MbarrierInit);
        }
        b.sync_cta();
        if broken {
            b.fence(FenceInst::MbarrierInit);
        }
        b.guarded(thread(b, 32), || b.mbarrier_arrive(full));
        b.mbarrier_wait(full, 0);
    }),
    // The first CTA's arrival at the other CTA's mbarrier is a release only within the first CTA.
    case("remote arrivals publish no data", Rule::Race, 32, |b, broken| {
        let full = b.mbarriers("full", 1, 1);
        b.init_mbarriers();
        let (leads, at) = pair(b);
        b.if_uniform(leads, || b.store(at, 1.0));
        if !broken {
            b.cluster_sync();
        }
        let theirs = b.map_address(full, 1);
        let arrives = || {
            b.warp_sync();
            b.guarded(thread(b, 0), || b.mbarrier_arrive_remote(theirs));
        };
        let reads = || {
            b.mbarrier_wait(full, 0);
            _ = b.load::<F32>(at);
        };
        b.if_else_uniform(leads, arrives, reads);
    })
    .cluster(2),
    // CTAs store numbers for each other, twice to the same place. The end of a phase shows that a number has arrived,
    // and that the other CTA has read the previous number.
    case("remote stores are waited for", Rule::Race, 32, |b, broken| {
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
    .or(Rule::I1)
    .cluster(2),
    // An mbarrier may be invalidated only when its copies are known to be complete.
    case("an mbarrier ends after its copies", Rule::M1, 32, |b, broken| {
        let (full, tile) = (b.mbarriers("full", 1, 1), b.region("tile", 16, 16));
        init(b, full, 1);
        begin_load(b, tile, 16, full);
        if !broken {
            b.mbarrier_wait(full, 0);
        }
        b.guarded(thread(b, 0), || b.mbarrier_invalidate(full));
    }),
    // A fence before a relaxed arrival at the cluster's barrier has the effect of a release.
    case("a relaxed arrival publishes what a fence released", Rule::Race, 32, |b, broken| {
        let (leads, at) = pair(b);
        b.if_uniform(leads, || b.store(at, 1.0));
        if !broken {
            b.fence(FenceInst::AcqRelCluster);
        }
        b.cluster_arrive_relaxed();
        b.cluster_wait();
        b.if_uniform(!leads, || _ = b.load::<F32>(at));
    })
    .cluster(2),
];

/// A buffer that belongs to another memory is refused.
#[test]
fn buffers_are_of_the_memory_that_the_kernel_runs_on() {
    let kernel = Kernel::build("nothing", Launch::threads(32), |b| b.sync_cta());
    let buffer = Memory::new().alloc("z", 16);
    let outcome = Simulation::new(&kernel).predecessor_writes(vec![buffer]).run(&mut Memory::new());
    assert_eq!(outcome, Err(SimError::Buffer { address: buffer.address(), bytes: 16 }));
}
