//! Measures when `setmaxnreg.inc` returns, depending on which warpgroup releases registers.

use fa3_cuda::host::Device;
use fa3_ir::{Launch, Role};

use super::{Said, longs, measure, spin};

/// Cycles until registers are released.
const LATE: u64 = 100_000;

/// Runs three warpgroups of 168 registers: one releases 144 registers, late, and the others take 72 each.
pub(super) fn pool(device: &Device) -> Said {
    let mut said = Vec::new();
    for giver in 0..3 {
        let written = measure(device, ("pool", Launch::threads(384), 1), 8 * 12, |meter| {
            let b = meter.b;
            let start = b.clock();
            let warp = meter.tid >> 5;
            let at = warp.mad_wide(8, meter.out);
            let first = b.lane_id().eq(0);
            for group in 0..3 {
                b.role(Role::new(["g0", "g1", "g2"][group as usize], 4 * group..4 * group + 4), || {
                    if group == giver {
                        spin(b, LATE);
                        b.set_max_registers_down(24);
                    } else {
                        b.set_max_registers_up(240);
                    }
                    let passed = b.clock() - start;
                    b.guarded(first, || b.store(at, passed));
                });
            }
        })?;
        let cycles = longs(&written);
        said.push(format!("warpgroup {giver} gives: cycles of the warps {cycles:?}"));
    }
    Ok(said.join("\n"))
}
