//! Named barriers and deadlocks.

use fa3_ir::lang::*;
use fa3_sim::{Policy, Rule};

use super::{Case, case, init, says, thread, warp};

pub(super) const CASES: &[Case] = &[
    case("warps agree on the threads of a barrier", Rule::B1, 64, |b, broken| {
        let id = b.barrier_id(b.barrier("pair", 64));
        let sync = |threads| b.sync_computed(id, threads);
        b.if_else_uniform(warp(b, 0), || sync(64), || sync(if broken { 96 } else { 64 }));
    }),
    case("a warp arrives once", Rule::B2, 64, |b, broken| {
        let [barrier, go] = ["pair", "go"].map(|name| b.barrier(name, 64));
        let arrives = || {
            b.arrive(barrier);
            if broken {
                b.arrive(barrier);
            }
            b.sync(go);
        };
        let waits = || {
            b.sync(go);
            b.sync(barrier);
        };
        b.if_else_uniform(warp(b, 0), arrives, waits);
    }),
    // One warpgroup syncs and the other arrives. The writes before the arrival are ordered.
    case("arrivals order", Rule::Race, 64, |b, broken| {
        let (barrier, cell) = (b.barrier("pair", 64), b.region("cell", 4, 4));
        let (writer, reader) = (thread(b, 0), thread(b, 32));
        let writes = || {
            if broken {
                b.arrive(barrier);
            }
            b.guarded(writer, || b.store(cell, 1.0));
            if !broken {
                b.arrive(barrier);
            }
        };
        let reads = || {
            b.sync(barrier);
            b.guarded(reader, || if broken { b.store(cell, 2.0) } else { _ = b.load::<F32>(cell) });
        };
        b.if_else_uniform(warp(b, 0), writes, reads);
    }),
    case("a warp waits for another that waits for it", Rule::Deadlock, 96, stuck),
    // Warps that poll forever are in a deadlock, too.
    case("polling is waiting", Rule::Deadlock, 64, |b, broken| {
        let full = b.mbarriers("full", 1, 1);
        init(b, full, 1);
        let arrives = thread(b, if broken { 99 } else { 0 });
        b.guarded(arrives, || b.mbarrier_arrive(full));
        b.if_uniform(warp(b, 1), || b.repeat(|| b.break_if(b.mbarrier_try_wait(full, 0).vote_all())));
    }),
    // A barrier does not wait for a warp that has exited.
    case("exited warps are not expected", Rule::Deadlock, 96, |b, broken| {
        let (one, pair) = (b.barrier("one", 64), b.barrier("all", 96));
        b.role(Role::new("gone", 0..1), || ());
        b.role(Role::new("rest", 1..3), || {
            b.sync_cta();
            b.sync(if broken { pair } else { one });
        });
    }),
];

fn stuck(b: &Builder, broken: bool) {
    let (barrier, full) = (b.barrier("pair", 96), b.mbarriers("full", 2, 1));
    b.init_mbarriers();
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
    let report = case("stuck", Rule::Deadlock, 96, stuck).report(Policy::Eager);
    says(
        &report,
        &[
            "producer.w0 of cta 0, at tests/tests/sim/rules/barriers.rs:",
            "waiting at barrier pair: 32 of 96 threads have arrived, not w1 w2",
            "consumer.w1 to w2 of cta 0, at tests/tests/sim/rules/barriers.rs:",
            "waiting for full+8 parity 0: phase 0 misses 1 of 1 arrivals and 0 bytes",
            "replay:  kernel case, grid [1, 1, 1], policy eager",
        ],
    );
}

/// Warps that wait for the same barrier share one line.
#[test]
fn a_deadlock_groups_who_waits() {
    let report = case("stuck", Rule::Deadlock, 96, stuck).grid(6).report(Policy::Eager);
    assert_eq!(report.lines().filter(|line| line.starts_with("  waits:")).count(), 2, "{report}");
    says(
        &report,
        &[
            "  waits:   producer.w0 of cta 0, and of 5 other ctas, at ",
            "  waits:   consumer.w1 to w2 of cta 0, and of 5 other ctas, at ",
        ],
    );
}
