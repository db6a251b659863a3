//! What is seen without the fence, or the wait, that the memory model asks for.

use fa3_cuda::host::Device;
use fa3_ir::{B32, FenceInst, Launch};

use super::{Meter, Said, longs, words};

/// CTAs, and rounds of each.
const CTAS: u32 = 132;
const ROUNDS: u32 = 512;

/// Words that a bulk store takes from shared memory before the stores of other threads are there, if the
/// fence is
/// executed by the writers, by the reader after the barrier, or not at all.
pub(super) fn fence_of_the_reader(device: &Device) -> Said {
    let mut said = Vec::new();
    for (name, by_writers, by_reader) in
        [("writers", true, false), ("reader", false, true), ("nobody", false, false)]
    {
        let mut meter = Meter::new("fence", Launch::threads(128), (CTAS * ROUNDS * 512) as usize);
        let tile = meter.b.region("tile", 512, 128);
        let (b, tid, out) = (&mut meter.b, meter.tid, meter.out);
        let (start, cta, first) = (b.address(tile), b.cta_x(), b.eq_b32(tid, 0));
        let (mine, base) = (b.mad_u32(tid, 4, start), b.mul_u32(cta, ROUNDS));
        b.for_each((0, ROUNDS), 1, |b, round| {
            let slot = b.add(base, round);
            let word = b.mad_u32(slot, 128, tid);
            b.store(mine, word);
            if by_writers {
                b.fence(FenceInst::ProxyAsyncShared);
            }
            b.sync_cta();
            b.if_lanes(first, |b| {
                if by_reader {
                    b.fence(FenceInst::ProxyAsyncShared);
                }
                let to = b.mad_wide_u32(slot, 512, out);
                b.bulk_store(to, tile, 512);
                b.bulk_commit();
                b.bulk_wait_read(0);
            });
            b.sync_cta();
        });
        let stale =
            words(&meter.run(device, CTAS)?).iter().zip(0..).filter(|(word, index)| *word != index).count();
        said.push(format!("fence by {name}: {stale} of {} words stale", CTAS * ROUNDS * 128));
    }
    Ok(said.join("\n"))
}

/// Pairs of CTAs: one adds 1 to 128 numbers by a bulk reduction, waits for its source to be read or for all of it,
/// and releases a flag; the other acquires the flag and looks.
pub(super) fn sums_not_waited_for(device: &Device) -> Said {
    const PAIRS: u32 = 66;
    /// Of each pair: numbers, flag, answer, count of stale numbers, cycles of the waits.
    const SLOT: u32 = 1024;
    let mut said = Vec::new();
    for (name, read, fence) in
        [("read", true, false), ("all", false, false), ("all and a fence", false, true)]
    {
        let mut meter = Meter::new("sums", Launch::threads(32), (PAIRS * SLOT) as usize);
        let ones = meter.b.region("ones", 512, 128);
        let (b, tid) = (&mut meter.b, meter.tid);
        let (start, cta) = (b.address(ones), b.cta_x());
        let mine = b.mad_u32(tid, 16, start);
        b.store_vector(mine, [1.0f32; 4]);
        b.fence(FenceInst::ProxyAsyncShared);
        b.sync_cta();
        let (pair, side) = (b.shr_u32(cta, 1), b.and(cta, 1));
        let slot = b.mad_wide_u32(pair, SLOT, meter.out);
        let (flag, answer) = (b.add(slot, 512u64), b.add(slot, 640u64));
        let (adds, first) = (b.eq_b32(side, 0), b.eq_b32(tid, 0));
        b.if_else_uniform(
            adds,
            |b| {
                b.if_lanes(first, |b| {
                    let cycles = b.var("cycles", 0u64);
                    b.for_each((1, ROUNDS + 1), 1, |b, round| {
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
                        let after = b.clock();
                        let more = b.sub(after, before);
                        let more = b.add(cycles, more);
                        b.set(cycles, more);
                        b.repeat(|b| {
                            let answered = b.load_acquire(answer);
                            let done = b.eq_b32(answered, round);
                            b.break_if(done);
                        });
                    });
                    b.store(slot.at(896), cycles);
                });
            },
            |b| {
                let stale = b.var("stale", 0u32);
                let numbers = b.mad_wide_u32(tid, 16, slot);
                b.for_each((1, ROUNDS + 1), 1, |b, round| {
                    b.repeat(|b| {
                        let flagged = b.load_acquire(flag);
                        let done = b.eq_b32(flagged, round);
                        let done = b.vote_all(done);
                        b.break_if(done);
                    });
                    let expected = b.f32_of_u32(round);
                    for number in b.load_vector::<fa3_ir::F32, 4>(numbers) {
                        let is_stale = b.ne_f32(number, expected);
                        let one = b.select(is_stale, 1, 0);
                        let more = b.add::<B32>(stale, one);
                        b.set(stale, more);
                    }
                    b.warp_sync();
                    b.guarded(first, |b| b.store_release(answer, round));
                });
                let count = b.add(slot, 768u64);
                b.reduce_add_u32(count, stale);
            },
        );
        let slots = meter.run(device, 2 * PAIRS)?;
        let of = |offset: usize| slots.chunks(SLOT as usize).map(move |slot| longs(&slot[offset..][..8])[0]);
        let (stale, cycles): (u64, u64) = (of(768).sum(), of(896).sum());
        let (all, waits) = (PAIRS * ROUNDS * 128, u64::from(PAIRS * ROUNDS));
        said.push(format!("wait for {name}: {stale} of {all} sums stale, {} cycles a wait", cycles / waits));
    }
    Ok(said.join("\n"))
}
