//! Rules of mbarriers.

use fa3_ir::lang::*;
use fa3_sim::{Policy, Rule};

use super::{Case, begin_load, case, init, own_cell, own_word, says, thread, warp};

/// An mbarrier and a tile.
fn full_and_tile(b: &Builder, bytes: u32) -> (Region, Region) {
    (b.mbarriers("full", 1, 1), b.region("tile", bytes, 16))
}

pub(super) const CASES: &[Case] = &[
    case("an mbarrier is initialised once", Rule::M1, 32, |b, broken| {
        let full = b.mbarriers("full", 1, 1);
        init(b, full, 1);
        b.guarded(thread(b, 0), || {
            if !broken {
                b.mbarrier_invalidate(full);
            }
            b.mbarrier_init(full, 1);
        });
    }),
    case("an mbarrier is initialised before use", Rule::M1, 32, |b, broken| {
        let full = b.mbarriers("full", 2, 1);
        init(b, full, 1);
        b.guarded(thread(b, 0), || b.mbarrier_arrive(full.at(8 * i32::from(broken))));
    }),
    case("an mbarrier is not data", Rule::M1, 32, |b, broken| {
        let (full, data) = (b.mbarriers("full", 1, 1), b.region("data", 8, 8));
        init(b, full, 1);
        let to = b.address(if broken { full } else { data });
        b.guarded(thread(b, 0), || b.store(to, 1.0));
    }),
    case("arrivals do not exceed what is missing", Rule::M2, 32, |b, broken| {
        let (full, tile) = full_and_tile(b, 16);
        let x = b.param_pointer("x", Elem::F32);
        init(b, full, 1);
        b.if_lanes(thread(b, 0), || {
            b.mbarrier_arrive_expect(full, 16);
            if broken {
                b.mbarrier_arrive(full);
            }
            b.bulk_load(tile, x, 16, full, LoadOptions::default());
        });
        b.mbarrier_wait(full, 0);
    }),
    // A waiter that is three phases late takes the third phase for the first.
    case("waits are not late", Rule::M3, 64, |b, broken| {
        let (pipeline, flag) = (b.mbarriers("pipeline", 1, 1), b.param_pointer("s", Elem::U32));
        init(b, pipeline, 1);
        b.role(Role::new("runner", 0..1), || {
            let elected = b.elect();
            for parity in [0, 1, 0].iter().take(if broken { 3 } else { 1 }) {
                b.guarded(elected, || b.mbarrier_arrive(pipeline));
                b.mbarrier_wait(pipeline, *parity);
            }
            b.guarded(elected, || b.reduce_add_u32(flag, 1));
        });
        b.role(Role::new("late", 1..2), || {
            // The atomic is relaxed: the thread learns only that time has passed.
            b.repeat(|| b.break_if(b.atomic_add_u32(flag, 0).ne(0).vote_all()));
            b.mbarrier_wait(pipeline, 0);
        });
    }),
    case("a phase is seen before the next begins", Rule::M4, 32, |b, broken| {
        let pipeline = b.mbarriers("pipeline", 1, 1);
        init(b, pipeline, 1);
        let first = thread(b, 0);
        b.guarded(first, || b.mbarrier_arrive(pipeline));
        if !broken {
            b.mbarrier_wait(pipeline, 0);
        }
        b.guarded(first, || b.mbarrier_arrive(pipeline));
    }),
    case("no more bytes are expected than come", Rule::M5, 64, |b, broken| load(b, broken, 16)),
    case("no fewer bytes are expected than come", Rule::M5, 64, |b, broken| load(b, broken, -16)),
    // Bytes that no arrival expects are found at the end, if not before. No thread waits for these bytes, either.
    case("bytes are expected", Rule::M5, 64, |b, broken| load(b, broken, -256)).or(Rule::Race),
    // A peer that never issues its half of the copy causes a deadlock, because the expected number of bytes is right.
    case("bytes of a stuck peer are no wrong expectation", Rule::Deadlock, 32, |b, broken| {
        let (x, tile) = (b.param_pointer("x", Elem::F32), b.region("tile", 256, 128));
        let [full, never] = ["full", "never"].map(|name| b.mbarriers(name, 1, 1));
        let (rank, first) = (b.cluster_cta_rank(), thread(b, 0));
        let (half, follows) = (rank.mad(128, b.address(tile)), rank.eq(1));
        b.init_mbarriers();
        for round in 0..2 {
            b.if_lanes(first, || b.mbarrier_arrive_expect(full, 256));
            if broken && round == 1 {
                b.if_uniform(follows, || b.mbarrier_wait(never, 0));
            }
            b.if_lanes(first, || b.bulk_load(half, x, 128, full, LoadOptions::multicast(3u16)));
            b.mbarrier_wait(full, round);
            b.cluster_sync();
        }
    })
    .cluster(2),
    case("initialisation is fenced", Rule::M6, 64, |b, broken| {
        let full = b.mbarriers("full", 1, 1);
        b.guarded(thread(b, 0), || b.mbarrier_init(full, 1));
        if !broken {
            b.fence(FenceInst::MbarrierInit);
        }
        b.sync_cta();
        b.guarded(thread(b, 32), || b.mbarrier_arrive(full));
        b.mbarrier_wait(full, 0);
    }),
    // A proxy fence orders the initialization before the copy as well.
    case("initialisation is ordered before copies", Rule::M6, 32, |b, broken| {
        let (full, tile) = full_and_tile(b, 16);
        b.if_lanes(thread(b, 0), || {
            b.mbarrier_init(full, 1);
            if !broken {
                b.fence(FenceInst::ProxyAsync);
            }
        });
        begin_load(b, tile, 16, full);
        b.warp_sync();
        b.mbarrier_wait(full, 0);
    }),
    // The wait for the full mbarrier makes the data visible.
    case("data is waited for", Rule::Race, 64, |b, broken| {
        let (full, tile) = full_and_tile(b, 256);
        init(b, full, 1);
        begin_load(b, tile, 256, full);
        b.sync_cta();
        let from = own_cell(b, tile);
        if !broken {
            b.mbarrier_wait(full, 0);
        }
        b.if_uniform(warp(b, 1), || _ = b.load::<F32>(from));
        b.mbarrier_wait(full, 0);
    }),
    // A copy's completion does not publish the writes of the thread that issued it. A later arrival does.
    case("completion orders nothing but the copy", Rule::Race, 64, |b, broken| {
        let ((full, tile), word) = (full_and_tile(b, 16), b.region("word", 4, 4));
        let x = b.param_pointer("x", Elem::F32);
        init(b, full, 1);
        b.if_lanes(thread(b, 0), || {
            if broken {
                b.mbarrier_arrive_expect(full, 16);
            }
            b.store(word, 1.0);
            if !broken {
                b.mbarrier_arrive_expect(full, 16);
            }
            b.bulk_load(tile, x, 16, full, LoadOptions::default());
        });
        b.mbarrier_wait(full, 0);
        b.guarded(thread(b, 32), || b.store(word, 2.0));
    }),
    // One warp waits for the data, and then lets the other warp read the data by a named barrier.
    case("order is transitive over named barriers", Rule::Race, 64, |b, broken| {
        let (full, tile) = full_and_tile(b, 128);
        let turn = b.barrier("turn", 64);
        init(b, full, 1);
        begin_load(b, tile, 128, full);
        b.role(Role::new("first", 0..1), || {
            if broken {
                b.arrive(turn);
            }
            b.mbarrier_wait(full, 0);
            if !broken {
                b.arrive(turn);
            }
        });
        b.role(Role::new("second", 1..2), || {
            b.sync(turn);
            _ = b.load::<F32>(b.lane_id().mad(4, b.address(tile)));
        });
    }),
];

