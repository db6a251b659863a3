//! Protocols of real kernels that are right although they look bold: no finding, and the same result, under every
//! schedule.

use fa3_ir::lang::*;
use fa3_ir::*;
use fa3_sim::{Buffer, Memory, Simulation};

use crate::rules::{descriptor, fill, init, own_word, thread};
use crate::samples::{assert_clean, bytes_of, floats, policies};

/// Runs a kernel of pointers x (1, 2, 3, ...), y (nothing), s (zero words) under every schedule; what y holds must be
/// the same.
fn results(kernel: &Kernel, grid: u32, floats_of_x: usize, bytes_of_y: usize) -> Vec<f32> {
    let x: Vec<f32> = (1..=floats_of_x).map(|i| i as f32).collect();
    let mut first: Option<Vec<f32>> = None;
    for policy in policies() {
        let mut memory = Memory::new();
        let bx = memory.alloc_from("x", &bytes_of(&x));
        let by = memory.alloc("y", bytes_of_y);
        let bs = memory.alloc_from("s", &[0; 64]);
        memory.expect_written_once(by);
        let buffer = |name: &str| -> Buffer {
            match name {
                "x" => bx,
                "y" => by,
                _ => bs,
            }
        };
        let args = kernel.params.iter().map(|param| match param.kind {
            ParamKind::TensorMap(shape) => {
                let (elements, row) =
                    (floats_of_x as u64 * 4 / u64::from(shape.elem.bytes()), u64::from(shape.dims()[0]));
                let view =
                    TensorView::contiguous(buffer(&param.name).address(), &[row, elements / row], shape.elem);
                ArgValue::Tensor(view)
            }
            ParamKind::U32 | ParamKind::U64 | ParamKind::F32 | ParamKind::Pointer(_) => {
                ArgValue::Pointer(buffer(&param.name).address())
            }
        });
        let simulation = Simulation::new(kernel).grid([grid, 1, 1]).args(args.collect()).policy(policy);
        assert_clean(&simulation.run(&mut memory).unwrap());
        let y = floats(&memory, by);
        assert_eq!(*first.get_or_insert(y.clone()), y, "{policy:?}");
    }
    first.unwrap_or_default()
}

/// A persistent kernel: one thread fetches tile numbers from a counter in global memory and loads the tiles, four
/// warps double them, and store them by way of shared memory.
#[test]
fn tiles_from_a_counter() {
    const TILES: u32 = 7;
    let kernel = Kernel::build("persistent", Launch::threads(160), |b| {
        let (x, y, counter) = (
            b.param_pointer("x", Elem::F32),
            b.param_pointer("y", Elem::F32),
            b.param_pointer("s", Elem::U32),
        );
        let (full, empty) = (b.mbarriers("full", 1, 1), b.mbarriers("empty", 1, 4));
        let (tile, out, number) =
            (b.region("tile", 512, 128), b.region("out", 512, 128), b.region("number", 4, 4));
        let written = b.barrier("written", 128);
        let first = thread(b, 0);
        b.guarded(first, || {
            b.mbarrier_init(full, 1);
            b.mbarrier_init(empty, 4);
        });
        b.fence(FenceInst::MbarrierInit);
        b.sync_cta();
        b.role(Role::new("producer", 0..1), || {
            b.if_lanes(b.elect(), || {
                let parity = b.var("parity", 1);
                b.repeat(|| {
                    let next = b.atomic_add_u32(counter, 1);
                    b.mbarrier_wait(empty, parity);
                    parity.set(parity ^ 1);
                    b.store(number, next);
                    let over = next.ge(TILES);
                    b.mbarrier_arrive_expect(full, over.select(0, 512));
                    b.break_if(over);
                    b.bulk_load(tile, next.mad_wide(512, x), 512, full, LoadOptions::default());
                });
            });
        });
        b.role(Role::new("consumers", 1..5), || {
            let elected = b.elect();
            let stores = thread(b, 32);
            let (tid, tile_at, out_at) = (b.tid(), b.address(tile), b.address(out));
            let word = tid - 32;
            let (from, to) = (word.mad(4, tile_at), word.mad(4, out_at));
            let parity = b.var("parity", 0);
            b.repeat(|| {
                b.mbarrier_wait(full, parity);
                parity.set(parity ^ 1);
                let next = b.load::<B32>(number);
                b.break_if(next.ge(TILES));
                let value = b.load::<F32>(from);
                // Generic reads come before the next load.
                b.fence(FenceInst::ProxyAsyncShared);
                b.warp_sync();
                b.guarded(elected, || b.mbarrier_arrive(empty));
                let doubled = value * 2.0;
                // The last store has read what is overwritten now.
                b.if_lanes(stores, || b.bulk_wait_read(0));
                b.sync(written);
                b.store(to, doubled);
                b.fence(FenceInst::ProxyAsyncShared);
                b.sync(written);
                b.if_lanes(stores, || {
                    b.bulk_store(next.mad_wide(512, y), out, 512);
                    b.bulk_commit();
                });
            });
            b.if_lanes(stores, || b.bulk_wait_read(0));
        });
    });
    let expected: Vec<f32> = (1..=TILES * 128).map(|i| 2.0 * i as f32).collect();
    assert_eq!(results(&kernel, 3, (TILES * 128) as usize, (TILES * 512) as usize), expected);
}

