//! Scales of heads or of the tensor, computed before the codes: a pass over the tensor finds the largest magnitude of
//! each tile, then a CTA per scale finds the largest of its tiles.

use fa3_types::{QuantizeProblem, Scaling};

use crate::{TileCounts, TooManyTiles};

/// The tiles that share a scale. Their maxima lie in memory by sequence, head and block of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaximaPlan {
    /// Number of scales, and of the CTAs that compute them.
    pub scales: u32,
    /// Successive heads that share a scale, counted over all sequences.
    pub heads: u32,
    /// Number of successive maxima that determine one scale.
    pub maxima: u32,
}

impl MaximaPlan {
    /// The plan of a problem in tiles of `rows` rows, where `heads` heads share a scale.
    pub(super) fn new(
        problem: &QuantizeProblem,
        heads: usize,
        rows: u32,
    ) -> Result<MaximaPlan, TooManyTiles> {
        let blocks = (problem.x().shape.seqlen as u32).div_ceil(rows);
        let scales = problem.scales_shape().map_or(0, |shape| shape.iter().product());
        // Heads without rows have scales as well.
        let counts = TileCounts { m_blocks: 1, heads: scales.try_into().unwrap_or(u32::MAX), batch: 1 };
        // A tensor without rows may have more heads than can be counted.
        let is_empty = blocks == 0 && problem.scaling() == Scaling::Tensor;
        let (scales, heads) = (counts.num_tiles()?, if is_empty { 0 } else { heads as u32 });
        // If there is a scale, there is a sequence whose tiles have been numbered. Without scales, the number of heads
        // is not bounded.
        let maxima = if scales == 0 { 0 } else { heads * blocks };
        Ok(MaximaPlan { scales, heads, maxima })
    }
}
