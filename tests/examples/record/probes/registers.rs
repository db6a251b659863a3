//! When `setmaxnreg.inc` returns, whoever gives registers back.

use fa3_cuda::host::Device;
use fa3_ir::{Launch, Role};

use super::{Meter, Said, longs, spin};

/// Cycles after which registers are given back.
const LATE: u64 = 100_000;

/// Three warpgroups of 168 registers: one gives 144 back, late; the others take 72 each.
pub(super) fn pool(device: &Device) -> Said {
    let mut said = Vec::new();
    for giver in 0..3 {
        let mut meter = Meter::new("pool", Launch::threads(384), 8 * 12);
        let (b, tid, out) = (&mut meter.b, meter.tid, meter.out);
        let start = b.clock();
        let warp = b.shr_u32(tid, 5);
        let at = b.mad_wide_u32(warp, 8, out);
        let lane = b.lane_id();
        let first = b.eq_b32(lane, 0);
        for group in 0..3 {
            b.role(Role::new(["g0", "g1", "g2"][group as usize], 4 * group..4 * group + 4), |b| {
                if group == giver {
                    let late = b.mov_b64(LATE);
                    spin(b, late);
                    b.set_max_registers_down(24);
                } else {
                    b.set_max_registers_up(240);
                }
                let now = b.clock();
                let passed = b.sub(now, start);
                b.guarded(first, |b| b.store(at, passed));
            });
        }
        let cycles = longs(&meter.run(device, 1)?);
        said.push(format!("warpgroup {giver} gives: cycles of the warps {cycles:?}"));
    }
    Ok(said.join("\n"))
}
