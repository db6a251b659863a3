//! Small whole kernels, built by hand: also for the tests of the simulator.

use fa3_ir::lang::*;

/// z = x + y over n elements, one a thread.
pub(crate) fn vector_add() -> Kernel {
    Kernel::build("vector_add", Launch::threads(256), |b| {
        let [x, y, z] = ["x", "y", "z"].map(|name| b.param_pointer(name, Elem::F32));
        let n = b.param_u32("n");
        let (tid, cta) = (b.tid(), b.cta_x());
        let i = cta.mad(256, tid).named("i");
        b.if_lanes(i.lt(n), || {
            let [x, y, z] = [x, y, z].map(|array| i.mad_wide(4, array));
            let (x, y) = (b.load::<F32>(x), b.load::<F32>(y));
            b.store(z, x + y);
        });
    })
}

/// y = softmax(x) of rows of n elements, one row a warp, 4 warps a CTA.
pub(crate) fn row_softmax() -> Kernel {
    Kernel::build("row_softmax", Launch::threads(128), |b| {
        let [x, y] = ["x", "y"].map(|name| b.param_pointer(name, Elem::F32));
        let n = b.param_u32("n");
        let (tid, cta, lane) = (b.tid(), b.cta_x(), b.lane_id());
        let first = cta.mad(4, tid >> 5) * n;
        let [x, y] = [x, y].map(|array| first.mad_wide(4, array));

        // Scores times log2(e), −inf beyond the row.
        let score = |block: V<B32>| {
            let column = lane + block;
            let inside = column.lt(n);
            let at = column.mad_wide(4, x);
            let score = b.var("score", f32::NEG_INFINITY);
            b.guarded(inside, || score.set(b.load::<F32>(at) * std::f32::consts::LOG2_E));
            (score.get(), column, inside)
        };
        let max = b.var("max", f32::NEG_INFINITY);
        b.for_each((0, n), 32, |block| {
            let (score, ..) = score(block);
            max.update(|max| max.max(score));
        });
        all_lanes(max, |x, y| x.max(y));
        let sum = b.var("sum", 0.0);
        b.for_each((0, n), 32, |block| {
            let (score, ..) = score(block);
            sum.set(sum + (score - max).ex2());
        });
        all_lanes(sum, |x, y| x + y);
        let scale = sum.now().rcp();
        b.for_each((0, n), 32, |block| {
            let (score, column, inside) = score(block);
            let p = (score - max).ex2() * scale;
            let at = column.mad_wide(4, y);
            b.guarded(inside, || b.store(at, p));
        });
    })
}

/// Combines a variable over the lanes of the warp.
fn all_lanes<'k>(var: Var<'k, F32>, combine: impl Fn(V<'k, F32>, V<'k, F32>) -> V<'k, F32>) {
    for mask in [16, 8, 4, 2, 1] {
        var.update(|x| combine(x, x.shfl_bfly(mask)));
    }
}
