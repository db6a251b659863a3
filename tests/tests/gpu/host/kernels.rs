//! Small kernels that use every part of the host layer.

use fa3_ir::lang::{B32, Builder, F32, V};
use fa3_ir::{
    BoxShape, Elem, FenceInst, Kernel, Launch, Layout, LoadOptions, Major, Mma, Region, Role, Swizzle,
    WgmmaType,
};

/// The thread's number in the grid of CTAs of 256 threads.
fn index(b: &Builder) -> V<'_, B32> {
    let (tid, cta) = (b.tid(), b.cta_x());
    cta.mad(256, tid)
}

/// D = A · Bᵀ of 64 x n by one warpgroup, A and B loaded as boxes of 64 columns with 128-byte swizzle.
pub(crate) fn one_product(n: u32) -> Kernel {
    Kernel::build("one_product", Launch::threads(128), |b| {
        let box_of = |rows| BoxShape::new(Elem::Bf16, &[64, rows], Swizzle::B128);
        let [map_a, map_b] = [("a", 64), ("b", n)].map(|(name, rows)| b.param_tensor_map(name, box_of(rows)));
        let d = b.param_pointer("d", Elem::F32);
        let full = b.mbarriers("full", 1, 1);
        let (tile_a, tile_b) = (b.region("a", 64 * 128, 1024), b.region("b", n * 128, 1024));
        let tid = b.tid();
        b.if_lanes(tid.eq(0), || {
            b.mbarrier_init(full, 1);
            b.fence(FenceInst::MbarrierInit);
            b.mbarrier_arrive_expect(full, (64 + n) * 128);
            b.tma_load(tile_a, map_a, (0, 0), full, LoadOptions::default());
            b.tma_load(tile_b, map_b, (0, 0), full, LoadOptions::default());
        });
        b.sync_cta();
        b.mbarrier_wait(full, 0);

        let layout = Layout::k_major(Swizzle::B128);
        let descriptor = |tile: Region| b.address(tile).bfe(4, 14).to_u64() | layout.descriptor();
        let (desc_a, desc_b) = (descriptor(tile_a), descriptor(tile_b));
        let acc = b.accumulator("acc", n / 2);
        b.wgmma_fence();
        for step in 0..4 {
            let advance = step * layout.k_step(Major::K);
            let mma = Mma::new(WgmmaType::Bf16, &acc, desc_a + advance, desc_b + advance);
            b.wgmma(if step == 0 { mma } else { mma.accumulate() });
        }
        b.wgmma_commit();
        b.wgmma_wait(0);

        let (warp, lane) = (tid >> 5, tid & 31);
        let row = (warp << 4) + (lane >> 2);
        let column = (lane & 3) << 1;
        let at = row.mad(n, column).mad_wide(4, d);
        for (index, pair) in acc.chunks_exact(2).enumerate() {
            let (columns, rows) = (8 * (index as u32 / 2), 8 * (index as u32 % 2));
            b.store_vector(at.at(4 * (rows * n + columns) as i32), [pair[0], pair[1]]);
        }
    })
}

/// x[i] = x[2 i] + x[2 i + 1] of 512 elements: a producer warpgroup copies, two consumers add, with registers moved
/// from one to the others.
pub(crate) fn two_roles() -> Kernel {
    Kernel::build("two_roles", Launch::threads(384), |b| {
        let (full, tile) = (b.mbarriers("full", 1, 1), b.region("tile", 2048, 128));
        let done = b.barrier("done", 384);
        let x = b.param_pointer("x", Elem::F32);
        let tid = b.tid();
        let first = tid.eq(0);
        b.guarded(first, || b.mbarrier_init(full, 1));
        b.fence(FenceInst::MbarrierInit);
        b.sync_cta();
        b.role(Role::new("producer", 0..4).registers(24), || {
            b.if_lanes(first, || {
                b.mbarrier_arrive_expect(full, 2048);
                b.bulk_load(tile, x, 2048, full, LoadOptions::default());
            });
            b.arrive(done);
        });
        b.role(Role::new("consumer", 4..12).registers(240), || {
            b.mbarrier_wait(full, 0);
            let i = tid - 128;
            let [low, high] = b.load_vector::<F32, 2>(i.mad(8, b.address(tile)));
            let sum = low + high;
            b.store(i.mad_wide(4, x), sum);
            b.sync(done);
        });
    })
}

/// out[cta] = the CTA's rank in its cluster of `size`.
pub(crate) fn cluster_ranks(size: u32) -> Kernel {
    Kernel::build("cluster_ranks", Launch::threads(32).cluster(size), |b| {
        let out = b.param_pointer("out", Elem::U32);
        let (tid, cta, rank) = (b.tid(), b.cta_x(), b.cluster_cta_rank());
        let at = cta.mad_wide(4, out);
        b.guarded(tid.eq(0), || b.store(at, rank));
    })
}

/// x[i] = x[i] + 1, once the preceding kernel has ended; lets the following one start before.
pub(crate) fn increment() -> Kernel {
    Kernel::build("increment", Launch::threads(256), |b| {
        let x = b.param_pointer("x", Elem::U32);
        let i = index(b);
        b.launch_dependents();
        b.grid_dependency_wait();
        let at = i.mad_wide(4, x);
        b.store(at, b.load::<B32>(at) + 1);
    })
}
