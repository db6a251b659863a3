//! Tensor and bulk copies.

use fa3_ir::lang::*;
use fa3_sim::{Policy, Rule};

use super::{Case, begin_load, case, fill, filled, init, own_cell, own_word, says, thread, warp};

/// Boxes of 64 x 64 elements of 2 bytes with 128-byte swizzle: 8 KiB.
fn map(b: &Builder, name: &str) -> TensorMap {
    b.param_tensor_map(name, BoxShape::new(Elem::Bf16, &[64, 64], Swizzle::B128))
}

/// Loads a box in thread 0. All threads wait for it.
fn load_box(b: &Builder, (column, offset): (i32, i32), expected: u32) {
    let map = map(b, "x");
    let (full, tile) = (b.mbarriers("full", 1, 1), b.region("tile", 16384, 1024));
    init(b, full, 1);
    b.if_lanes(thread(b, 0), || {
        b.mbarrier_arrive_expect(full, expected);
        b.tma_load(tile.at(offset), map, (column, 0), full, LoadOptions::default());
    });
    b.mbarrier_wait(full, 0);
}

/// Copies to global memory in thread 0, in a group that this thread waits for.
fn store(b: &Builder, copy: impl FnOnce()) {
    b.if_lanes(thread(b, 0), || {
        copy();
        b.bulk_commit();
        b.bulk_wait_read(0);
    });
}

/// Waits until copies have read their source. If `whole`, waits until their results have been written.
fn wait(b: &Builder, whole: bool) {
    if whole { b.bulk_wait(0) } else { b.bulk_wait_read(0) }
}

