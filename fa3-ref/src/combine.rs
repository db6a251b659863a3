//! Reduction of partial results of attention, in f64.
//!
//! ```text
//! LSE = ln Σ_s exp(LSE_s)        O = Σ_s exp(LSE_s - LSE) O_s        s over the parts
//! ```

use ndarray::{Array3, Array4, ArrayView4, ArrayView5};

/// O (batch, seqlen, heads, head_dim) and LSE (batch, seqlen, heads) over all parts.
#[derive(Clone, Debug, PartialEq)]
pub struct Combined {
    /// The output: 0 where no part has seen a key.
    pub o: Array4<f64>,
    /// Σ_s exp(LSE_s - LSE) |O_s|, the scale of errors of O.
    pub magnitude: Array4<f64>,
    /// The log-sum-exp: -inf where no part has seen a key.
    pub lse: Array3<f64>,
}

/// Reduces O (num_splits, batch, seqlen, heads, head_dim) and LSE (num_splits, batch, seqlen, heads) of parts. A part
/// whose LSE is -inf counts for nothing.
///
/// # Panics
/// If O and LSE have different shapes.
pub fn combine(out_partial: ArrayView5<'_, f32>, lse_partial: ArrayView4<'_, f32>) -> Combined {
    let (splits, batch, seqlen, heads, head_dim) = out_partial.dim();
    assert_eq!(lse_partial.dim(), (splits, batch, seqlen, heads), "an LSE for each row of O");
    let (mut o, mut lse) =
        (Array4::zeros((batch, seqlen, heads, head_dim)), Array3::zeros((batch, seqlen, heads)));
    let mut magnitude = o.clone();
    for ((batch, row, head), lse) in lse.indexed_iter_mut() {
        let parts: Vec<f64> =
            (0..splits).map(|split| lse_partial[[split, batch, row, head]].into()).collect();
        let max = parts.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        // Without keys the reference is 0.
        let reference = if max == f64::NEG_INFINITY { 0.0 } else { max };
        let weights: Vec<f64> = parts.iter().map(|lse| (lse - reference).exp()).collect();
        let sum: f64 = weights.iter().sum();
        *lse = reference + sum.ln();
        for (split, weight) in
            weights.iter().enumerate().filter(|&(split, _)| parts[split] != f64::NEG_INFINITY)
        {
            for column in 0..head_dim {
                // The weights use the maximum, not exp(LSE_s - LSE): a large LSE would lose the logarithm of the sum.
                let x = weight / sum * f64::from(out_partial[[split, batch, row, head, column]]);
                o[[batch, row, head, column]] += x;
                magnitude[[batch, row, head, column]] += x.abs();
            }
        }
    }
    Combined { o, magnitude, lse }
}

#[cfg(test)]
mod tests {
    use fa3_types::{Dtype, ProblemSpec, Shape};
    use ndarray::{Array5, Axis, Slice};

    use super::*;
    use crate::{Inputs, oracle};

    #[test]
    fn parts_of_the_keys_make_the_whole() {
        let q = Shape { batch: 2, seqlen: 3, heads: 2, head_dim: 8 };
        let number = |(b, s, h, d): (usize, usize, usize, usize)| ((b * 5 + s * 7 + h * 3 + d) as f32).sin();
        let x = Array4::from_shape_fn((2, 10, 2, 8), number);
        let of_keys = |first: usize, end: usize| {
            let kv = Shape { seqlen: end - first, ..q };
            let problem = ProblemSpec::dense(Dtype::F32, q, kv).known().unwrap();
            let keys = x.slice_axis(Axis(1), Slice::from(first..end));
            let queries = x.slice_axis(Axis(1), Slice::from(..3));
            oracle::forward(&Inputs::new(&problem, queries, keys, keys).unwrap())
        };
        let parts = [of_keys(0, 4), of_keys(4, 5), of_keys(5, 10)];
        let out_partial =
            Array5::from_shape_fn((3, 2, 3, 2, 8), |(s, b, i, h, d)| parts[s].o[[b, i, h, d]] as f32);
        let lse_partial = Array4::from_shape_fn((3, 2, 3, 2), |(s, b, i, h)| parts[s].lse[[b, h, i]] as f32);
        let (whole, merged) = (of_keys(0, 10), combine(out_partial.view(), lse_partial.view()));
        assert!(whole.o.iter().zip(&merged.o).all(|(x, y)| (x - y).abs() < 1e-6));
        let lse = whole.lse.view().permuted_axes([0, 2, 1]);
        assert!(lse.iter().zip(&merged.lse).all(|(x, y)| (x - y).abs() < 1e-6));
    }

    #[test]
    fn parts_without_keys_count_for_nothing() {
        let none = f32::NEG_INFINITY;
        let o = Array5::from_shape_vec((2, 1, 1, 2, 1), vec![3.0, f32::NAN, f32::NAN, f32::NAN]).unwrap();
        let lse = Array4::from_shape_vec((2, 1, 1, 2), vec![1e30, none, none, none]).unwrap();
        let merged = combine(o.view(), lse.view());
        assert_eq!(merged.o.as_slice(), Some(&[3.0, 0.0][..]));
        assert_eq!(merged.lse.as_slice(), Some(&[f64::from(1e30_f32), f64::NEG_INFINITY][..]));
    }
}