/// Both CTAs of a cluster load half of each tile, for both; a stage is filled again when both have released it.
#[test]
fn multicast_rings() {
    const ROUNDS: u32 = 5;
    let kernel = Kernel::build("multicast", Launch::threads(64).cluster(2), |b| {
        let map = b.param_tensor_map("x", BoxShape::new(Elem::F32, &[32, 2], Swizzle::B128));
        let y = b.param_pointer("y", Elem::F32);
        let (full, empty, tile) =
            (b.mbarriers("full", 1, 1), b.mbarriers("empty", 1, 2), b.region("tile", 2048, 1024));
        let (first, rank) = (thread(b, 0), b.cluster_cta_rank());
        b.guarded(first, || {
            b.mbarrier_init(full, 1);
            b.mbarrier_init(empty, 2);
        });
        b.fence(FenceInst::MbarrierInit);
        b.cluster_arrive();
        b.cluster_wait();
        b.role(Role::new("producer", 0..1), || {
            b.if_lanes(b.elect(), || {
                let half = rank.mad(1024, b.address(tile));
                let row = rank << 1;
                b.for_each((0, ROUNDS), 1, |round| {
                    b.mbarrier_wait(empty, (round & 1) ^ 1);
                    b.mbarrier_arrive_expect(full, 512);
                    let row = round.mad(4, row);
                    b.tma_load(half, map, (0, row), full, LoadOptions::multicast(3u16));
                });
                // Nobody arrives at a CTA that has gone.
                b.mbarrier_wait(empty, (ROUNDS - 1) & 1);
            });
        });
        b.role(Role::new("consumer", 1..2), || {
            let elected = b.elect();
            let (lane, start) = (b.lane_id(), b.address(tile));
            let remote = [0, 1].map(|cta| b.map_address(empty, cta));
            let sum = b.var("sum", 0.0);
            b.for_each((0, ROUNDS), 1, |round| {
                b.mbarrier_wait(full, round & 1);
                // Row r of the halves lies at 128 r, its chunks swizzled by r mod 8.
                for (offset, swizzle) in [(0, 0), (128, 16), (1024, 0), (1152, 16)] {
                    sum.set(sum + b.load::<F32>((((lane << 2) ^ swizzle) + start).at(offset)));
                }
                b.fence(FenceInst::ProxyAsync);
                b.warp_sync();
                b.guarded(elected, || remote.iter().for_each(|&at| b.mbarrier_arrive_remote(at)));
            });
            b.store(lane.mad_wide(4, rank.mad_wide(128, y)), sum);
        });
    });
    let columns = |column: u32| (0..4 * ROUNDS).map(|row| (32 * row + column + 1) as f32).sum::<f32>();
    let expected: Vec<f32> = (0..64).map(|i| columns(i % 32)).collect();
    assert_eq!(results(&kernel, 2, (ROUNDS * 128) as usize, 256), expected);
}

