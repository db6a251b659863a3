//! y = softmax(x) of each row, one row a warp.

use fa3_ir::{Arg, B32, B64, Builder, Elem, F32, Kernel, Launch, Pred, V, Var};

use crate::kernels::{Array, Job, JobArg};

const WARPS: u32 = 4;

/// The kernel.
pub fn kernel() -> Kernel {
    let mut b = Builder::new("row_softmax", Launch::threads(32 * WARPS));
    let [x, y] = ["x", "y"].map(|name| b.param_pointer(name, Elem::F32));
    let (rows, n) = (b.param_u32("rows"), b.param_u32("n"));

    let (cta, tid, lane) = (b.cta_x(), b.tid(), b.lane_id());
    let warp = b.shr_u32(tid, 5);
    let warp = b.shfl_idx(warp, 0);
    let row = b.mad_u32(cta, WARPS, warp);
    let inside = b.lt_u32(row, rows);
    b.if_uniform(inside, |b| {
        let first = b.mul(row, n);
        let [x, y] = [x, y].map(|array| b.mad_wide_u32(first, 4, array));

        let max = b.var("max", f32::NEG_INFINITY);
        b.for_each((0, n), 32, |b, block| {
            let Score { score, .. } = load(b, x, n, lane, block);
            update(b, max, score, Builder::max_f32);
        });
        over_warp(b, max, Builder::max_f32);

        let sum = b.var("sum", 0.0);
        b.for_each((0, n), 32, |b, block| {
            let Score { score, .. } = load(b, x, n, lane, block);
            let p = power(b, score, max);
            update(b, sum, p, Builder::add_f32);
        });
        over_warp(b, sum, Builder::add_f32);

        let scale = b.rcp(sum);
        b.for_each((0, n), 32, |b, block| {
            let Score { score, column, inside } = load(b, x, n, lane, block);
            let p = power(b, score, max);
            let p = b.mul(p, scale);
            let to = b.mad_wide_u32(column, 4, y);
            b.guarded(inside, |b| b.store(to, p));
        });
    });
    b.finish()
}

/// A score in the log2 domain: x · log₂e, −inf beyond the row.
struct Score {
    score: V<F32>,
    column: V<B32>,
    inside: V<Pred>,
}

fn load(b: &mut Builder, x: V<B64>, n: V<B32>, lane: V<B32>, block: V<B32>) -> Score {
    let column = b.add(block, lane);
    let inside = b.lt_u32(column, n);
    let from = b.mad_wide_u32(column, 4, x);
    let score = b.var("score", f32::NEG_INFINITY);
    b.guarded(inside, |b| {
        let x = b.load::<F32>(from);
        let scaled = b.mul(x, std::f32::consts::LOG2_E);
        b.set(score, scaled);
    });
    Score { score: b.get(score), column, inside }
}

/// 2^(score − max).
fn power(b: &mut Builder, score: V<F32>, max: Var<F32>) -> V<F32> {
    let shifted = b.sub(score, max);
    b.ex2(shifted)
}

fn update<A: Arg<Ty = F32>>(
    b: &mut Builder,
    var: Var<F32>,
    x: A,
    combine: fn(&mut Builder, Var<F32>, A) -> V<F32>,
) {
    let both = combine(b, var, x);
    b.set(var, both);
}

/// Combines a variable over the lanes of the warp.
fn over_warp(b: &mut Builder, var: Var<F32>, combine: fn(&mut Builder, Var<F32>, V<F32>) -> V<F32>) {
    for mask in [16, 8, 4, 2, 1] {
        let other = b.shfl_bfly(var, mask);
        update(b, var, other, combine);
    }
}

/// `rows` rows of `n` elements.
pub fn job(rows: u32, n: u32) -> Job {
    let arrays = vec![Array::input("x", Elem::F32, &[rows, n]), Array::output("y", Elem::F32, &[rows, n])];
    let args = vec![JobArg::Pointer(0), JobArg::Pointer(1), JobArg::U32(rows), JobArg::U32(n)];
    Job { kernel: kernel(), grid: [rows.div_ceil(WARPS), 1, 1], arrays, args }
}
