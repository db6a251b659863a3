//! Which rows of A in shared memory the part of a wgmma that belongs to one warp reads, and when.

use fa3_cuda::host::Device;
use fa3_ir::{B32, B64, Builder, FenceInst, Launch, Layout, Mma, Swizzle, V, WgmmaType};

use super::{Meter, Said, longs, spin, words};

/// Cycles between the warps.
const APART: u32 = 20_000;

/// The descriptors of operands without swizzle, both of whose 8 x 8 matrices along K come before the next
/// 8 rows.
fn descriptors(b: &mut Builder, starts: [V<B32>; 2]) -> [V<B64>; 2] {
    let layout = Layout { swizzle: Swizzle::None, leading: 128, stride: 256 };
    starts.map(|start| {
        let field = b.bfe_u32(start, 4, 14);
        let field = b.u64_of_u32(field);
        b.or(field, layout.descriptor())
    })
}

/// Every warp writes its 16 rows of A, multiplies, and overwrites them with NaN as soon as it has waited, the next warp
/// much later. A and B are ones, but the last warp makes B twos: D says whether a warp's part was computed when it came,
/// or when all were there.
pub(super) fn row_slices(device: &Device) -> Said {
    let mut meter = Meter::new("row_slices", Launch::threads(128), 128 * 40);
    let (tile_a, tile_b) = (meter.b.region("a", 2048, 1024), meter.b.region("b", 256, 256));
    let (b, tid) = (&mut meter.b, meter.tid);
    let (warp, start_a, start_b) = (b.shr_u32(tid, 5), b.address(tile_a), b.address(tile_b));
    let (mine_a, mine_b) = (b.mad_u32(tid, 16, start_a), b.mad_u32(tid, 2, start_b));
    let (nan, ones) = (0xFFFF_FFFFu32, 0x3F80_3F80u32);
    b.store_vector(mine_a, [nan; 4]);
    b.store(mine_b, 0x3F80u16);
    b.fence(FenceInst::ProxyAsyncShared);
    b.sync_cta();
    let cta_start = b.clock();
    let late = b.mul_wide_u32(warp, APART);
    spin(b, late);
    b.store_vector(mine_a, [ones; 4]);
    let last = b.eq_b32(warp, 3);
    b.if_uniform(last, |b| {
        for offset in [0, 64, 128, 192] {
            let lane = b.lane_id();
            let at = b.mad_u32(lane, 2, start_b);
            b.store(at.at(offset), 0x4000u16);
        }
    });
    b.fence(FenceInst::ProxyAsyncShared);
    b.warp_sync();
    let [desc_a, desc_b] = descriptors(b, [start_a, start_b]);
    let d = b.accumulator("d", 4);
    for &var in &d {
        b.set(var, 0.0);
    }
    let before = b.clock();
    b.wgmma_fence();
    let fenced = b.clock();
    b.wgmma(Mma::new(WgmmaType::Bf16, &d, desc_a, desc_b).accumulate());
    b.wgmma_commit();
    b.wgmma_wait(0);
    let after = b.clock();
    b.store_vector(mine_a, [nan; 4]);
    let to = b.mad_wide_u32(tid, 40, meter.out);
    for (i, clock) in (0..).zip([before, fenced, after]) {
        let since = b.sub(clock, cta_start);
        b.store(to.at(8 * i), since);
    }
    for (i, &var) in (0..).zip(&d) {
        let bits = b.bits_of_f32(var);
        b.store::<B32>(to.at(24 + 4 * i), bits);
    }
    let written = meter.run(device, 1)?;
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

/// Products of A that the four warps have just written: fenced by the writers before the barrier, by all
/// after it, or
/// not at all.
pub(super) fn operand_fence(device: &Device) -> Said {
    const CTAS: u32 = 132;
    const ROUNDS: u32 = 512;
    let mut said = Vec::new();
    for (name, before, after) in
        [("before the barrier", true, false), ("after the barrier", false, true), ("nowhere", false, false)]
    {
        let mut meter = Meter::new("operand_fence", Launch::threads(128), 4);
        let (tile_a, tile_b) = (meter.b.region("a", 2048, 1024), meter.b.region("b", 256, 256));
        let (b, tid) = (&mut meter.b, meter.tid);
        let (start_a, start_b) = (b.address(tile_a), b.address(tile_b));
        let (mine_a, mine_b) = (b.mad_u32(tid, 16, start_a), b.mad_u32(tid, 2, start_b));
        b.store(mine_b, 0x3F80u16);
        b.fence(FenceInst::ProxyAsyncShared);
        let [desc_a, desc_b] = descriptors(b, [start_a, start_b]);
        let (d, stale) = (b.accumulator("d", 4), b.var("stale", 0u32));
        b.for_each((0, ROUNDS), 1, |b, round| {
            let value = b.and::<B32>(round, 127);
            let value = b.f32_of_u32(value);
            let pair = b.bf16x2_of_f32(value, value);
            b.store_vector(mine_a, [pair; 4]);
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
            let expected = b.mul(value, 16.0);
            for &var in &d {
                let wrong = b.ne_f32(var, expected);
                let one = b.select(wrong, 1, 0);
                let more = b.add::<B32>(stale, one);
                b.set(stale, more);
            }
            b.sync_cta();
        });
        b.reduce_add_u32(meter.out, stale);
        let stale = words(&meter.run(device, CTAS)?)[0];
        let all = CTAS * ROUNDS * 512;
        said.push(format!("fence {name}: {stale} of {all} elements stale"));
    }
    Ok(said.join("\n"))
}
