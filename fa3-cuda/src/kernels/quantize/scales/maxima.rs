//! Reduces the largest magnitudes of tiles to the scales of heads, or to the scale of the tensor.

use fa3_ir::lang::*;

use crate::kernels::params::{Declare, Form, Pass, Side, param, params};
use crate::kernels::quantize::block_max::BlockMax;
use crate::kernels::quantize::encode::scale_of;

const THREADS: u32 = 1024;

params! {
    struct MaximaParams {
        maxima: pointer,
        scales: pointer,
        inverse: pointer,
        /// Number of maxima that share a scale.
        count: u32,
        /// Number of heads that share a scale.
        heads: u32,
    }
}

/// Builds the kernel, with a CTA for each scale.
pub(super) fn kernel() -> Kernel {
    Kernel::build("head_scales", Launch::threads(THREADS), |b| {
        let [maxima, scales, inverse] = [Elem::F32; 3];
        let form = MaximaParams::<Form> { maxima, scales, inverse, count: (), heads: () };
        let params = form.pass(&mut Declare(b));
        let maxima = BlockMax::declare(b, THREADS / 32);
        b.launch_dependents();
        b.grid_dependency_wait();

        let (scale, thread) = (b.cta_x(), b.tid());
        let largest = b.var("largest", 0.0);
        b.for_each((0, params.count), THREADS, |first| {
            let (at, tile) = (first + thread, b.var("tile", 0.0));
            b.guarded(at.lt(params.count), || {
                let at = scale.mad_wide(params.count, at.to_u64());
                tile.set(b.load::<F32>(params.maxima + (at << 2)));
            });
            largest.set(largest.now().max(tile));
        });
        let computed = scale_of(maxima.of(largest.get()));
        b.guarded(thread.eq(0), || b.store(scale.mad_wide(4, params.scales), computed));
        let inverse = b.value(1.0) / computed;
        b.for_each((0, params.heads), THREADS, |first| {
            let head = first + thread;
            let at = scale.mad(params.heads, head).mad_wide(4, params.inverse);
            b.guarded(head.lt(params.heads), || b.store(at, inverse));
        });
    })
}