/// A ring that cp.async fills: the copies arrive at the mbarrier themselves, and the readers fence.
#[test]
fn asynchronous_copies_into_a_ring() {
    let kernel = Kernel::build("copies", Launch::threads(256), |b| {
        let (x, y) = (b.param_pointer("x", Elem::F32), b.param_pointer("y", Elem::F32));
        let (full, empty) = (b.mbarriers("full", 1, 128), b.mbarriers("empty", 1, 4));
        let (factor, tile) = (b.region("factor", 8192, 1024), b.region("tile", 8192, 1024));
        let (first, tid) = (thread(b, 0), b.tid());
        b.guarded(first, || {
            b.mbarrier_init(full, 128);
            b.mbarrier_init(empty, 4);
        });
        b.fence(FenceInst::MbarrierInit);
        b.sync_cta();
        b.role(Role::new("producer", 0..4), || {
            let (to, from) = (tid.mad(64, b.address(tile)), tid.mad_wide(64, x));
            b.for_each((0, 3), 1, |round| {
                b.mbarrier_wait(empty, (round & 1) ^ 1);
                for offset in [0, 16, 32, 48] {
                    b.copy_async(to.at(offset), from.at(offset), 16);
                }
                b.mbarrier_arrive_copied(full);
            });
        });
        b.role(Role::new("consumer", 4..8), || {
            let elected = b.elect();
            let (start, thread) = (b.address(factor), tid - 128);
            let at = thread.mad(64, start);
            [0, 16, 32, 48].iter().for_each(|&offset| b.store_vector(at.at(offset), [0.0; 4]));
            b.fence(FenceInst::ProxyAsyncShared);
            let all = b.barrier("all", 128);
            b.sync(all);
            let (a, tile) = (descriptor(b, factor), descriptor(b, tile));
            let acc = b.accumulator("acc", 32);
            acc.iter().for_each(|&x| x.set(1.0));
            b.for_each((0, 3), 1, |round| {
                b.mbarrier_wait(full, round & 1);
                // The copies were of the generic proxy.
                b.fence(FenceInst::ProxyAsyncShared);
                b.wgmma_fence();
                b.wgmma(Mma::new(WgmmaType::Bf16, &acc, a, tile).accumulate());
                b.wgmma_commit();
                b.wgmma_wait(0);
                b.guarded(elected, || b.mbarrier_arrive(empty));
            });
            b.store(thread.mad_wide(4, y), acc[5]);
        });
    });
    // 0 · x + 1, whatever the small numbers of x are as bf16.
    assert_eq!(results(&kernel, 1, 2048, 512), vec![1.0; 128]);
}

/// Only the first warpgroup waits for the data; the second relies on the order of a named barrier.
#[test]
fn order_is_transitive_over_named_barriers() {
    let kernel = Kernel::build("transitive", Launch::threads(64), |b| {
        let (x, y) = (b.param_pointer("x", Elem::F32), b.param_pointer("y", Elem::F32));
        let (full, tile, turn) =
            (b.mbarriers("full", 1, 1), b.region("tile", 128, 128), b.barrier("turn", 64));
        init(b, full, 1);
        let (first, lane) = (thread(b, 0), b.lane_id());
        b.if_lanes(first, || {
            b.mbarrier_arrive_expect(full, 128);
            b.bulk_load(tile, x, 128, full, LoadOptions::default());
        });
        let at = lane.mad(4, b.address(tile));
        b.role(Role::new("first", 0..1), || {
            b.mbarrier_wait(full, 0);
            b.arrive(turn);
        });
        b.role(Role::new("second", 1..2), || {
            b.sync(turn);
            let value = b.load::<F32>(at);
            b.store(lane.mad_wide(4, y), value);
        });
    });
    assert_eq!(results(&kernel, 1, 32, 128), (1..=32).map(|i| i as f32).collect::<Vec<f32>>());
}

/// Additions of several CTAs in the order of a flag, for a deterministic dQ. Rounding would show another order.
#[test]
fn additions_in_the_order_of_a_flag() {
    let kernel = Kernel::build("ordered", Launch::threads(128), |b| {
        let (x, y, flag) = (
            b.param_pointer("x", Elem::F32),
            b.param_pointer("y", Elem::F32),
            b.param_pointer("s", Elem::U32),
        );
        let tile = b.region("tile", 8192, 1024);
        let (cta, first) = (b.cta_x(), thread(b, 0));
        fill(b, tile);
        let (own, start, tid) = (own_word(b, x), b.address(tile), b.tid());
        let value = b.load::<F32>(own) * (cta.to_f32() * 0.37).ex2();
        let at = tid.mad(4, start);
        b.warp_sync();
        b.sync_cta();
        b.store(at, value);
        b.fence(FenceInst::ProxyAsyncShared);
        b.sync_cta();
        b.if_lanes(first, || {
            b.repeat(|| b.break_if(b.load_acquire(flag).eq(cta)));
            b.fence(FenceInst::ProxyAsyncGlobal);
            let leads = cta.eq(0);
            b.if_else_lanes(leads, || b.bulk_store(y, tile, 512), || b.bulk_reduce_add_f32(y, tile, 512));
            b.bulk_commit();
            b.bulk_wait(0);
            b.fence(FenceInst::ProxyAsyncGlobal);
            b.store_release(flag, cta + 1);
        });
    });
    let sums = results(&kernel, 5, 128, 512);
    let weights = (0..5).map(|cta| (f64::from(cta) * 0.37).exp2()).sum::<f64>();
    for (i, sum) in sums.into_iter().enumerate() {
        assert!((f64::from(sum) / (weights * (i + 1) as f64) - 1.0).abs() < 1e-6);
    }
}