/// Loads a tile. In the broken version, the arrival expects `wrong` bytes more than the load brings.
fn load(b: &Builder, broken: bool, wrong: i32) {
    let (full, tile) = full_and_tile(b, 256);
    let (x, y) = (b.param_pointer("x", Elem::F32), b.param_pointer("y", Elem::F32));
    init(b, full, 1);
    b.if_lanes(thread(b, 0), || {
        b.mbarrier_arrive_expect(full, 256u32.wrapping_add_signed(wrong * i32::from(broken)));
        b.bulk_load(tile, x, 256, full, LoadOptions::default());
    });
    b.mbarrier_wait(full, 0);
    let value = b.load::<F32>(own_cell(b, tile));
    b.store(own_word(b, y), value);
}

/// Copies bytes, and waits for the phase of parity `parity`. If `expected`, an arrival expects the bytes.
fn awaited(b: &Builder, parity: u32, expected: bool) {
    let (full, tile) = full_and_tile(b, 256);
    let x = b.param_pointer("x", Elem::F32);
    init(b, full, 1);
    b.if_lanes(thread(b, 0), || {
        b.bulk_load(tile, x, 256, full, LoadOptions::default());
        if expected { b.mbarrier_arrive_expect(full, 256) } else { b.mbarrier_arrive(full) }
    });
    b.warp_sync();
    b.mbarrier_wait(full, parity);
    _ = b.load::<F32>(tile);
}

/// A kernel waits, but for another phase, or no arrival expects the copy's bytes. Copies are late, since early copies
/// would let no thread go on.
#[test]
fn a_wait_that_does_not_order_is_named() {
    let parity = case("parity", Rule::Race, 32, |b, _| awaited(b, 1, true)).report(Policy::Lazy);
    says(
        &parity,
        &[
            "for parity 1 passed by an earlier phase than the copy's",
            "missing: a wait with the parity of the copy's phase",
        ],
    );
    let bytes = case("bytes", Rule::Race, 32, |b, _| awaited(b, 0, false)).report(Policy::Lazy);
    says(
        &bytes,
        &[
            "was for completed without the copy's bytes",
            "missing: an arrival that expects the bytes of the copy (expect_tx)",
        ],
    );
}
