//! The shipped kernels that reduce partial results. In the kernel `combine/f32-bf16/d128/8x8`, for example, partial
//! results are f32, O is bf16, and teams have 8 warps, each of which loads 8 partial results at once.

use fa3_sched::combine::{Plan, Team};
use fa3_types::{CombineSpec, Dtype, Shape};

use super::Shipped;
use crate::kernels::combine::Spec;

/// Kernels with teams of every size, every number of chunks per lane, and every type of partial results and of O.
pub(super) fn combine() -> impl Iterator<Item = Shipped> {
    use Dtype::{Bf16, F16, F32};
    let rows = [
        (F32, Bf16, 128, 2),
        (F32, Bf16, 128, 4),
        (F32, Bf16, 128, 8),
        (F32, Bf16, 128, 16),
        (F32, Bf16, 128, 32),
        (F32, Bf16, 128, 132),
        (F32, F16, 64, 132),
        (F32, F32, 256, 4),
        (F32, Bf16, 512, 132),
        (Bf16, Bf16, 128, 2),
        (F16, F16, 256, 132),
    ];
    let specs = rows.into_iter().map(|(input, output, head_dim, splits)| {
        let shape = Shape { batch: 1, seqlen: 1, heads: 1, head_dim };
        let problem = CombineSpec::contiguous(input, output, splits, shape).validate();
        let plan = Plan::new(&problem.expect("its rows have whole chunks")).expect("there is one row");
        Spec::of(&plan)
    });
    specs.map(|spec| Shipped::new(name(&spec), spec))
}

fn name(Spec { input, output, head_dim, team }: &Spec) -> String {
    let Team { warps, at_once, .. } = team;
    format!("combine/{input}-{output}/d{head_dim}/{warps}x{at_once}")
}
