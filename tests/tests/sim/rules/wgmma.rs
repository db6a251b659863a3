//! Matrix products.

use fa3_ir::lang::*;
use fa3_ir::*;
use fa3_sim::Rule;

use super::{case, descriptor, fill, operands, own_word, thread};

/// Stores the first accumulator.
fn store(b: &Builder, acc: &[Var<F32>]) {
    let y = b.param_pointer("y", Elem::F32);
    let at = own_word(b, y);
    b.store(at, acc[0]);
}

fn product(acc: &[Var<F32>], (a, b): (V<B64>, V<B64>)) -> Mma {
    Mma::new(WgmmaType::Bf16, acc, a, b)
}

#[test]
fn accumulators_are_fenced() {
    case(Rule::W1, 128, |b, broken| {
        let tiles = operands(b);
        let acc = b.accumulator("acc", 32);
        b.wgmma_fence();
        b.wgmma(product(&acc, tiles));
        b.wgmma_commit();
        b.wgmma_wait(0);
        acc[0].set(acc[0] * 2.0);
        if !broken {
            b.wgmma_fence();
        }
        b.wgmma(product(&acc, tiles).accumulate());
        b.wgmma_commit();
        b.wgmma_wait(0);
        store(b, &acc);
    })
    .check();
}

#[test]
fn factors_are_fenced() {
    case(Rule::W1, 128, |b, broken| {
        let (_, tile) = operands(b);
        let acc = b.accumulator("acc", 32);
        if broken {
            b.wgmma_fence();
        }
        let factors = [0u32, 1, 2, 3].map(|bits| b.copy(bits));
        if !broken {
            b.wgmma_fence();
        }
        b.wgmma(Mma::with_registers(WgmmaType::Bf16, &acc, factors, tile));
        b.wgmma_commit();
        b.wgmma_wait(0);
        store(b, &acc);
    })
    .check();
}

#[test]
fn accumulators_are_not_read_in_flight() {
    case(Rule::W2, 128, |b, broken| {
        let tiles = operands(b);
        let acc = b.accumulator("acc", 32);
        b.wgmma_fence();
        b.wgmma(product(&acc, tiles));
        b.wgmma_commit();
        b.wgmma_wait(u32::from(broken));
        store(b, &acc);
    })
    .check();
}

#[test]
fn factors_are_not_overwritten_in_flight() {
    case(Rule::W2, 128, |b, broken| {
        let (_, tile) = operands(b);
        let acc = b.accumulator("acc", 32);
        let factors = [0u32, 1, 2, 3].map(|bits| b.var("p", bits));
        b.wgmma_fence();
        b.wgmma(Mma::with_registers(WgmmaType::Bf16, &acc, factors, tile));
        b.wgmma_commit();
        if !broken {
            b.wgmma_wait(0);
        }
        factors[2].set(7);
        b.wgmma_wait(0);
        store(b, &acc);
    })
    .check();
}

#[test]
fn products_are_committed() {
    case(Rule::W3, 128, |b, broken| {
        let tiles = operands(b);
        let acc = b.accumulator("acc", 32);
        b.wgmma_fence();
        b.wgmma(product(&acc, tiles));
        if !broken {
            b.wgmma_commit();
        }
        b.wgmma_wait(0);
        store(b, &acc);
    })
    .check();
}

#[test]
fn generic_writes_are_fenced_before_products_read_them() {
    case(Rule::W4, 128, |b, broken| {
        let tiles = [b.region("a", 8192, 1024), b.region("b", 8192, 1024)];
        tiles.iter().for_each(|&tile| fill(b, tile));
        if !broken {
            b.fence(FenceInst::ProxyAsyncShared);
        }
        b.sync_cta();
        let tiles = (descriptor(b, tiles[0]), descriptor(b, tiles[1]));
        let acc = b.accumulator("acc", 32);
        b.wgmma_fence();
        b.wgmma(product(&acc, tiles));
        b.wgmma_commit();
        b.wgmma_wait(0);
        store(b, &acc);
    })
    .check();
}

/// A fence by the reader, after the barrier, is on the path too.
#[test]
fn fences_of_global_memory_do_not_order_shared_memory() {
    case(Rule::W4, 128, |b, broken| {
        let tiles = [b.region("a", 8192, 1024), b.region("b", 8192, 1024)];
        tiles.iter().for_each(|&tile| fill(b, tile));
        b.sync_cta();
        b.fence(if broken { FenceInst::ProxyAsyncGlobal } else { FenceInst::ProxyAsync });
        let tiles = (descriptor(b, tiles[0]), descriptor(b, tiles[1]));
        let acc = b.accumulator("acc", 32);
        b.wgmma_fence();
        b.wgmma(product(&acc, tiles));
        b.wgmma_commit();
        b.wgmma_wait(0);
        store(b, &acc);
    })
    .check();
}

/// cp.async writes through the generic proxy.
#[test]
fn copies_of_the_generic_proxy_are_fenced_before_products_read_them() {
    case(Rule::W4, 128, |b, broken| {
        let x = b.param_pointer("x", Elem::F32);
        let (tile_a, tile_b) = (b.region("a", 8192, 1024), b.region("b", 8192, 1024));
        let (tid, start) = (b.tid(), b.address(tile_a));
        fill(b, tile_b);
        let (to, from) = (tid.mad(64, start), tid.mad_wide(64, x));
        for offset in [0, 16, 32, 48] {
            b.copy_async(to.at(offset), from.at(offset), 16);
        }
        if broken {
            b.fence(FenceInst::ProxyAsyncShared);
        }
        b.copy_async_commit();
        b.copy_async_wait(0);
        if !broken {
            b.fence(FenceInst::ProxyAsyncShared);
        }
        b.sync_cta();
        let tiles = (descriptor(b, tile_a), descriptor(b, tile_b));
        let acc = b.accumulator("acc", 32);
        b.wgmma_fence();
        b.wgmma(product(&acc, tiles));
        b.wgmma_commit();
        b.wgmma_wait(0);
        store(b, &acc);
    })
    .check();
}

