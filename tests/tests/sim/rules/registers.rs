//! Registers: those that hold nothing, those that lanes disagree on, the pool.

use fa3_ir::lang::*;
use fa3_sim::Rule;

use super::{case, own_word, thread};

#[test]
fn values_of_other_lanes_are_not_read() {
    case(Rule::I1, 32, |b, broken| {
        let y = b.param_pointer("y", Elem::F32);
        let lane = b.lane_id();
        let value = half_defined(b, lane.lt(16));
        let at = own_word(b, y);
        b.guarded(lane.lt(if broken { 17 } else { 16 }), || b.store(at, value));
    })
    .check();
}

/// A value that only the lanes of `some` define.
fn half_defined<'k>(b: &'k Builder, some: V<'k, Pred>) -> V<'k, F32> {
    let mut value = None;
    b.guarded(some, || value = Some(b.copy(3.0)));
    value.expect("the guard's body runs")
}

#[test]
fn uniform_is_what_lanes_agree_on() {
    case(Rule::Uniform, 32, |b, broken| {
        let y = b.param_pointer("y", Elem::F32);
        let which = b.lane_id().lt(if broken { 16 } else { 32 });
        let at = own_word(b, y);
        b.if_else_uniform(which, || b.store(at, 1.0), || b.store(at, 2.0));
    })
    .check();
}

#[test]
fn breaks_are_uniform() {
    case(Rule::Uniform, 32, |b, broken| {
        let lane = b.lane_id();
        let count = b.var::<B32>("count", 0);
        b.repeat(|| {
            let end = if broken { lane & 1 } else { b.copy(3) };
            b.break_if(count.now().ge(end));
            count.set(count + 1);
        });
    })
    .check();
}

/// Who gives registers back must not wait for who needs them.
#[test]
fn the_pool_suffices() {
    case(Rule::R1, 384, |b, broken| {
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
    })
    .check();
}

#[test]
fn assertions_hold() {
    let case = || {
        case(Rule::Assert, 64, |b, broken| {
            let lane = b.lane_id();
            let limit = if broken { 30 } else { 32 };
            b.if_lanes(lane.ge(1), || b.assert(lane.lt(limit), "the lane is one of these"));
            b.guarded(lane.eq(7), || b.assert(!lane.ne(7), "there is one such lane"));
        })
    };
    case().check();
    let text = case().report();
    assert!(text.contains("ASSERT: \"the lane is one of these\" does not hold in lanes 30, 31\n"), "{text}");
}

#[test]
fn traps_are_found() {
    case(Rule::Trap, 32, |b, broken| {
        let which = thread(b, if broken { 7 } else { 99 });
        b.guarded(which, || b.trap());
    })
    .check();
}
