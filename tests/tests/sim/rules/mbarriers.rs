//! mbarriers.

use fa3_ir::lang::*;
use fa3_sim::{Policy, Rule};

use super::{case, init, own_word, thread, warp};

#[test]
fn an_mbarrier_is_initialised_once() {
    case(Rule::M1, 32, |b, broken| {
        let full = b.mbarriers("full", 1, 1);
        init(b, full, 1);
        let first = thread(b, 0);
        b.guarded(first, || {
            if !broken {
                b.mbarrier_invalidate(full);
            }
            b.mbarrier_init(full, 1);
        });
    })
    .check();
}

#[test]
fn an_mbarrier_is_initialised_before_use() {
    case(Rule::M1, 32, |b, broken| {
        let full = b.mbarriers("full", 2, 1);
        init(b, full, 1);
        let first = thread(b, 0);
        b.guarded(first, || b.mbarrier_arrive(full.at(8 * i32::from(broken))));
    })
    .check();
}

#[test]
fn an_mbarrier_is_not_data() {
    case(Rule::M1, 32, |b, broken| {
        let (full, data) = (b.mbarriers("full", 1, 1), b.region("data", 8, 8));
        init(b, full, 1);
        let first = thread(b, 0);
        let to = b.address(if broken { full } else { data });
        b.guarded(first, || b.store(to, 1.0));
    })
    .check();
}

#[test]
fn arrivals_do_not_exceed_what_is_missing() {
    case(Rule::M2, 32, |b, broken| {
        let (full, tile) = (b.mbarriers("full", 1, 1), b.region("tile", 16, 16));
        let x = b.param_pointer("x", Elem::F32);
        init(b, full, 1);
        let first = thread(b, 0);
        b.if_lanes(first, || {
            b.mbarrier_arrive_expect(full, 16);
            if broken {
                b.mbarrier_arrive(full);
            }
            b.bulk_load(tile, x, 16, full, LoadOptions::default());
        });
        b.mbarrier_wait(full, 0);
    })
    .check();
}

/// A waiter three phases late takes the third for the first.
#[test]
fn waits_are_not_late() {
    case(Rule::M3, 64, |b, broken| {
        let (ring, flag) = (b.mbarriers("ring", 1, 1), b.param_pointer("s", Elem::U32));
        init(b, ring, 1);
        b.role(Role::new("runner", 0..1), || {
            let elected = b.elect();
            for parity in [0, 1, 0].iter().take(if broken { 3 } else { 1 }) {
                b.guarded(elected, || b.mbarrier_arrive(ring));
                b.mbarrier_wait(ring, *parity);
            }
            b.guarded(elected, || b.reduce_add_u32(flag, 1));
        });
        b.role(Role::new("late", 1..2), || {
            // Relaxed: it learns that time has passed, and nothing else.
            b.repeat(|| b.break_if(b.atomic_add_u32(flag, 0).ne(0).vote_all()));
            b.mbarrier_wait(ring, 0);
        });
    })
    .check();
}

#[test]
fn a_phase_is_seen_before_the_next_begins() {
    case(Rule::M4, 32, |b, broken| {
        let ring = b.mbarriers("ring", 1, 1);
        init(b, ring, 1);
        let first = thread(b, 0);
        b.guarded(first, || b.mbarrier_arrive(ring));
        if !broken {
            b.mbarrier_wait(ring, 0);
        }
        b.guarded(first, || b.mbarrier_arrive(ring));
    })
    .check();
}

#[test]
fn expected_bytes_are_those_that_come() {
    for wrong in [16, -16] {
        let build: fn(&Builder, bool) =
            if wrong > 0 { |b, broken| load(b, broken, 16) } else { |b, broken| load(b, broken, -16) };
        case(Rule::M5, 64, build).check();
    }
}

fn load(b: &Builder, broken: bool, wrong: i32) {
    let (full, tile) = (b.mbarriers("full", 1, 1), b.region("tile", 256, 16));
    let (x, y) = (b.param_pointer("x", Elem::F32), b.param_pointer("y", Elem::F32));
    init(b, full, 1);
    let first = thread(b, 0);
    b.if_lanes(first, || {
        b.mbarrier_arrive_expect(full, 256u32.wrapping_add_signed(wrong * i32::from(broken)));
        b.bulk_load(tile, x, 256, full, LoadOptions::default());
    });
    b.mbarrier_wait(full, 0);
    let (tid, start) = (b.tid(), b.address(tile));
    let value = b.load::<F32>(tid.mad(4, start));
    let to = own_word(b, y);
    b.store(to, value);
}

/// Bytes that nobody expects are found at the end, if not before.
#[test]
fn bytes_are_expected() {
    let unexpected = case(Rule::M5, 64, |b, broken| load(b, broken, -256));
    // Nobody waits for them, either.
    unexpected.check_either(Rule::Race);
}

