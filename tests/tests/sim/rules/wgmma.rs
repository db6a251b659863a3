//! Rules of matrix products.

use fa3_ir::lang::*;
use fa3_ir::*;
use fa3_sim::Rule;

use super::{Case, case, fill, own_word, thread};

/// Descriptors of A and B.
type Operands<'k> = (V<'k, B64>, V<'k, B64>);

/// The descriptor of a K-major tile.
fn descriptor(b: &Builder, region: Region) -> V<'_, B64> {
    b.address(region).bfe(4, 14).to_u64() | Layout::k_major(Swizzle::B128).descriptor()
}

/// The regions of two tiles of 64 x 64, and their descriptors.
fn tiles(b: &Builder) -> ([Region; 2], Operands<'_>) {
    let tiles = ["a", "b"].map(|name| b.region(name, 8192, 1024));
    (tiles, (descriptor(b, tiles[0]), descriptor(b, tiles[1])))
}

/// Two tiles of 64 x 64, written and fenced.
fn operands(b: &Builder) -> Operands<'_> {
    let (regions, tiles) = tiles(b);
    write(b, regions);
    tiles
}

/// Writes and fences tiles.
fn write(b: &Builder, tiles: [Region; 2]) {
    tiles.iter().for_each(|&tile| fill(b, tile));
    b.fence(FenceInst::ProxyAsyncShared);
    b.sync_cta();
}

fn product(acc: &[Var<F32>], (a, b): Operands) -> Mma {
    Mma::new(WgmmaType::Bf16, acc, a, b)
}

/// Begins a product as a group of its own.
fn begin<'k>(b: &'k Builder, tiles: Operands) -> Vec<Var<'k, F32>> {
    let acc = b.accumulator("acc", 32);
    b.wgmma_fence();
    b.wgmma(product(&acc, tiles));
    b.wgmma_commit();
    acc
}

/// Waits for a product, and stores the first accumulator.
fn end(b: &Builder, acc: &[Var<F32>]) {
    b.wgmma_wait(0);
    let y = b.param_pointer("y", Elem::F32);
    b.store(own_word(b, y), acc[0]);
}

fn multiply(b: &Builder, tiles: Operands) {
    end(b, &begin(b, tiles));
}

pub(super) const CASES: &[Case] = &[
    case("accumulators are fenced", Rule::W1, 128, |b, broken| {
        let tiles = operands(b);
        let acc = begin(b, tiles);
        b.wgmma_wait(0);
        acc[0].set(acc[0] * 2.0);
        if !broken {
            b.wgmma_fence();
        }
        b.wgmma(product(&acc, tiles).accumulate());
        b.wgmma_commit();
        end(b, &acc);
    }),
    case("factors are fenced", Rule::W1, 128, |b, broken| {
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
        end(b, &acc);
    }),
    case("accumulators are not read in flight", Rule::W2, 128, |b, broken| {
        let acc = begin(b, operands(b));
        b.wgmma_wait(u32::from(broken));
        b.store(own_word(b, b.param_pointer("y", Elem::F32)), acc[0]);
    }),
    case("factors are not overwritten in flight", Rule::W2, 128, |b, broken| {
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
        end(b, &acc);
    }),
    case("products are committed", Rule::W3, 128, |b, broken| {
        let tiles = operands(b);
        let acc = b.accumulator("acc", 32);
        b.wgmma_fence();
        b.wgmma(product(&acc, tiles));
        if !broken {
            b.wgmma_commit();
        }
        end(b, &acc);
    }),
    case("generic writes are fenced before products read them", Rule::W4, 128, |b, broken| {
        let (regions, tiles) = tiles(b);
        regions.iter().for_each(|&tile| fill(b, tile));
        if !broken {
            b.fence(FenceInst::ProxyAsyncShared);
        }
        b.sync_cta();
        multiply(b, tiles);
    }),
    // The reader may also fence the writes, after the barrier.
    case("fences of global memory do not order shared memory", Rule::W4, 128, |b, broken| {
        let (regions, tiles) = tiles(b);
        regions.iter().for_each(|&tile| fill(b, tile));
        b.sync_cta();
        b.fence(if broken { FenceInst::ProxyAsyncGlobal } else { FenceInst::ProxyAsync });
        multiply(b, tiles);
    }),
    // cp.async writes through the generic proxy.
    case("copies of the generic proxy are fenced before products read them", Rule::W4, 128, |b, broken| {
        let x = b.param_pointer("x", Elem::F32);
        let ([tile_a, tile_b], tiles) = tiles(b);
        fill(b, tile_b);
        let (to, from) = (b.tid().mad(64, b.address(tile_a)), b.tid().mad_wide(64, x));
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
        multiply(b, tiles);
    }),
    case("operands are not overwritten in flight", Rule::W6, 128, |b, broken| {
        let (regions, tiles) = tiles(b);
        write(b, regions);
        let acc = begin(b, tiles);
        b.wgmma_wait(u32::from(broken));
        b.sync_cta();
        b.guarded(thread(b, 0), || b.store(regions[1], 1.0));
        end(b, &acc);
    }),
    // All warps read B, so the wait of one warp is not enough: another warp may not even have begun.
    case("every warp waits before an operand is overwritten", Rule::W6, 128, |b, broken| {
        let (regions, tiles) = tiles(b);
        write(b, regions);
        multiply(b, tiles);
        if !broken {
            b.sync_cta();
        }
        b.guarded(thread(b, 0), || b.store(regions[1], 1.0));
    })
    .or(Rule::Race),
    // Rows 16w to 16w + 15 of A belong to warp w, which may write and multiply them without a barrier. Thread t writes
    // half of a row: of its own warp's rows, or if broken of the next warp's. The schedule decides whether the write or
    // the product comes first.
    case("rows of A are a warp's own", Rule::Race, 128, |b, broken| {
        let (regions, tiles) = tiles(b);
        write(b, regions);
        let (tid, start) = (b.tid(), b.address(regions[0]));
        let at = (if broken { tid ^ 32 } else { tid }).mad(64, start);
        for offset in [0, 16, 32, 48] {
            b.store_vector(at.at(offset), [0.0; 4]);
        }
        b.fence(FenceInst::ProxyAsyncShared);
        b.warp_sync();
        multiply(b, tiles);
    })
    .or(Rule::W6),
    case("warps agree on descriptors", Rule::W7, 128, |b, broken| {
        let (tile_a, tile_b) = operands(b);
        multiply(b, (tile_a, tile_b + b.tid().ge(96).select(u64::from(broken) * 2, 0u64)));
    }),
    case("warps agree on the number of products", Rule::W7, 128, |b, broken| {
        let tiles = operands(b);
        let some = b.tid().lt(if broken { 96 } else { 128 });
        b.if_uniform(some, || multiply(b, tiles));
    }),
    case("descriptors begin a pattern", Rule::W8, 128, |b, broken| {
        let (tile_a, tile_b) = operands(b);
        multiply(b, (tile_a, tile_b + descriptor_address(256 * u32::from(broken))));
    }),
    case("descriptors stay in shared memory", Rule::W8, 128, |b, broken| {
        let (tile_a, tile_b) = operands(b);
        multiply(b, (tile_a, tile_b + descriptor_address(1024 * u32::from(broken))));
    }),
];
