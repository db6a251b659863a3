//! Measures which lane is elected, the duration of `mbarrier.try_wait`, and the frequency of its spurious failures.

use fa3_cuda::host::Device;
use fa3_ir::lang::B64;
use fa3_ir::{Launch, Role};

use super::{Said, longs, measure, spin, words};

pub(super) fn elect(device: &Device) -> Said {
    let written = measure(device, ("elect", Launch::threads(128), 1), 16, |meter| {
        let b = meter.b;
        let elected = b.elect();
        let (ballot, warp) = (elected.ballot(), meter.tid >> 5);
        let at = warp.mad_wide(4, meter.out);
        b.guarded(elected, || b.store(at, ballot));
    })?;
    Ok(format!("lanes of four warps: {:x?}", words(&written)))
}

/// Durations of waits for a phase that never completes.
pub(super) fn suspend(device: &Device) -> Said {
    const WAITS: u32 = 8;
    let written = measure(device, ("suspend", Launch::threads(32), 1), 24 * WAITS, |meter| {
        let (b, out) = (meter.b, meter.out);
        let mbar = b.mbarriers("mbar", 1, 1);
        b.if_lanes(meter.tid.eq(0), || {
            b.mbarrier_init(mbar, 1);
            for wait in 0..WAITS.cast_signed() {
                let (timer, clock) = (b.global_timer(), b.clock());
                let complete = b.mbarrier_try_wait(mbar, 0);
                b.store::<B64>(out.at(24 * wait), complete.select(1u64, 0u64));
                let (timer_after, clock_after) = (b.global_timer(), b.clock());
                let (cycles, nanos) = (clock_after - clock, timer_after - timer);
                b.store(out.at(24 * wait + 8), cycles);
                b.store(out.at(24 * wait + 16), nanos);
            }
        });
    })?;
    let rows: Vec<String> = longs(&written)
        .chunks(3)
        .map(|row| format!("complete {}, {} cycles, {} ns", row[0], row[1], row[2]))
        .collect();
    Ok(rows.join("\n"))
}

/// Number of failed waits before a phase completes, for phases of several lengths.
pub(super) fn spurious(device: &Device) -> Said {
    const CYCLES: [u64; 6] = [100, 1000, 10_000, 100_000, 1_000_000, 10_000_000];
    let written = measure(device, ("spurious", Launch::threads(64), 1), 16 * CYCLES.len() as u32, |meter| {
        let (b, out) = (meter.b, meter.out);
        let mbar = b.mbarriers("mbar", CYCLES.len() as u32, 1);
        let first = b.lane_id().eq(0);
        b.if_lanes(first, || (0..CYCLES.len() as i32).for_each(|i| b.mbarrier_init(mbar.at(8 * i), 1)));
        b.sync_cta();
        b.role(Role::new("arrives", 0..1), || {
            b.if_lanes(first, || {
                for (i, cycles) in (0..).zip(CYCLES) {
                    spin(b, cycles);
                    b.mbarrier_arrive(mbar.at(8 * i));
                }
            });
        });
        b.role(Role::new("waits", 1..2), || {
            b.if_lanes(first, || {
                for i in 0..CYCLES.len() as i32 {
                    let start = b.clock();
                    let denials = b.var("denials", 0u32);
                    b.repeat(|| {
                        b.break_if(b.mbarrier_try_wait(mbar.at(8 * i), 0));
                        denials.update(|denials| denials + 1);
                    });
                    let cycles = b.clock() - start;
                    b.store(out.at(16 * i), cycles);
                    b.store(out.at(16 * i + 8), denials);
                }
            });
        });
    })?;
    let rows: Vec<String> = longs(&written)
        .chunks(2)
        .zip(CYCLES)
        .map(|(row, cycles)| format!("phase of {cycles} cycles: waited {}, {} denials", row[0], row[1]))
        .collect();
    Ok(rows.join("\n"))
}
