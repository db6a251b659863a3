//! Small whole kernels, built by hand.

use fa3_ir::lang::*;
use fa3_ir::*;

/// z = x + y over n elements, one a thread.
pub(crate) fn vector_add() -> Kernel {
    Kernel::build("vector_add", Launch::threads(256), |b| {
        let [x, y, z] = ["x", "y", "z"].map(|name| b.param_pointer(name, Elem::F32));
        let n = b.param_u32("n");
        let (tid, cta) = (b.tid(), b.cta_x());
        let i = cta.mad(256, tid).named("i");
        b.if_lanes(i.lt(n), || {
            let [x, y, z] = [x, y, z].map(|array| i.mad_wide(4, array));
            let (x, y) = (b.load::<F32>(x), b.load::<F32>(y));
            b.store(z, x + y);
        });
    })
}

/// y = softmax(x) of rows of n elements, one row a warp, 4 warps a CTA.
pub(crate) fn row_softmax() -> Kernel {
    Kernel::build("row_softmax", Launch::threads(128), |b| {
        let [x, y] = ["x", "y"].map(|name| b.param_pointer(name, Elem::F32));
        let n = b.param_u32("n");
        let (tid, cta, lane) = (b.tid(), b.cta_x(), b.lane_id());
        let first = cta.mad(4, tid >> 5) * n;
        let [x, y] = [x, y].map(|array| first.mad_wide(4, array));

        // Scores times log2(e), −inf beyond the row.
        let score = |block: V<B32>| {
            let column = lane + block;
            let inside = column.lt(n);
            let at = column.mad_wide(4, x);
            let score = b.var("score", f32::NEG_INFINITY);
            b.guarded(inside, || score.set(b.load::<F32>(at) * std::f32::consts::LOG2_E));
            (score.get(), column, inside)
        };
        let max = b.var("max", f32::NEG_INFINITY);
        b.for_each((0, n), 32, |block| {
            let (score, ..) = score(block);
            max.update(|max| max.max(score));
        });
        all_lanes(max, |x, y| x.max(y));
        let sum = b.var("sum", 0.0);
        b.for_each((0, n), 32, |block| {
            let (score, ..) = score(block);
            sum.set(sum + (score - max).ex2());
        });
        all_lanes(sum, |x, y| x + y);
        let scale = sum.now().rcp();
        b.for_each((0, n), 32, |block| {
            let (score, column, inside) = score(block);
            let p = (score - max).ex2() * scale;
            let at = column.mad_wide(4, y);
            b.guarded(inside, || b.store(at, p));
        });
    })
}

/// Combines a variable over the lanes of the warp.
fn all_lanes<'k>(var: Var<'k, F32>, combine: impl Fn(V<'k, F32>, V<'k, F32>) -> V<'k, F32>) {
    for mask in [16, 8, 4, 2, 1] {
        var.update(|x| combine(x, x.shfl_bfly(mask)));
    }
}

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

/// A producer warpgroup gives its registers to a consumer: the skeleton of a specialised kernel.
pub(crate) fn two_roles() -> Kernel {
    Kernel::build("two_roles", Launch::threads(256), |b| {
        let (full, tile) = (b.mbarriers("full", 1, 1), b.region("tile", 1024, 128));
        let done = b.barrier("done", 256);
        let x = b.param_pointer("x", Elem::F32);
        let tid = b.tid();
        let first = tid.eq(0);
        b.guarded(first, || b.mbarrier_init(full, 1));
        b.fence(FenceInst::MbarrierInit);
        b.sync_cta();
        b.role(Role::new("producer", 0..4), || {
            b.set_max_registers_down(24);
            b.if_lanes(first, || {
                b.mbarrier_arrive_expect(full, 1024);
                b.bulk_load(tile, x, 1024, full, LoadOptions::default());
            });
            b.arrive(done);
        });
        b.role(Role::new("consumer", 4..8), || {
            b.set_max_registers_up(256);
            b.mbarrier_wait(full, 0);
            let thread = tid & 127;
            let [low, high] = b.load_vector::<F32, 2>(thread.mad(8, b.address(tile)));
            let sum = low + high;
            b.store(thread.mad_wide(4, x), sum);
            b.sync(done);
        });
    })
}
