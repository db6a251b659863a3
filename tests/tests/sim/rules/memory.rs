//! Loads and stores.

use fa3_ir::lang::*;
use fa3_ir::*;
use fa3_sim::{Memory, Policy, Rule, Simulation};

use super::{Case, case, own_cell, own_word, says, thread, warp};

pub(super) const CASES: &[Case] = &[
    case("threads do not race in shared memory", Rule::Race, 64, |b, broken| {
        let cells = b.region("cells", 256, 16);
        let (tid, start) = (b.tid(), b.address(cells));
        b.store(tid.mad(4, start), 1.0);
        if !broken {
            b.sync_cta();
        }
        b.store((tid ^ 32).mad(4, start), 2.0);
    }),
    // Accesses to different bytes of the same 16 bytes do not conflict. Warps take turns word by word.
    case("threads share cells", Rule::Race, 64, |b, broken| {
        let cells = b.region("cells", 256, 16);
        let (tid, start) = (b.tid(), b.address(cells));
        let lane = tid & 31;
        let word = if broken { lane } else { lane.mad(2, tid >> 5) };
        b.store(word.mad(4, start), 1.0);
    }),
    // The bytes between regions belong to no region.
    case("addresses lie in a region", Rule::Bounds, 32, |b, broken| {
        let (words, _apart) = (b.region("words", 100, 16), b.region("apart", 128, 128));
        let (lane, start) = (b.lane_id(), b.address(words));
        b.store((if broken { lane } else { lane & 15 }).mad(4, start), 1);
    }),
    case("CTAs do not race in global memory", Rule::Race, 32, |b, broken| {
        let x = b.param_pointer("x", Elem::U32);
        let (cta, lane) = (b.cta_x(), b.lane_id());
        let word = if broken { lane } else { cta.mad(32, lane) };
        b.store(word.mad_wide(4, x), cta);
    })
    .grid(2),
    // The second CTA reads what the first CTA released.
    case("flags order CTAs", Rule::Race, 32, |b, broken| {
        let (x, flag) = (b.param_pointer("x", Elem::U32), b.param_pointer("s", Elem::U32));
        let at = own_word(b, x);
        let release = || if broken { b.reduce_add_u32(flag, 1) } else { b.store_release(flag, 1) };
        let writes = || {
            b.store(at, 1.0);
            b.warp_sync();
            b.guarded(thread(b, 0), release);
        };
        let reads = || {
            b.repeat(|| b.break_if(b.load_acquire(flag).ne(0).vote_all()));
            _ = b.load::<F32>(at);
        };
        b.if_else_uniform(b.cta_x().eq(0), writes, reads);
    })
    .grid(2),
    // Fences before and after a relaxed atomic make it a release and an acquire.
    case("fences make relaxed atomics order", Rule::Race, 32, |b, broken| {
        let (x, count) = (b.param_pointer("x", Elem::U32), b.param_pointer("s", Elem::U32));
        b.store(own_word(b, b.cta_x().mad_wide(128, x)), 1.0);
        if !broken {
            b.fence(FenceInst::AcqRelGpu);
        }
        let ticket = b.var("ticket", 0);
        b.guarded(thread(b, 0), || ticket.set(b.atomic_add_u32(count, 1)));
        b.if_uniform(ticket.now().shfl_idx(0).eq(1), || {
            b.fence(FenceInst::AcqRelGpu);
            // The last CTA reads what both CTAs wrote.
            for cta in [0, 128] {
                _ = b.load::<F32>(own_word(b, x).at(cta));
            }
        });
    })
    .grid(2),
    case("accesses lie in allocations", Rule::Bounds, 32, |b, broken| {
        let at = own_word(b, b.param_pointer("x", Elem::U32));
        _ = b.load::<B32>(at.at(if broken { 65536 - 64 } else { 65536 - 128 }));
    }),
    case("accesses are aligned", Rule::Bounds, 32, |b, broken| {
        let x = b.param_pointer("x", Elem::U32);
        _ = b.load_vector::<B32, 4>(b.lane_id().mad_wide(if broken { 8 } else { 16 }, x));
    }),
    case("rows of matrices are aligned", Rule::L1, 32, |b, broken| {
        let tile = b.region("tile", 1024, 16);
        let (lane, start) = (b.lane_id(), b.address(tile));
        let at = lane.mad(32, start);
        b.store_vector(at, [0.0; 4]);
        b.store_vector(at.at(16), [0.0; 4]);
        b.warp_sync();
        _ = b.ldmatrix::<4>(lane.mad(if broken { 8 } else { 16 }, start), false);
    }),
    case("shared memory is written before it is read", Rule::I1, 32, |b, broken| {
        let at = own_cell(b, b.region("tile", 128, 16));
        if !broken {
            b.store(at, 0.0);
        }
        _ = b.load::<F32>(at);
    }),
    case("global memory is written before it is read", Rule::I1, 32, |b, broken| {
        let [x, y] = ["x", "y"].map(|name| b.param_pointer(name, Elem::F32));
        _ = b.load::<F32>(own_word(b, if broken { y } else { x }));
    }),
    case("what the grid before writes is waited for", Rule::G1, 64, |b, broken| {
        let z = b.param_pointer("z", Elem::F32);
        if !broken {
            b.if_uniform(warp(b, 0), || b.grid_dependency_wait());
        }
        b.sync_cta();
        _ = b.load::<F32>(own_word(b, z));
    }),
];

/// No barrier spans CTAs, so a report on a race between CTAs does not suggest a barrier.
#[test]
fn what_only_atomics_order_is_not_said_to_miss_a_barrier() {
    let add = |threads| {
        case("add", Rule::Race, threads, |b, _| {
            let x = (b.tid() & 31).mad_wide(4, b.param_pointer("x", Elem::U32));
            b.store(x, b.load::<B32>(x) + 1);
        })
    };
    let [ctas, warps] = [add(32).grid(2), add(64)].map(|case| case.report(Policy::Eager));
    says(&ctas, &["missing: atomics, if both update one value; or a flag"]);
    says(&warps, &["missing: a barrier between the two; or atomics, if"]);
}

#[test]
fn outputs_are_written_exactly_once() {
    for (extra, count) in [(0, 0), (1, 1), (-1, 1)] {
        let kernel = Kernel::build("outputs", Launch::threads(64), |b| {
            let at = own_word(b, b.param_pointer("y", Elem::F32));
            if extra >= 0 {
                b.store(at, 1.0);
            }
            if extra != 0 {
                b.guarded(warp(b, 0), || b.store(at, 2.0));
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
