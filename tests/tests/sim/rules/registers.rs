//! Registers: unassigned values, values that differ between lanes, and the register pool.

use fa3_ir::lang::*;
use fa3_sim::{Policy, Rule};

use super::{Case, case, own_word, says, thread};

pub(super) const CASES: &[Case] = &[
    case("values of other lanes are not read", Rule::I1, 32, |b, broken| {
        let y = b.param_pointer("y", Elem::F32);
        let (lane, at) = (b.lane_id(), own_word(b, y));
        let mut value = None;
        b.guarded(lane.lt(16), || value = Some(b.copy(3.0)));
        let value = value.expect("the guard's body runs");
        b.guarded(lane.lt(if broken { 17 } else { 16 }), || b.store(at, value));
    }),
    case("uniform is what lanes agree on", Rule::Uniform, 32, |b, broken| {
        let at = own_word(b, b.param_pointer("y", Elem::F32));
        let which = b.lane_id().lt(if broken { 16 } else { 32 });
        b.if_else_uniform(which, || b.store(at, 1.0), || b.store(at, 2.0));
    }),
    case("breaks are uniform", Rule::Uniform, 32, |b, broken| {
        let (lane, count) = (b.lane_id(), b.var::<B32>("count", 0));
        b.repeat(|| {
            let end = if broken { lane & 1 } else { b.copy(3) };
            b.break_if(count.now().ge(end));
            count.set(count + 1);
        });
    }),
    // A warpgroup that gives registers back must not wait for a warpgroup that needs them.
    case("the pool suffices", Rule::R1, 384, |b, broken| {
        let done = b.barrier("done", 384);
        b.role(Role::new("producer", 0..4), || {
            if broken {
                b.sync(done);
            }
            b.set_max_registers_down(24);
            if !broken {
                b.sync(done);
            }
        });
        b.role(Role::new("consumer", 4..12), || {
            b.set_max_registers_up(240);
            b.sync(done);
        });
    }),
    case("assertions hold", Rule::Assert, 64, asserting),
    case("traps are found", Rule::Trap, 32, |b, broken| {
        b.guarded(thread(b, if broken { 7 } else { 99 }), || b.trap());
    }),
];

fn asserting(b: &Builder, broken: bool) {
    let lane = b.lane_id();
    let limit = if broken { 30 } else { 32 };
    b.if_lanes(lane.ge(1), || b.assert(lane.lt(limit), "the lane is one of these"));
    b.guarded(lane.eq(7), || b.assert(!lane.ne(7), "there is one such lane"));
}

#[test]
fn an_assertion_names_its_lanes() {
    let report = case("asserting", Rule::Assert, 64, asserting).report(Policy::Eager);
    says(&report, &["ASSERT: \"the lane is one of these\" does not hold in lanes 30, 31\n"]);
}