pub(super) const CASES: &[Case] = &[
    case("boxes lie at whole patterns", Rule::T1, 32, |b, broken| {
        load_box(b, (0, if broken { 128 } else { 1024 }), if broken { 0 } else { 8192 });
    }),
    // An H100 stops with an illegal instruction if a row begins elsewhere, for loads and for stores.
    case("rows of boxes begin at multiples of 16 bytes", Rule::T1, 32, |b, broken| {
        load_box(b, (if broken { -4 } else { -8 }, 0), 8192);
    }),
    case("stores begin in the tensor", Rule::T1, 128, |b, broken| {
        let (map, tile) = (map(b, "y"), filled(b));
        store(b, || b.tma_store(map, (0, -i32::from(broken)), tile));
    }),
    case("generic writes are fenced before stores read them", Rule::W4, 128, |b, broken| {
        let (map, tile) = (map(b, "y"), b.region("tile", 8192, 1024));
        fill(b, tile);
        if !broken {
            b.fence(FenceInst::ProxyAsyncShared);
        }
        b.sync_cta();
        store(b, || b.tma_store(map, (0, 0), tile));
    }),
    // A pipeline of one stage is used twice. Its readers fence before they release the stage.
    case("generic reads are fenced before loads overwrite", Rule::W5, 64, |b, broken| {
        pipeline(b, !broken, true)
    }),
    // The producer must wait for the readers.
    case("stages are released before they are filled again", Rule::Race, 64, UNRELEASED),
    case("sources of stores are not overwritten", Rule::T2, 128, |b, broken| {
        let (y, tile, first) = (b.param_pointer("y", Elem::F32), filled(b), thread(b, 0));
        b.if_lanes(first, || {
            b.bulk_store(y, tile, 8192);
            b.bulk_commit();
            b.bulk_wait_read(u32::from(broken));
        });
        b.sync_cta();
        fill(b, tile);
        b.if_lanes(first, || b.bulk_wait_read(0));
    }),
    case("results of stores are there after the whole wait", Rule::T2, 128, |b, broken| {
        let (y, tile) = (b.param_pointer("y", Elem::F32), filled(b));
        b.if_lanes(thread(b, 0), || {
            b.bulk_store(y, tile, 8192);
            b.bulk_commit();
            wait(b, !broken);
            _ = b.load::<F32>(y);
        });
    }),
    // Two CTAs add to the same memory, and a flag in global memory decides their order. Only a wait for the whole copy
    // makes the first addition visible.
    case("a flag after the source is read orders nothing", Rule::T2, 128, |b, broken| {
        let (x, flag) = (b.param_pointer("x", Elem::F32), b.param_pointer("s", Elem::U32));
        let tile = filled(b);
        let leads = || {
            b.bulk_reduce_add_f32(x, tile, 8192);
            b.bulk_commit();
            wait(b, !broken);
            b.store_release(flag, 1);
        };
        let follows = || {
            b.repeat(|| b.break_if(b.load_acquire(flag).eq(1)));
            _ = b.load::<F32>(x);
        };
        b.if_lanes(thread(b, 0), || b.if_else_lanes(b.cta_x().eq(0), leads, follows));
    })
    .grid(2),
    case("the thread that commits waits", Rule::T3, 128, |b, broken| {
        let (y, tile) = (b.param_pointer("y", Elem::F32), filled(b));
        b.if_lanes(thread(b, 0), || {
            b.bulk_store(y, tile, 8192);
            b.bulk_commit();
        });
        b.if_lanes(thread(b, u32::from(broken)), || b.bulk_wait_read(0));
    }),
    // All lanes may commit and wait, as long as the lane that copies is among them.
    case("copies are committed by their thread", Rule::T3, 128, |b, broken| {
        let (y, tile) = (b.param_pointer("y", Elem::F32), filled(b));
        b.if_uniform(warp(b, 0), || {
            b.guarded(thread(b, 31), || b.bulk_store(y, tile, 8192));
            if broken {
                b.guarded(thread(b, 3), || b.bulk_commit());
            }
            b.bulk_commit();
            b.bulk_wait_read(0);
        });
    }),
    case("loads of the same bytes are ordered", Rule::T4, 32, |b, broken| {
        let x = b.param_pointer("x", Elem::F32);
        let (full, tile) = (b.mbarriers("full", 1, 1), b.region("tile", 512, 16));
        init(b, full, 1);
        b.if_lanes(thread(b, 0), || {
            b.mbarrier_arrive_expect(full, 512);
            b.bulk_load(tile, x, 256, full, LoadOptions::default());
            b.bulk_load(tile.at(if broken { 128 } else { 256 }), x, 256, full, LoadOptions::default());
        });
        b.mbarrier_wait(full, 0);
    }),
    case("stores of the same bytes are ordered", Rule::T4, 128, |b, broken| {
        let (y, tile) = (b.param_pointer("y", Elem::F32), filled(b));
        store(b, || {
            b.bulk_store(y, tile, 4096);
            b.bulk_store(y.at(if broken { 0 } else { 4096 }), tile, 4096);
        });
    }),
    case("no CTA exits while a copy reads its memory", Rule::T5, 128, |b, broken| {
        let (y, tile) = (b.param_pointer("y", Elem::F32), filled(b));
        b.if_lanes(thread(b, 0), || {
            b.bulk_store(y, tile, 8192);
            b.bulk_commit();
            if !broken {
                b.bulk_wait_read(0);
            }
        });
    }),
    case("a CTA outlives the arrivals of others", Rule::T5, 32, |b, broken| {
        let done = b.mbarriers("done", 1, 1);
        b.init_mbarriers();
        let waits = || {
            if !broken {
                b.mbarrier_wait(done, 0);
            }
        };
        let arrives = || {
            let remote = b.map_address(done, 0);
            b.guarded(thread(b, 0), || b.mbarrier_arrive_remote(remote));
        };
        b.if_else_uniform(b.cluster_cta_rank().eq(0), waits, arrives);
    })
    .cluster(2),
    // An exit counts as an arrival at the cluster's barrier. A warp may wait there after other warps have exited.
    case("an exit is an arrival at the cluster's barrier", Rule::T5, 64, |b, broken| {
        let done = b.mbarriers("done", 1, 1);
        b.init_mbarriers();
        let (visits, remote) = (b.cluster_cta_rank().eq(1), b.map_address(done, 0));
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
    .cluster(2),
    // A box goes to both CTAs of a cluster: each CTA expects all of its bytes.
    case("every target of a multicast expects its bytes", Rule::M5, 128, |b, broken| {
        let map = map(b, "x");
        let (full, tile) = (b.mbarriers("full", 1, 1), b.region("tile", 8192, 1024));
        let (first, leads) = (thread(b, 0), b.cluster_cta_rank().eq(0));
        let bytes = leads.select(8192, if broken { 4096 } else { 8192 });
        b.if_lanes(first, || {
            b.mbarrier_init(full, 1);
            b.fence(FenceInst::MbarrierInit);
            b.mbarrier_arrive_expect(full, bytes);
        });
        b.cluster_sync();
        let both = LoadOptions::multicast(3u16);
        b.if_lanes(first & leads, || b.tma_load(tile, map, (0, 0), full, both));
        b.mbarrier_wait(full, 0);
        _ = b.load::<F32>(own_cell(b, tile));
        b.cluster_sync();
    })
    .cluster(2),
    // A fence must lie between a write to global memory and a TMA load of the written bytes.
    case("generic writes of global memory are fenced", Rule::W4, 64, |b, broken| {
        let (full, tile) = (b.mbarriers("full", 1, 1), b.region("tile", 256, 16));
        init(b, full, 1);
        b.store(own_word(b, b.param_pointer("x_written", Elem::F32)), 1.0);
        b.fence(if broken { FenceInst::ProxyAsyncShared } else { FenceInst::ProxyAsyncGlobal });
        b.sync_cta();
        begin_load(b, tile, 256, full);
        b.mbarrier_wait(full, 0);
    }),
    // cp.async arrives at an mbarrier when the copy is complete.
    case("asynchronous copies are waited for", Rule::Race, 64, |b, broken| {
        let x = b.param_pointer("x", Elem::F32);
        let (full, tile) = (b.mbarriers("full", 1, 32), b.region("tile", 512, 16));
        init(b, full, 32);
        let (lane, start) = (b.lane_id(), b.address(tile));
        let (to, from) = (lane.mad(16, start), lane.mad_wide(16, x));
        let copies = || {
            b.copy_async(to, from, 16);
            if broken { b.mbarrier_arrive(full) } else { b.mbarrier_arrive_copied(full) }
        };
        let reads = || {
            b.mbarrier_wait(full, 0);
            _ = b.load::<F32>(to);
        };
        b.if_else_uniform(warp(b, 0), copies, reads);
    }),
];

const UNRELEASED: fn(&Builder, bool) = |b, broken| pipeline(b, true, !broken);

/// The copy is later than the read.
#[test]
fn a_late_copy_misses_an_empty_mbarrier() {
    let report = case("pipeline", Rule::Race, 64, UNRELEASED).report(Policy::Lazy);
    says(&report, &["missing: an empty mbarrier: readers arrive at it"]);
}

fn pipeline(b: &Builder, fence: bool, wait: bool) {
    let x = b.param_pointer("x", Elem::F32);
    let [first, second, empty] = ["first", "second", "empty"].map(|name| b.mbarriers(name, 1, 1));
    let tile = b.region("tile", 256, 16);
    b.init_mbarriers();
    b.role(Role::new("producer", 0..1), || {
        b.if_lanes(b.elect(), || {
            b.mbarrier_arrive_expect(first, 256);
            b.bulk_load(tile, x, 256, first, LoadOptions::default());
            // Without the wait for the readers, the producer still knows that the first load has ended.
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
