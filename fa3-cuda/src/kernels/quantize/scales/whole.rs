//! Sums the parts of a head, and makes means and scales of them.

use fa3_ir::lang::*;
use fa3_sched::quantize::{ChannelPlan, GROUPS};

use super::params::WholeParams;
use super::span::{Groups, KINDS, NONE, Span};
use crate::kernels::params::{Declare, Form};
use crate::kernels::quantize::encode::scale_of;

/// Columns that a thread loads at once.
const COLUMNS: u32 = 4;

/// The kernel.
pub(super) fn kernel(head_dim: u32) -> Kernel {
    let threads = ChannelPlan::threads(head_dim, COLUMNS);
    Kernel::build("channel_scales", Launch::threads(threads), |b| {
        let params = WholeParams::<Form>::form().pass(&mut Declare(b));
        let groups = Groups::declare(b, head_dim, COLUMNS);
        b.launch_dependents();
        b.grid_dependency_wait();

        let head = b.cta_x();
        let sums = [(); COLUMNS as usize].map(|()| NONE.map(|number| b.var("span", number)));
        b.for_each((0, params.parts), GROUPS, |first| {
            let part = first + groups.group;
            let loaded = [(); COLUMNS as usize].map(|()| NONE.map(|number| b.var("part", number)));
            b.guarded(part.lt(params.parts), || {
                let of_head = head.mad_wide(params.parts, part.to_u64());
                let at =
                    params.spans + of_head * u64::from(4 * KINDS * head_dim) + (groups.col << 2).to_u64();
                for kind in 0..KINDS {
                    let numbers = b.load_vector::<F32, 4>(at.at((kind * 4 * head_dim) as i32));
                    let of_kind = loaded.iter().map(|span| span[kind as usize]);
                    of_kind.zip(numbers).for_each(|(to, number)| to.set(number));
                }
            });
            for (sum, part) in sums.iter().zip(loaded) {
                let next = Span::new(sum.map(Var::get)).and(Span::new(part.map(Var::get)));
                sum.iter().zip(next.all()).for_each(|(sum, next)| sum.set(next));
            }
        });
        groups.put_together(&sums.map(|sum| Span::new(sum.map(Var::get))), |col, span| {
            let (mean, amax) = mean_and_amax(span, params.rows);
            let scale = scale_of(amax);
            let at = head.mad(head_dim, col);
            for (pointer, x) in
                [(params.mean, mean), (params.scales, scale), (params.inverse, b.value(1.0) / scale)]
            {
                b.store(at.mad_wide(4, pointer), x);
            }
        });
    })
}

/// The mean of so many rows, and the largest magnitude of a number minus it. The mean is 0 where that would not be
/// finite.
#[track_caller]
fn mean_and_amax<'k>(span: Span<'k>, rows: V<'k, F32>) -> (V<'k, F32>, V<'k, F32>) {
    let around = |mean: V<'k, F32>| (span.max - mean).max(mean - span.min).max(0.0);
    let mean = span.sum / rows;
    let is_finite = mean.abs().lt(f32::INFINITY) & around(mean).lt(f32::INFINITY);
    let mean = is_finite.select::<F32>(mean, 0.0);
    (mean, around(mean))
}
