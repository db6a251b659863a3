//! y = softmax(x) of each row, with one row per warp.

use fa3_ir::lang::*;
use fa3_ir::{BufferRole, Passed, Program};

use super::launch;
use crate::kernels::Spec;

const WARPS: u32 = 4;

/// Builds the kernel.
pub fn kernel() -> Kernel {
    Kernel::build("row_softmax", Launch::threads(32 * WARPS), |b| {
        let [x, y] = ["x", "y"].map(|name| b.param_pointer(name, Elem::F32));
        let (rows, n) = (b.param_u32("rows"), b.param_u32("n"));

        let (cta, tid, lane) = (b.cta_x(), b.tid(), b.lane_id());
        let warp = (tid >> 5).shfl_idx(0);
        let row = cta.mad(WARPS, warp);
        b.if_uniform(row.lt(rows), || {
            let first = row * n;
            let [x, y] = [x, y].map(|array| first.mad_wide(4, array));
            let score = |block| Score::load(b, x, n, block + lane);

            let max = b.var("max", f32::NEG_INFINITY);
            b.for_each((0, n), 32, |block| max.update(|max| max.max(score(block).score)));
            over_warp(max, |x, y| x.max(y));

            let sum = b.var("sum", 0.0);
            b.for_each((0, n), 32, |block| {
                let p = (score(block).score - max).ex2();
                sum.update(|sum| sum + p);
            });
            over_warp(sum, |x, y| x + y);

            let scale = sum.now().rcp();
            b.for_each((0, n), 32, |block| {
                let Score { score, column, inside } = score(block);
                let p = (score - max).ex2() * scale;
                let to = column.mad_wide(4, y);
                b.guarded(inside, || b.store(to, p));
            });
        });
    })
}

/// A score in base 2: x · log₂e, or −inf beyond the row's end.
struct Score<'k> {
    score: V<'k, F32>,
    column: U32<'k>,
    inside: V<'k, Pred>,
}

impl<'k> Score<'k> {
    fn load(b: &'k Builder, x: U64<'k>, n: U32<'k>, column: U32<'k>) -> Score<'k> {
        let inside = column.lt(n);
        let from = column.mad_wide(4, x);
        let score = b.var("score", f32::NEG_INFINITY);
        b.guarded(inside, || score.set(b.load::<F32>(from) * std::f32::consts::LOG2_E));
        Score { score: score.get(), column, inside }
    }
}

/// Reduces a variable over the lanes of the warp, by `combine`.
fn over_warp<'k>(var: Var<'k, F32>, combine: impl Fn(V<'k, F32>, V<'k, F32>) -> V<'k, F32>) {
    for mask in [16, 8, 4, 2, 1] {
        let other = var.now().shfl_bfly(mask);
        var.update(|x| combine(x, other));
    }
}

/// The program for `rows` rows of `n` elements.
pub fn program(rows: u32, n: u32) -> Program<Spec> {
    let mut program = Program::new();
    let x = program.buffer("x", Elem::F32, &[rows, n], BufferRole::Input);
    let y = program.buffer("y", Elem::F32, &[rows, n], BufferRole::Output);
    let args = [
        ("x", Passed::Pointer(x)),
        ("y", Passed::Pointer(y)),
        ("rows", Passed::U32(rows)),
        ("n", Passed::U32(n)),
    ];
    launch(program, super::Spec::RowSoftmax, [rows.div_ceil(WARPS), 1, 1], args)
}
