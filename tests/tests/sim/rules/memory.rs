//! Loads and stores.

use fa3_ir::lang::*;
use fa3_ir::*;
use fa3_sim::{Memory, Policy, Rule, Simulation};

use super::{case, own_word, thread, warp};

#[test]
fn threads_do_not_race_in_shared_memory() {
    case(Rule::Race, 64, |b, broken| {
        let cells = b.region("cells", 256, 16);
        let (tid, start) = (b.tid(), b.address(cells));
        b.store(tid.mad(4, start), 1.0);
        if !broken {
            b.sync_cta();
        }
        b.store((tid ^ 32).mad(4, start), 2.0);
    })
    .check();
}

/// Different bytes of the same 16 do not conflict.
#[test]
fn threads_share_cells() {
    case(Rule::Race, 64, |b, broken| {
        let cells = b.region("cells", 256, 16);
        let (tid, start) = (b.tid(), b.address(cells));
        let half = tid & (if broken { 31 } else { 63 });
        // Warps take turns word by word.
        let turned = tid >> 5;
        let lane = half & 31;
        let word = lane.mad(2, turned);
        let word = if broken { lane } else { word };
        b.store(word.mad(4, start), 1.0);
    })
    .check();
}

/// Between regions there is nothing.
#[test]
fn addresses_lie_in_a_region() {
    case(Rule::Bounds, 32, |b, broken| {
        let (words, _apart) = (b.region("words", 100, 16), b.region("apart", 128, 128));
        let lane = b.lane_id();
        let start = b.address(words);
        let word = if broken { lane } else { lane & 15 };
        b.store(word.mad(4, start), 1);
    })
    .check();
}

/// No barrier spans CTAs.
#[test]
fn what_only_atomics_order_is_not_said_to_miss_a_barrier() {
    let add = |threads| {
        case(Rule::Race, threads, |b, _| {
            let x = (b.tid() & 31).mad_wide(4, b.param_pointer("x", Elem::U32));
            b.store(x, b.load::<B32>(x) + 1);
        })
    };
    let ctas = add(32).grid(2).report();
    assert!(ctas.contains("missing: atomics, if both update one value; or a flag"), "{ctas}");
    let warps = add(64).report();
    assert!(warps.contains("missing: a barrier between the two; or atomics, if"), "{warps}");
}

#[test]
fn ctas_do_not_race_in_global_memory() {
    case(Rule::Race, 32, |b, broken| {
        let x = b.param_pointer("x", Elem::U32);
        let (cta, lane) = (b.cta_x(), b.lane_id());
        let word = if broken { lane } else { cta.mad(32, lane) };
        b.store(word.mad_wide(4, x), cta);
    })
    .grid(2)
    .check();
}

/// The second CTA reads what the first released.
#[test]
fn flags_order_ctas() {
    case(Rule::Race, 32, |b, broken| {
        let (x, flag) = (b.param_pointer("x", Elem::U32), b.param_pointer("s", Elem::U32));
        let (cta, first) = (b.cta_x(), thread(b, 0));
        let leads = cta.eq(0);
        let at = own_word(b, x);
        b.if_else_uniform(
            leads,
            || {
                b.store(at, 1.0);
                b.warp_sync();
                b.guarded(first, || {
                    if broken {
                        b.reduce_add_u32(flag, 1);
                    } else {
                        b.store_release(flag, 1);
                    }
                });
            },
            || {
                b.repeat(|| b.break_if(b.load_acquire(flag).ne(0).vote_all()));
                _ = b.load::<F32>(at);
            },
        );
    })
    .grid(2)
    .check();
}

