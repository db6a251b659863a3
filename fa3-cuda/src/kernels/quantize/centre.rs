//! Numbers without their channels' means, in units of their channels' scales.

use fa3_ir::lang::*;
use fa3_sched::quantize::CHUNK;

use super::{Place, Quantize};

impl<'k> Quantize<'k> {
    /// Subtracts from a thread's part of a row the means of its columns, and multiplies by the inverses of their
    /// scales. What is not finite becomes NaN.
    #[track_caller]
    pub(super) fn centre(&self, x: &mut [V<'k, F32>], place: &Place<'k>, [mean, inverse]: [V<'k, B64>; 2]) {
        let (b, (lane, lanes), head_dim) = (self.builder, self.lane, self.spec.tile.head_dim);
        let head = place.batch.mad(self.params.heads, place.head);
        let first = head.mad(head_dim, lane * CHUNK);
        let [mean, inverse] = [mean, inverse].map(|pointer| first.mad_wide(4, pointer));
        for (chunk, x) in (0..).zip(x.chunks_exact_mut(CHUNK as usize)) {
            for (quad, x) in (0..).zip(x.chunks_exact_mut(4)) {
                let at = (4 * CHUNK * lanes * chunk + 16 * quad) as i32;
                let mean: [_; 4] = b.load_vector(mean.at(at));
                let inverse: [_; 4] = b.load_vector(inverse.at(at));
                for (x, (mean, inverse)) in x.iter_mut().zip(mean.into_iter().zip(inverse)) {
                    // Times 0 an infinity is NaN.
                    *x = (x.fma(0.0, *x) - mean) * inverse;
                }
            }
        }
    }
}
