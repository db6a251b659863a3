//! Measurements without the fence or the wait that the memory model requires.

use fa3_cuda::host::Device;
use fa3_ir::lang::F32;
use fa3_ir::{FenceInst, Launch};

use super::{Said, longs, measure, words};

/// Number of CTAs, and number of rounds per CTA.
const CTAS: u32 = 132;
const ROUNDS: u32 = 512;

/// Measures the number of words that a bulk store reads from shared memory before the stores of other threads arrive.
/// The fence is executed by the writers, by the reader after the barrier, or not at all.
pub(super) fn fence_of_the_reader(device: &Device) -> Said {
    let mut said = Vec::new();
    for (name, by_writers, by_reader) in
        [("writers", true, false), ("reader", false, true), ("nobody", false, false)]
    {
        let bytes = CTAS * ROUNDS * 512;
        let written = measure(device, ("fence", Launch::threads(128), CTAS), bytes, |meter| {
            let (b, tid, out) = (meter.b, meter.tid, meter.out);
            let tile = b.region("tile", 512, 128);
            let (start, cta, first) = (b.address(tile), b.cta_x(), tid.eq(0));
            let (mine, base) = (tid.mad(4, start), cta * ROUNDS);
            b.for_each((0, ROUNDS), 1, |round| {
                let slot = base + round;
                b.store(mine, slot.mad(128, tid));
                if by_writers {
                    b.fence(FenceInst::ProxyAsyncShared);
                }
                b.sync_cta();
                b.if_lanes(first, || {
                    if by_reader {
                        b.fence(FenceInst::ProxyAsyncShared);
                    }
                    b.bulk_store(slot.mad_wide(512, out), tile, 512);
                    b.bulk_commit();
                    b.bulk_wait_read(0);
                });
                b.sync_cta();
            });
        })?;
        let stale = words(&written).iter().zip(0..).filter(|(word, index)| *word != index).count();
        said.push(format!("fence by {name}: {stale} of {} words stale", CTAS * ROUNDS * 128));
    }
    Ok(said.join("\n"))
}

/// Runs pairs of CTAs. One adds 1 to 128 numbers by a bulk reduction, waits for the read of its source or for the whole
/// reduction, and releases a flag. The other acquires the flag and reads the numbers.
pub(super) fn sums_not_waited_for(device: &Device) -> Said {
    const PAIRS: u32 = 66;
    /// Bytes per pair: numbers, flag, answer, count of stale numbers, cycles of the waits.
    const SLOT: u32 = 1024;
    let mut said = Vec::new();
    for (name, read, fence) in
        [("read", true, false), ("all", false, false), ("all and a fence", false, true)]
    {
        let slots = measure(device, ("sums", Launch::threads(32), 2 * PAIRS), PAIRS * SLOT, |meter| {
            let (b, tid) = (meter.b, meter.tid);
            let ones = b.region("ones", 512, 128);
            let (start, cta) = (b.address(ones), b.cta_x());
            b.store_vector(tid.mad(16, start), [1.0f32; 4]);
            b.fence(FenceInst::ProxyAsyncShared);
            b.sync_cta();
            let (pair, side) = (cta >> 1, cta & 1);
            let slot = pair.mad_wide(SLOT, meter.out);
            let (flag, answer) = (slot + 512u64, slot + 640u64);
            let (adds, first) = (side.eq(0), tid.eq(0));
            let add = || {
                let cycles = b.var("cycles", 0u64);
                b.for_each((1, ROUNDS + 1), 1, |round| {
                    let before = b.clock();
                    b.bulk_reduce_add_f32(slot, start, 512);
                    b.bulk_commit();
                    if read {
                        b.bulk_wait_read(0)
                    } else {
                        b.bulk_wait(0)
                    }
                    if fence {
                        b.fence(FenceInst::ProxyAsyncGlobal);
                    }
                    b.store_release(flag, round);
                    let waited = b.clock() - before;
                    cycles.update(|cycles| cycles + waited);
                    b.repeat(|| b.break_if(b.load_acquire(answer).eq(round)));
                });
                b.store(slot.at(896), cycles);
            };
            let look = || {
                let stale = b.var("stale", 0u32);
                let numbers = tid.mad_wide(16, slot);
                b.for_each((1, ROUNDS + 1), 1, |round| {
                    b.repeat(|| b.break_if(b.load_acquire(flag).eq(round).vote_all()));
                    let expected = round.to_f32();
                    for number in b.load_vector::<F32, 4>(numbers) {
                        let is_stale = number.ne(expected);
                        stale.update(|stale| stale + is_stale.select(1, 0));
                    }
                    b.warp_sync();
                    b.guarded(first, || b.store_release(answer, round));
                });
                b.reduce_add_u32(slot + 768u64, stale);
            };
            b.if_else_uniform(adds, || b.if_lanes(first, add), look);
        })?;
        let of = |offset: usize| slots.chunks(SLOT as usize).map(move |slot| longs(&slot[offset..][..8])[0]);
        let (stale, cycles): (u64, u64) = (of(768).sum(), of(896).sum());
        let (all, waits) = (PAIRS * ROUNDS * 128, u64::from(PAIRS * ROUNDS));
        said.push(format!("wait for {name}: {stale} of {all} sums stale, {} cycles a wait", cycles / waits));
    }
    Ok(said.join("\n"))
}
