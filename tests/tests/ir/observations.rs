//! Probes and assertions, which leave no trace in PTX.

use fa3_ir::lang::*;
use fa3_ir::ptx;

use crate::ptxas::assemble;

/// A kernel with y[i] = 2 x[i], a shuffle, and a product. If `observed`, observations of every kind come in between.
fn kernel(observed: bool) -> Kernel {
    Kernel::build("observed", Launch::threads(128), |b| {
        let [x, y] = ["x", "y"].map(|name| b.param_pointer(name, Elem::F32));
        let tid = b.tid();
        let numbers = b.load::<F32>(tid.mad_wide(4, x));
        let count = b.var("count", 0);
        if observed {
            b.probe("tid", tid);
            b.probe("x", x);
            b.probe("count", count);
            b.probe("constant", 1.5);
            b.assert(tid.lt(128), "there are 128 threads");
            b.assert(!tid.eq(128), "there is no other");
            // A chain of values across branches, memory and other lanes, under a guard.
            let again = b.load::<F32>(tid.mad_wide(4, x));
            b.if_lanes(tid.lt(7), || b.probe("again", again * 2.0));
            b.if_else_uniform(again.gt(0.0).vote_any(), || b.probe("sum", again), || b.probe("none", again));
            b.guarded(tid.eq(3), || b.assert(again.abs().lt(1e30), "x is finite"));
            let neighbours = again.shfl_bfly(1) + again;
            b.once_per_warp(|| b.probe("mean", neighbours * 0.5));
        }
        b.for_each((0, 4), 1, |round| {
            count.update(|count| count + round);
            if observed {
                b.assert(count.now().lt(7), "0 + 1 + 2 + 3");
            }
        });
        let mut frag = Frag::zeros(b, 16);
        frag.map_in_place(|x, _| x + numbers);
        if observed {
            b.probe("frag", &frag);
            b.probe("rows", frag.row_sum());
        }
        let sum = frag.row_sum()[Half::Upper];
        b.role(Role::new("all", 0..4), || {
            if observed {
                b.probe("sum", sum * 2.0);
            }
            b.store(tid.mad_wide(4, y), sum + count.now().to_f32());
        });
    })
}

#[test]
fn ptx_is_the_same_without_observations() {
    let (with, without) = (ptx::emit(&kernel(true)).unwrap(), ptx::emit(&kernel(false)).unwrap());
    assert_eq!(with, without);
    assemble(&kernel(true));
}

/// Removing observations removes only values that nothing else reads. Values that nothing reads stay.
#[test]
fn what_others_read_stays() {
    let text = |observed: bool| {
        let kernel = Kernel::build("k", Launch::threads(32), |b| {
            let (y, lane) = (b.param_pointer("y", Elem::U32), b.lane_id());
            let (twice, _unread) = (lane + lane, lane * 3);
            if observed {
                b.probe("twice", twice);
                b.probe("thrice", twice + lane);
            }
            b.if_lanes(lane.eq(0), || ());
            b.store(twice.mad_wide(4, y), lane);
        });
        ptx::emit(&kernel).unwrap().text
    };
    assert_eq!(text(true), text(false));
}

#[test]
fn the_reader_sees_observations() {
    let text = kernel(true).to_string();
    for line in [
        "probe \"tid\" r",
        "probe \"count\" count.",
        "probe \"constant\" 1.5",
        "assert \"there are 128 threads\" p",
        "assert \"there is no other\" !p",
        "probe \"frag\" {acc.",
        "assert \"x is finite\" p",
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
}