/// A peer that never issues its half is a deadlock of its own: what is expected is right.
#[test]
fn bytes_of_a_stuck_peer_are_no_wrong_expectation() {
    case(Rule::Deadlock, 32, |b, broken| {
        let x = b.param_pointer("x", Elem::F32);
        let (full, never, tile) =
            (b.mbarriers("full", 1, 1), b.mbarriers("never", 1, 1), b.region("tile", 256, 128));
        let (rank, first) = (b.cluster_cta_rank(), thread(b, 0));
        let half = rank.mad(128, b.address(tile));
        let follows = rank.eq(1);
        b.guarded(first, || {
            b.mbarrier_init(full, 1);
            b.mbarrier_init(never, 1);
        });
        b.fence(FenceInst::MbarrierInit);
        b.cluster_arrive();
        b.cluster_wait();
        for round in 0..2 {
            b.if_lanes(first, || b.mbarrier_arrive_expect(full, 256));
            if broken && round == 1 {
                b.if_uniform(follows, || b.mbarrier_wait(never, 0));
            }
            b.if_lanes(first, || b.bulk_load(half, x, 128, full, LoadOptions::multicast(3u16)));
            b.mbarrier_wait(full, round);
            b.cluster_arrive();
            b.cluster_wait();
        }
    })
    .cluster(2)
    .check();
}

#[test]
fn initialisation_is_fenced() {
    case(Rule::M6, 64, |b, broken| {
        let full = b.mbarriers("full", 1, 1);
        let first = thread(b, 0);
        b.guarded(first, || b.mbarrier_init(full, 1));
        if !broken {
            b.fence(FenceInst::MbarrierInit);
        }
        b.sync_cta();
        let other = thread(b, 32);
        b.guarded(other, || b.mbarrier_arrive(full));
        b.mbarrier_wait(full, 0);
    })
    .check();
}

/// A fence between the proxies does as well.
#[test]
fn initialisation_is_ordered_before_copies() {
    case(Rule::M6, 32, |b, broken| {
        let (full, tile) = (b.mbarriers("full", 1, 1), b.region("tile", 16, 16));
        let x = b.param_pointer("x", Elem::F32);
        let first = thread(b, 0);
        b.if_lanes(first, || {
            b.mbarrier_init(full, 1);
            if !broken {
                b.fence(FenceInst::ProxyAsync);
            }
            b.mbarrier_arrive_expect(full, 16);
            b.bulk_load(tile, x, 16, full, LoadOptions::default());
        });
        b.warp_sync();
        b.mbarrier_wait(full, 0);
    })
    .check();
}

/// The full barrier's wait is what orders the data.
#[test]
fn data_is_waited_for() {
    case(Rule::Race, 64, |b, broken| {
        let (full, tile) = (b.mbarriers("full", 1, 1), b.region("tile", 256, 16));
        let x = b.param_pointer("x", Elem::F32);
        init(b, full, 1);
        let first = thread(b, 0);
        b.if_lanes(first, || {
            b.mbarrier_arrive_expect(full, 256);
            b.bulk_load(tile, x, 256, full, LoadOptions::default());
        });
        b.sync_cta();
        let (tid, start) = (b.tid(), b.address(tile));
        let from = tid.mad(4, start);
        let consumer = warp(b, 1);
        if !broken {
            b.mbarrier_wait(full, 0);
        }
        b.if_uniform(consumer, || _ = b.load::<F32>(from));
        b.mbarrier_wait(full, 0);
    })
    .check();
}

/// A copy's completion does not publish what its issuer wrote; an arrival after it does.
#[test]
fn completion_orders_nothing_but_the_copy() {
    case(Rule::Race, 64, |b, broken| {
        let (full, tile, word) =
            (b.mbarriers("full", 1, 1), b.region("tile", 16, 16), b.region("word", 4, 4));
        let x = b.param_pointer("x", Elem::F32);
        init(b, full, 1);
        let (first, reader) = (thread(b, 0), thread(b, 32));
        b.if_lanes(first, || {
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
        let one = b.copy(2.0);
        b.guarded(reader, || b.store(word, one));
    })
    .check();
}

/// A copy, awaited by `parity`; it expects its bytes or not.
fn awaited(b: &Builder, parity: u32, expected: bool) {
    let (full, tile) = (b.mbarriers("full", 1, 1), b.region("tile", 256, 16));
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

/// There is a wait, but for another phase, or nobody expected the copy's bytes.
#[test]
fn a_wait_that_does_not_order_is_named() {
    // Copies that are late: if they were early, nobody could go on.
    let report = |case: super::Case| -> String {
        let findings = case.run(&case.kernel(true), Policy::Lazy).findings;
        findings.iter().map(ToString::to_string).collect()
    };
    let parity = report(case(Rule::Race, 32, |b, _| awaited(b, 1, true)));
    assert!(parity.contains("for parity 1 passed by an earlier phase than the copy's"), "{parity}");
    assert!(parity.contains("missing: a wait with the parity of the copy's phase"), "{parity}");
    let bytes = report(case(Rule::Race, 32, |b, _| awaited(b, 0, false)));
    assert!(bytes.contains("was for completed without the copy's bytes"), "{bytes}");
    assert!(bytes.contains("missing: an arrival that expects the bytes of the copy (expect_tx)"), "{bytes}");
}