#[test]
fn operands_are_not_overwritten_in_flight() {
    case(Rule::W6, 128, |b, broken| {
        let (tile_a, tile_b) = (b.region("a", 8192, 1024), b.region("b", 8192, 1024));
        fill(b, tile_a);
        fill(b, tile_b);
        b.fence(FenceInst::ProxyAsyncShared);
        b.sync_cta();
        let tiles = (descriptor(b, tile_a), descriptor(b, tile_b));
        let acc = b.accumulator("acc", 32);
        b.wgmma_fence();
        b.wgmma(product(&acc, tiles));
        b.wgmma_commit();
        b.wgmma_wait(u32::from(broken));
        b.sync_cta();
        let first = thread(b, 0);
        b.guarded(first, || b.store(tile_b, 1.0));
        b.wgmma_wait(0);
        store(b, &acc);
    })
    .check();
}

/// All warps read B: the wait of one of them is not enough. (Another one may not even have begun.)
#[test]
fn every_warp_waits_before_an_operand_is_overwritten() {
    case(Rule::W6, 128, |b, broken| {
        let (tile_a, tile_b) = (b.region("a", 8192, 1024), b.region("b", 8192, 1024));
        fill(b, tile_a);
        fill(b, tile_b);
        b.fence(FenceInst::ProxyAsyncShared);
        b.sync_cta();
        let tiles = (descriptor(b, tile_a), descriptor(b, tile_b));
        let acc = b.accumulator("acc", 32);
        b.wgmma_fence();
        b.wgmma(product(&acc, tiles));
        b.wgmma_commit();
        b.wgmma_wait(0);
        if !broken {
            b.sync_cta();
        }
        let first = thread(b, 0);
        b.guarded(first, || b.store(tile_b, 1.0));
        store(b, &acc);
    })
    .check_either(Rule::Race);
}

/// Rows 16w to 16w + 15 of A are warp w's own: a warp may hand them to itself without a barrier.
#[test]
fn rows_of_a_are_a_warps_own() {
    let of_others = case(Rule::Race, 128, |b, broken| {
        let (tile_a, tile_b) = (b.region("a", 8192, 1024), b.region("b", 8192, 1024));
        fill(b, tile_a);
        fill(b, tile_b);
        b.fence(FenceInst::ProxyAsyncShared);
        b.sync_cta();
        // Thread t writes half a row: of its own warp's 16, or of the next one's.
        let (tid, start) = (b.tid(), b.address(tile_a));
        let by = if broken { tid ^ 32 } else { tid };
        let at = by.mad(64, start);
        for offset in [0, 16, 32, 48] {
            b.store_vector(at.at(offset), [0.0; 4]);
        }
        b.fence(FenceInst::ProxyAsyncShared);
        b.warp_sync();
        let tiles = (descriptor(b, tile_a), descriptor(b, tile_b));
        let acc = b.accumulator("acc", 32);
        b.wgmma_fence();
        b.wgmma(product(&acc, tiles));
        b.wgmma_commit();
        b.wgmma_wait(0);
        store(b, &acc);
    });
    // Who comes first, the write or the product, is up to the schedule.
    of_others.check_either(Rule::W6);
}

#[test]
fn warps_agree_on_descriptors() {
    case(Rule::W7, 128, |b, broken| {
        let (tile_a, tile_b) = operands(b);
        let tile_b = tile_b + b.tid().ge(96).select(u64::from(broken) * 2, 0u64);
        let acc = b.accumulator("acc", 32);
        b.wgmma_fence();
        b.wgmma(product(&acc, (tile_a, tile_b)));
        b.wgmma_commit();
        b.wgmma_wait(0);
        store(b, &acc);
    })
    .check();
}

#[test]
fn warps_agree_on_the_number_of_products() {
    case(Rule::W7, 128, |b, broken| {
        let tiles = operands(b);
        let some = b.tid().lt(if broken { 96 } else { 128 });
        let acc = b.accumulator("acc", 32);
        acc.iter().for_each(|&x| x.set(0.0));
        b.if_uniform(some, || {
            b.wgmma_fence();
            b.wgmma(product(&acc, tiles));
            b.wgmma_commit();
            b.wgmma_wait(0);
        });
        store(b, &acc);
    })
    .check();
}

#[test]
fn descriptors_begin_a_pattern() {
    case(Rule::W8, 128, |b, broken| {
        let (tile_a, tile_b) = operands(b);
        let tile_b = tile_b + descriptor_address(256 * u32::from(broken));
        let acc = b.accumulator("acc", 32);
        b.wgmma_fence();
        b.wgmma(product(&acc, (tile_a, tile_b)));
        b.wgmma_commit();
        b.wgmma_wait(0);
        store(b, &acc);
    })
    .check();
}

#[test]
fn descriptors_stay_in_shared_memory() {
    case(Rule::W8, 128, |b, broken| {
        let (tile_a, tile_b) = operands(b);
        let tile_b = tile_b + descriptor_address(1024 * u32::from(broken));
        let acc = b.accumulator("acc", 32);
        b.wgmma_fence();
        b.wgmma(product(&acc, (tile_a, tile_b)));
        b.wgmma_commit();
        b.wgmma_wait(0);
        store(b, &acc);
    })
    .check();
}
