//! The scales of whole heads or of the tensor, which are computed before codes are: a pass over the tensor finds the
//! largest magnitude of each tile, and then a CTA for each scale that of its tiles.

use fa3_types::{QuantizeProblem, Scaling};

/// Which tiles share a scale. Their maxima lie in memory by sequence, head and block of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaximaPlan {
    /// Scales, and CTAs that compute them, one each.
    pub scales: u32,
    /// Successive heads that share one, counted over all sequences.
    pub heads: u32,
    /// Successive maxima of one.
    pub maxima: u32,
}

impl MaximaPlan {
    /// Of a problem whose tiles of so many rows have been counted; `None` if its scales need no other pass.
    pub(super) fn of(problem: &QuantizeProblem, rows: u32) -> Option<MaximaPlan> {
        let shape = problem.x().shape;
        let blocks = (shape.seqlen as u32).div_ceil(rows);
        let heads = match problem.scaling() {
            Scaling::Heads { heads } => heads as u32,
            // Without rows there may be more heads than are ever counted.
            Scaling::Tensor if blocks == 0 => 0,
            Scaling::Tensor => (shape.batch * shape.heads) as u32,
            Scaling::Block { .. } | Scaling::Given(_) | Scaling::Channel => return None,
        };
        let scales = problem.scales_shape().map_or(0, |shape| shape.iter().product::<usize>() as u32);
        Some(MaximaPlan { scales, heads, maxima: heads * blocks })
    }
}