/// A fence before a relaxed atomic, and one after it, do the same.
#[test]
fn fences_make_relaxed_atomics_order() {
    case(Rule::Race, 32, |b, broken| {
        let (x, count) = (b.param_pointer("x", Elem::U32), b.param_pointer("s", Elem::U32));
        let (cta, first) = (b.cta_x(), thread(b, 0));
        let at = own_word(b, cta.mad_wide(128, x));
        b.store(at, 1.0);
        if !broken {
            b.fence(FenceInst::AcqRelGpu);
        }
        let ticket = b.var("ticket", 0);
        b.guarded(first, || {
            ticket.set(b.atomic_add_u32(count, 1));
        });
        b.if_uniform(ticket.now().shfl_idx(0).eq(1), || {
            b.fence(FenceInst::AcqRelGpu);
            // Who comes last reads what both wrote.
            for cta in [0, 128] {
                let at = own_word(b, x);
                _ = b.load::<F32>(at.at(cta));
            }
        });
    })
    .grid(2)
    .check();
}

#[test]
fn accesses_lie_in_allocations() {
    case(Rule::Bounds, 32, |b, broken| {
        let x = b.param_pointer("x", Elem::U32);
        let at = own_word(b, x);
        _ = b.load::<B32>(at.at(if broken { 65536 - 64 } else { 65536 - 128 }));
    })
    .check();
}

#[test]
fn accesses_are_aligned() {
    case(Rule::Bounds, 32, |b, broken| {
        let x = b.param_pointer("x", Elem::U32);
        _ = b.load_vector::<B32, 4>(b.lane_id().mad_wide(if broken { 8 } else { 16 }, x));
    })
    .check();
}

#[test]
fn rows_of_matrices_are_aligned() {
    case(Rule::L1, 32, |b, broken| {
        let tile = b.region("tile", 1024, 16);
        let (lane, start) = (b.lane_id(), b.address(tile));
        let at = lane.mad(32, start);
        b.store_vector(at, [0.0; 4]);
        b.store_vector(at.at(16), [0.0; 4]);
        b.warp_sync();
        _ = b.ldmatrix::<4>(lane.mad(if broken { 8 } else { 16 }, start), false);
    })
    .check();
}

#[test]
fn shared_memory_is_written_before_it_is_read() {
    case(Rule::I1, 32, |b, broken| {
        let tile = b.region("tile", 128, 16);
        let (lane, start) = (b.lane_id(), b.address(tile));
        let at = lane.mad(4, start);
        if !broken {
            b.store(at, 0.0);
        }
        _ = b.load::<F32>(at);
    })
    .check();
}

#[test]
fn global_memory_is_written_before_it_is_read() {
    case(Rule::I1, 32, |b, broken| {
        let (x, y) = (b.param_pointer("x", Elem::F32), b.param_pointer("y", Elem::F32));
        let at = own_word(b, if broken { y } else { x });
        _ = b.load::<F32>(at);
    })
    .check();
}

#[test]
fn outputs_are_written_exactly_once() {
    for (extra, count) in [(0, 0), (1, 1), (-1, 1)] {
        let kernel = Kernel::build("outputs", Launch::threads(64), |b| {
            let y = b.param_pointer("y", Elem::F32);
            let at = own_word(b, y);
            let some = warp(b, 0);
            if extra < 0 {
                b.guarded(some, || b.store(at, 1.0));
            } else {
                b.store(at, 1.0);
            }
            if extra > 0 {
                b.guarded(some, || b.store(at, 2.0));
            }
        });
        let mut memory = Memory::new();
        let y = memory.alloc("y", 256);
        memory.expect_written_once(y);
        let args = vec![ArgValue::Pointer(y.address())];
        let outcome = Simulation::new(&kernel).args(args).policy(Policy::Random(3)).run(&mut memory).unwrap();
        let rules: Vec<Rule> = outcome.findings.iter().map(|finding| finding.rule).collect();
        assert_eq!(rules, vec![Rule::I1; count]);
    }
}

#[test]
fn what_the_grid_before_writes_is_waited_for() {
    case(Rule::G1, 64, |b, broken| {
        let z = b.param_pointer("z", Elem::F32);
        let first = warp(b, 0);
        if !broken {
            b.if_uniform(first, || b.grid_dependency_wait());
        }
        b.sync_cta();
        let at = own_word(b, z);
        _ = b.load::<F32>(at);
    })
    .check();
}
