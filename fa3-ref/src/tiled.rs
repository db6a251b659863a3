//! The paper's algorithms in plain scalar form: the computation of each CTA in its order, without the asynchrony.
//!
//! FlashAttention-3 (arXiv 2407.08608): Algorithm 1 (§3.1), Algorithm 2 (§3.2), Algorithm 3 (backward, Appendix B.1)
//! and Algorithm 4 (three stages, Appendix B.3). `A2:13` at the end of a line is line 13 of Algorithm 2. Lines about
//! barriers, buffers and registers have no counterpart here: a value is ready when it is computed.
//!
//! Rounding points are the kernels': Q, K, V and P (and dS) are 16-bit operands of matrix products that sum in f32;
//! scores, row maxima, row sums and rescaling are f32, in the base-2 domain; O and the gradients are rounded at the
//! end.
//!
//! Errata of the printed text:
//! * A1:21 prints `diag(exp(m_old − m))⁻¹ O`: the factor is exp(m_old − m), no inverse.
//! * A2:7 prints `1 ≤ j < T_c − 1` and A4:7 `2 ≤ j < T_c − 2`: both loops must reach T_c − 1, or the last key blocks
//!   are skipped.
//! * A2:16 copies S_next to S_cur; the next step needs P_next, as A2:13 names it.
//! * A4:13 computes P for the S of the previous step; A4:16 copies that P, which A4:12 of the same step must not see.

mod algorithm1;
mod algorithm2;
mod algorithm3;
mod algorithm4;
mod softmax;
mod tile;

pub use algorithm3::backward;

use ndarray::{Array1, Array2, Axis};
use rayon::prelude::*;

use crate::inputs::Heads;
use crate::output::{HeadForward, forward_heads};
use crate::{Element, Forward, InputError, Inputs, Precision};
use tile::QueryTile;

/// The form of the consumer warpgroup's loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// Algorithm 1: each block's scores, softmax and output in turn.
    Basic,
    /// Algorithm 2: a block's scores are computed beside the output of the previous block.
    TwoStage,
    /// Algorithm 4: scores of block j, softmax of block j − 1 and output of block j − 2 at a time.
    ThreeStage,
}

impl Algorithm {
    /// All algorithms.
    pub const ALL: [Algorithm; 3] = [Algorithm::Basic, Algorithm::TwoStage, Algorithm::ThreeStage];
}

/// Tile sizes: B_r query rows by B_c keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tiles {
    rows: usize,
    keys: usize,
}

impl Tiles {
    /// Tiles of `rows` (B_r) by `keys` (B_c).
    ///
    /// # Errors
    /// [`InputError::EmptyTiles`] if either is 0.
    pub fn new(rows: usize, keys: usize) -> Result<Tiles, InputError> {
        if rows == 0 || keys == 0 {
            return Err(InputError::EmptyTiles { rows, keys });
        }
        Ok(Tiles { rows, keys })
    }

    /// B_r, the number of query rows.
    pub fn rows(self) -> usize {
        self.rows
    }

    /// B_c, the number of keys.
    pub fn keys(self) -> usize {
        self.keys
    }
}

/// The forward pass: O is rounded to `precision`, as is P for the second matrix product; LSE is f32.
pub fn forward<T: Element>(
    inputs: &Inputs<'_, T>,
    algorithm: Algorithm,
    tiles: Tiles,
    precision: Precision,
) -> Forward<f32> {
    of_heads(inputs, algorithm, tiles, precision)
}

fn of_heads(inputs: &dyn Heads, algorithm: Algorithm, tiles: Tiles, precision: Precision) -> Forward<f32> {
    let problem = inputs.problem();
    let consumer = match algorithm {
        Algorithm::Basic => algorithm1::consumer,
        Algorithm::TwoStage => algorithm2::consumer,
        Algorithm::ThreeStage => algorithm4::consumer,
    };
    forward_heads(problem, |index, head_q| {
        let head = inputs.head(index, head_q).to_f32();
        let len = problem.lengths(index);
        let mut o = Array2::zeros((len.q, problem.head_dim_v()));
        let mut lse = Array1::zeros(len.q);
        let o_tiles = o.axis_chunks_iter_mut(Axis(0), tiles.rows);
        let lse_tiles = lse.axis_chunks_iter_mut(Axis(0), tiles.rows);
        let jobs: Vec<_> = o_tiles.zip(lse_tiles).enumerate().collect();
        jobs.into_par_iter().for_each(|(i, (mut o, mut lse))| {
            let tile = QueryTile::new(problem, &head, len, i, tiles, precision);
            let result = consumer(&tile);
            o.assign(&result.o.mapv(|x| precision.round(x)));
            lse.assign(&result.lse);
        });
        HeadForward { o, lse }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_tiles_are_rejected() {
        assert_eq!(Tiles::new(0, 4), Err(InputError::EmptyTiles { rows: 0, keys: 4 }));
        assert_eq!(Tiles::new(4, 0), Err(InputError::EmptyTiles { rows: 4, keys: 0 }));
    }
}
