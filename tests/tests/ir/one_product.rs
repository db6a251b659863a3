//! A hand-written product. Tests of the simulator and of the GPU use it, too.

use fa3_ir::lang::*;
use fa3_ir::*;

/// D = A · Bᵀ of 64 x n by one warpgroup, A and B loaded as boxes of 64 columns with 128-byte swizzle.
pub(crate) fn one_product(n: u32) -> Kernel {
    Kernel::build("one_product", Launch::threads(128), |b| {
        let [map_a, map_b] = [("a", 64), ("b", n)].map(|(name, rows)| {
            b.param_tensor_map(name, BoxShape::new(Elem::Bf16, &[64, rows], Swizzle::B128))
        });
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
        let [desc_a, desc_b] =
            [tile_a, tile_b].map(|tile| b.address(tile).bfe(4, 14).to_u64() | layout.descriptor());
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
        let (warp_row, lane_row) = (warp << 4, lane >> 2);
        let at = (warp_row + lane_row).mad(n, (lane & 3) << 1).mad_wide(4, d);
        for (index, pair) in acc.chunks_exact(2).enumerate() {
            let (columns, rows) = (8 * (index as u32 / 2), 8 * (index as u32 % 2));
            b.store_vector(at.at(4 * (rows * n + columns) as i32), [pair[0], pair[1]]);
        }
    })
}
