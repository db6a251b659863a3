//! Which lane is elected; how long, and how often in vain, `mbarrier.try_wait` waits.

use fa3_cuda::host::Device;
use fa3_ir::{B32, Launch, Role};

use super::{Meter, Said, longs, spin, words};

pub(super) fn elect(device: &Device) -> Said {
    let mut meter = Meter::new("elect", Launch::threads(128), 16);
    let b = &mut meter.b;
    let elected = b.elect();
    let (ballot, warp) = (b.ballot(elected), b.shr_u32(meter.tid, 5));
    let at = b.mad_wide_u32(warp, 4, meter.out);
    b.guarded(elected, |b| b.store(at, ballot));
    Ok(format!("lanes of four warps: {:x?}", words(&meter.run(device, 1)?)))
}

/// The times of waits for a phase that never ends.
pub(super) fn suspend(device: &Device) -> Said {
    const WAITS: u32 = 8;
    let mut meter = Meter::new("suspend", Launch::threads(32), 24 * WAITS as usize);
    let mbar = meter.b.mbarriers("mbar", 1, 1);
    let (b, out) = (&mut meter.b, meter.out);
    let first = b.eq_b32(meter.tid, 0);
    b.if_lanes(first, |b| {
        b.mbarrier_init(mbar, 1);
        for wait in 0..WAITS {
            let (timer, clock) = (b.global_timer(), b.clock());
            let complete = b.mbarrier_try_wait(mbar, 0);
            let at = out.at(24 * wait.cast_signed());
            let complete = b.select(complete, 1u64, 0u64);
            b.store(at, complete);
            let (timer_after, clock_after) = (b.global_timer(), b.clock());
            let (cycles, nanos) = (b.sub(clock_after, clock), b.sub(timer_after, timer));
            b.store(out.at(24 * wait.cast_signed() + 8), cycles);
            b.store(out.at(24 * wait.cast_signed() + 16), nanos);
        }
    });
    let rows: Vec<String> = longs(&meter.run(device, 1)?)
        .chunks(3)
        .map(|row| format!("complete {}, {} cycles, {} ns", row[0], row[1], row[2]))
        .collect();
    Ok(rows.join("\n"))
}

/// How often a wait says no before the phase ends, for phases of several lengths.
pub(super) fn spurious(device: &Device) -> Said {
    const CYCLES: [u64; 6] = [100, 1000, 10_000, 100_000, 1_000_000, 10_000_000];
    let mut meter = Meter::new("spurious", Launch::threads(64), 16 * CYCLES.len());
    let mbar = meter.b.mbarriers("mbar", CYCLES.len() as u32, 1);
    let (b, out) = (&mut meter.b, meter.out);
    let lane = b.lane_id();
    let first = b.eq_b32(lane, 0);
    b.if_lanes(first, |b| (0..CYCLES.len() as i32).for_each(|i| b.mbarrier_init(mbar.at(8 * i), 1)));
    b.sync_cta();
    b.role(Role::new("arrives", 0..1), |b| {
        b.if_lanes(first, |b| {
            for (i, cycles) in (0..).zip(CYCLES) {
                let cycles = b.mov_b64(cycles);
                spin(b, cycles);
                b.mbarrier_arrive(mbar.at(8 * i));
            }
        });
    });
    b.role(Role::new("waits", 1..2), |b| {
        b.if_lanes(first, |b| {
            for i in 0..CYCLES.len() as i32 {
                let start = b.clock();
                let denials = b.var("denials", 0u32);
                b.repeat(|b| {
                    let complete = b.mbarrier_try_wait(mbar.at(8 * i), 0);
                    b.break_if(complete);
                    let more = b.add::<B32>(denials, 1);
                    b.set(denials, more);
                });
                let end = b.clock();
                let cycles = b.sub(end, start);
                b.store(out.at(16 * i), cycles);
                b.store(out.at(16 * i + 8), denials);
            }
        });
    });
    let rows: Vec<String> = longs(&meter.run(device, 1)?)
        .chunks(2)
        .zip(CYCLES)
        .map(|(row, cycles)| format!("phase of {cycles} cycles: waited {}, {} denials", row[0], row[1]))
        .collect();
    Ok(rows.join("\n"))
}
