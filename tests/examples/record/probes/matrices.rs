//! Measures which rows of A in shared memory a warp's part of a wgmma reads, and when it reads them.

use fa3_cuda::host::Device;
use fa3_ir::lang::{B32, B64, V};
use fa3_ir::{FenceInst, Launch, Layout, Mma, Swizzle, WgmmaType};

use super::{Said, longs, measure, spin, words};

/// Number of cycles between the starts of two warps.
const APART: u32 = 20_000;

/// Descriptors of operands without swizzle, where both 8 x 8 matrices along K precede the next 8 rows.
fn descriptors<'k>(starts: [V<'k, B32>; 2]) -> [V<'k, B64>; 2] {
    let layout = Layout { swizzle: Swizzle::None, leading: 128, stride: 256 };
    starts.map(|start| start.bfe(4, 14).to_u64() | layout.descriptor())
}

/// Every warp writes its 16 rows of A, multiplies, and overwrites the rows with NaN right after its wait, while the
/// next warp comes much later. A and B are all ones, but the last warp changes B to twos: D shows whether a warp's part
/// was computed on that warp's arrival or on the arrival of all warps.
pub(super) fn row_slices(device: &Device) -> Said {
    let written = measure(device, ("row_slices", Launch::threads(128), 1), 128 * 40, |meter| {
        let (b, tid) = (meter.b, meter.tid);
        let (tile_a, tile_b) = (b.region("a", 2048, 1024), b.region("b", 256, 256));
        let (warp, start_a, start_b) = (tid >> 5, b.address(tile_a), b.address(tile_b));
        let (mine_a, mine_b) = (tid.mad(16, start_a), tid.mad(2, start_b));
        let (nan, ones) = (0xFFFF_FFFFu32, 0x3F80_3F80u32);
        b.store_vector(mine_a, [nan; 4]);
        b.store(mine_b, 0x3F80u16);
        b.fence(FenceInst::ProxyAsyncShared);
        b.sync_cta();
        let cta_start = b.clock();
        spin(b, warp.mul_wide(APART));
        b.store_vector(mine_a, [ones; 4]);
        b.if_uniform(warp.eq(3), || {
            for offset in [0, 64, 128, 192] {
                b.store(b.lane_id().mad(2, start_b).at(offset), 0x4000u16);
            }
        });
        b.fence(FenceInst::ProxyAsyncShared);
        b.warp_sync();
        let [desc_a, desc_b] = descriptors([start_a, start_b]);
        let d = b.accumulator("d", 4);
        d.iter().for_each(|var| var.set(0.0));
        let before = b.clock();
        b.wgmma_fence();
        let fenced = b.clock();
        b.wgmma(Mma::new(WgmmaType::Bf16, &d, desc_a, desc_b).accumulate());
        b.wgmma_commit();
        b.wgmma_wait(0);
        let after = b.clock();
        b.store_vector(mine_a, [nan; 4]);
        let to = tid.mad_wide(40, meter.out);
        for (i, clock) in (0..).zip([before, fenced, after]) {
            b.store(to.at(8 * i), clock - cta_start);
        }
        for (i, var) in (0..).zip(&d) {
            b.store(to.at(24 + 4 * i), var.now().as_bits());
        }
    })?;
    let mut said = Vec::new();
    for (warp, lanes) in written.chunks(32 * 40).enumerate() {
        let clocks = longs(&lanes[..24]);
        let numbers = lanes.chunks(40).flat_map(|lane| words(&lane[24..])).map(f32::from_bits);
        let numbers: Vec<f32> = numbers.collect();
        let (first, same) = (numbers[0], numbers.iter().filter(|x| **x == numbers[0]).count());
        said.push(format!(
            "warp {warp}: began at cycle {}, passed the fence at {}, had D at {}; {same} of 128 elements are {first}",
            clocks[0], clocks[1], clocks[2]
        ));
    }
    Ok(said.join("\n"))
}

/// Multiplies A right after the four warps have written it. The fence is executed by the writers before the barrier, by
/// all threads after it, or not at all.
pub(super) fn operand_fence(device: &Device) -> Said {
    const CTAS: u32 = 132;
    const ROUNDS: u32 = 512;
    let mut said = Vec::new();
    for (name, before, after) in
        [("before the barrier", true, false), ("after the barrier", false, true), ("nowhere", false, false)]
    {
        let written = measure(device, ("operand_fence", Launch::threads(128), CTAS), 4, |meter| {
            let (b, tid) = (meter.b, meter.tid);
            let (tile_a, tile_b) = (b.region("a", 2048, 1024), b.region("b", 256, 256));
            let (start_a, start_b) = (b.address(tile_a), b.address(tile_b));
            let (mine_a, mine_b) = (tid.mad(16, start_a), tid.mad(2, start_b));
            b.store(mine_b, 0x3F80u16);
            b.fence(FenceInst::ProxyAsyncShared);
            let [desc_a, desc_b] = descriptors([start_a, start_b]);
            let (d, stale) = (b.accumulator("d", 4), b.var("stale", 0u32));
            b.for_each((0, ROUNDS), 1, |round| {
                let value = (round & 127).to_f32();
                b.store_vector(mine_a, [value.bf16x2_above(value); 4]);
                if before {
                    b.fence(FenceInst::ProxyAsyncShared);
                }
                b.sync_cta();
                if after {
                    b.fence(FenceInst::ProxyAsyncShared);
                }
                b.wgmma_fence();
                b.wgmma(Mma::new(WgmmaType::Bf16, &d, desc_a, desc_b));
                b.wgmma_commit();
                b.wgmma_wait(0);
                let expected = value * 16.0;
                for var in &d {
                    let wrong = var.now().ne(expected);
                    stale.update(|stale| stale + wrong.select(1, 0));
                }
                b.sync_cta();
            });
            b.reduce_add_u32(meter.out, stale);
        })?;
        let stale = words(&written)[0];
        let all = CTAS * ROUNDS * 512;
        said.push(format!("fence {name}: {stale} of {all} elements stale"));
    }
    Ok(said.join("\n"))
}
