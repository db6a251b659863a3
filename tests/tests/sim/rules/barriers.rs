//! Named barriers, and what happens when nobody can go on.

use fa3_ir::lang::*;
use fa3_sim::Rule;

use super::{case, thread, warp};

#[test]
fn warps_agree_on_the_threads_of_a_barrier() {
    case(Rule::B1, 64, |b, broken| {
        let barrier = b.barrier("pair", 64);
        let id = b.barrier_id(barrier);
        let first = warp(b, 0);
        b.if_else_uniform(
            first,
            || b.sync_computed(id, 64),
            || b.sync_computed(id, if broken { 96 } else { 64 }),
        );
    })
    .check();
}

#[test]
fn a_warp_arrives_once() {
    case(Rule::B2, 64, |b, broken| {
        let barrier = b.barrier("pair", 64);
        let go = b.barrier("go", 64);
        let first = warp(b, 0);
        b.if_else_uniform(
            first,
            || {
                b.arrive(barrier);
                if broken {
                    b.arrive(barrier);
                }
                b.sync(go);
            },
            || {
                b.sync(go);
                b.sync(barrier);
            },
        );
    })
    .check();
}

/// Idiom: one warpgroup syncs, the other arrives; what was written before is ordered.
#[test]
fn arrivals_order() {
    case(Rule::Race, 64, |b, broken| {
        let (barrier, cell) = (b.barrier("pair", 64), b.region("cell", 4, 4));
        let first = warp(b, 0);
        let (writer, reader) = (thread(b, 0), thread(b, 32));
        b.if_else_uniform(
            first,
            || {
                if broken {
                    b.arrive(barrier);
                }
                b.guarded(writer, || b.store(cell, 1.0));
                if !broken {
                    b.arrive(barrier);
                }
            },
            || {
                b.sync(barrier);
                if broken {
                    b.guarded(reader, || b.store(cell, 2.0));
                } else {
                    b.guarded(reader, || _ = b.load::<F32>(cell));
                }
            },
        );
    })
    .check();
}

fn stuck(b: &Builder, broken: bool) {
    let (barrier, full) = (b.barrier("pair", 96), b.mbarriers("full", 2, 1));
    let init = thread(b, 0);
    b.guarded(init, || {
        b.mbarrier_init(full, 1);
        b.mbarrier_init(full.at(8), 1);
    });
    b.fence(FenceInst::MbarrierInit);
    b.sync_cta();
    b.role(Role::new("producer", 0..1), || {
        if !broken {
            b.guarded(b.elect(), || b.mbarrier_arrive(full.at(8)));
        }
        b.sync(barrier);
    });
    b.role(Role::new("consumer", 1..3), || {
        b.mbarrier_wait(full.at(8), 0);
        b.arrive(barrier);
    });
}

#[test]
fn a_deadlock_says_who_waits_for_whom() {
    case(Rule::Deadlock, 96, stuck).check();
    let report = case(Rule::Deadlock, 96, stuck).report();
    assert!(report.contains("producer.w0 of cta 0, at tests/tests/sim/rules/barriers.rs:"), "{report}");
    assert!(report.contains("waiting at barrier pair: 32 of 96 threads have arrived, not w1 w2"), "{report}");
    assert!(report.contains("consumer.w1 to w2 of cta 0, at tests/tests/sim/rules/barriers.rs:"), "{report}");
    assert!(
        report.contains("waiting for full+8 parity 0: phase 0 misses 1 of 1 arrivals and 0 bytes"),
        "{report}"
    );
    assert!(report.contains("replay:  kernel case, grid [1, 1, 1], policy eager"), "{report}");
}

/// Warps that wait for the same thing share one line.
#[test]
fn a_deadlock_groups_who_waits() {
    let report = case(Rule::Deadlock, 96, stuck).grid(6).report();
    let lines: Vec<&str> = report.lines().filter(|line| line.starts_with("  waits:")).collect();
    assert_eq!(lines.len(), 2, "{report}");
    assert!(lines[0].contains("producer.w0 of cta 0, and of 5 other ctas, at "), "{report}");
    assert!(lines[1].contains("consumer.w1 to w2 of cta 0, and of 5 other ctas, at "), "{report}");
}

/// Warps that ask again and again do not go on either.
#[test]
fn polling_is_waiting() {
    case(Rule::Deadlock, 64, |b, broken| {
        let full = b.mbarriers("full", 1, 1);
        super::init(b, full, 1);
        let last = warp(b, 1);
        let arrives = thread(b, if broken { 99 } else { 0 });
        b.guarded(arrives, || b.mbarrier_arrive(full));
        b.if_uniform(last, || {
            b.repeat(|| b.break_if(b.mbarrier_try_wait(full, 0).vote_all()));
        });
    })
    .check();
}

/// A warp that has exited is not waited for.
#[test]
fn exited_warps_are_not_expected() {
    case(Rule::Deadlock, 96, |b, broken| {
        let (one, pair) = (b.barrier("one", 64), b.barrier("all", 96));
        b.role(Role::new("gone", 0..1), || ());
        b.role(Role::new("rest", 1..3), || {
            b.sync_cta();
            b.sync(if broken { pair } else { one });
        });
    })
    .check();
}
