//! One merge of partial results, as a builder.

use fa3_types::{CombineProblem, CombineSpec, Dtype, Partials, Shape, TensorDesc};
use ndarray::{Array3, Array4, ArrayView4, ArrayView5};
use rayon::prelude::*;

#[cfg(feature = "cuda")]
use crate::cuda;
use crate::{Device, Error, Scalar};

/// Partial results of attention of the same rows over disjoint sets of keys. A builder; [`Combine::run`] merges them.
///
/// ```text
/// LSE = ln Σ_s exp(LSE_s)        O = Σ_s exp(LSE_s - LSE) O_s        s over the parts
/// ```
///
/// O of the parts is (num_splits, batch, seqlen, heads, head_dim), f32, f16 or bf16, and their LSE is (num_splits,
/// batch, seqlen, heads): natural logarithms. Strides are free, so that [`Attention`](crate::Attention)'s LSE (batch,
/// heads, seqlen) is given as a view. A packed tensor has batch 1. Rows of parts and of O have a multiple of 16 bytes,
/// and up to 512 elements: nothing is padded.
///
/// A part whose LSE is -inf has seen no key, and its O counts for nothing, even NaN. Where all parts are empty, O is 0
/// and LSE is -inf. Sums are of f32, and divided last: |O_s| may be up to 2¹²⁸ / num_splits.
///
/// ```
/// use fa3::ndarray::{Array4, Axis, s, stack};
/// use fa3::{Attention, Combine, Device};
///
/// let x = Array4::from_shape_fn((1, 100, 2, 64), |(_, s, h, d)| ((s * 7 + h * 5 + d) % 11) as f32 / 5.0);
/// let [first, others] = [x.slice(s![.., ..30, .., ..]), x.slice(s![.., 30.., .., ..])];
/// let parts = [first, others].map(|keys| Attention::new(&x, keys, keys).forward(&Device::Cpu));
/// let [first, others] = parts;
/// let (first, others) = (first?, others?);
///
/// let o = stack(Axis(0), &[first.o.view(), others.o.view()])?;
/// let lse = stack(Axis(0), &[first.lse.view(), others.lse.view()])?;
/// let lse = lse.permuted_axes([0, 1, 3, 2]);
/// let combined = Combine::new(&o, &lse).run::<f32>(&Device::Cpu)?;
///
/// let whole = Attention::new(&x, &x, &x).forward(&Device::Cpu)?;
/// assert!(whole.o.iter().zip(&combined.o).all(|(x, y)| (x - y).abs() < 1e-5));
/// assert_eq!(combined.lse.dim(), (1, 100, 2));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "nothing is computed before `run`"]
pub struct Combine<'a, T> {
    out_partial: ArrayView5<'a, T>,
    lse_partial: ArrayView4<'a, f32>,
}

/// O (batch, seqlen, heads, head_dim) and LSE (batch, seqlen, heads) of all parts.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Combined<O> {
    /// The output.
    pub o: Array4<O>,
    /// The log-sum-exp. Its dimensions are those of the parts' LSE, not those of [`Output`](crate::Output).
    pub lse: Array3<f32>,
}

impl<'a, T: Scalar> Combine<'a, T> {
    /// A merge of arrays or views of them.
    pub fn new(
        out_partial: impl Into<ArrayView5<'a, T>>,
        lse_partial: impl Into<ArrayView4<'a, f32>>,
    ) -> Combine<'a, T> {
        Combine { out_partial: out_partial.into(), lse_partial: lse_partial.into() }
    }

    /// The problem, validated, of contiguous tensors and O of elements `O`: the strides of the views are not part of
    /// it.
    ///
    /// # Errors
    /// [`Error`] with the first thing that is wrong.
    pub fn problem<O: Scalar>(&self) -> Result<CombineProblem, Error> {
        let (splits, batch, seqlen, heads, head_dim) = self.out_partial.dim();
        let mut spec =
            CombineSpec::contiguous(T::DTYPE, O::DTYPE, splits, Shape { batch, seqlen, heads, head_dim });
        let (splits, batch, seqlen, heads) = self.lse_partial.dim();
        let of_lse = Shape { batch, seqlen, heads, head_dim: 1 };
        spec.lse_partial = Partials::contiguous(Dtype::F32, splits, of_lse);
        Ok(spec.validate()?)
    }

    /// Merges the parts. O is of elements `O`: f32, f16 or bf16. On a GPU, the parts are copied there and the results
    /// are copied back.
    ///
    /// # Errors
    /// [`Error`] with the first thing that is wrong.
    pub fn run<O: Scalar>(&self, device: &Device) -> Result<Combined<O>, Error> {
        let problem = self.problem::<O>()?;
        match device {
            Device::Cpu => Ok(self.on_cpu(&problem)),
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => Ok(cuda::combine(device, &problem, self.out_partial, self.lse_partial)?),
        }
    }

    fn on_cpu<O: Scalar>(&self, problem: &CombineProblem) -> Combined<O> {
        let Shape { seqlen, heads, head_dim, .. } = problem.shape();
        let rows = problem.lse().shape.dims().iter().product();
        let (mut o, mut lse) = (vec![O::default(); rows * head_dim], vec![0.0; rows]);
        let each = o.par_chunks_exact_mut(head_dim).zip(&mut lse).enumerate();
        each.for_each_init(
            || vec![0.0; head_dim],
            |sums, (row, (o, lse))| {
                let (token, head) = (row / heads, row % heads);
                *lse = self.row([token / seqlen, token % seqlen, head], sums);
                O::narrow(sums, o);
            },
        );
        Combined::new(problem, o, lse)
    }

    /// Merges a row to f32, and returns its LSE.
    fn row(&self, [batch, row, head]: [usize; 3], o: &mut [f32]) -> f32 {
        let lse = |split: usize| self.lse_partial[[split, batch, row, head]];
        let splits = 0..self.out_partial.dim().0;
        let max = splits.clone().map(lse).fold(f32::NEG_INFINITY, f32::max);
        // Without keys there is nothing to subtract.
        let reference = if max == f32::NEG_INFINITY { 0.0 } else { max };
        let mut sum = 0.0;
        o.fill(0.0);
        for split in splits {
            let weight = (lse(split) - reference).exp();
            if weight == 0.0 {
                continue;
            }
            sum += weight;
            for (column, o) in o.iter_mut().enumerate() {
                *o += weight * self.out_partial[[split, batch, row, head, column]].to_f32();
            }
        }
        if sum != 0.0 {
            o.iter_mut().for_each(|o| *o /= sum);
        }
        reference + sum.ln()
    }
}

impl<O: Scalar> Combined<O> {
    /// Results in the order of the problem's tensors.
    ///
    /// # Panics
    /// Unless there are as many as the problem has.
    pub(crate) fn new(problem: &CombineProblem, o: Vec<O>, lse: Vec<f32>) -> Combined<O> {
        let TensorDesc { shape, .. } = *problem.o();
        let o = Array4::from_shape_vec(shape.dims(), o).expect("one element each");
        let lse = Array3::from_shape_vec((shape.batch, shape.seqlen, shape.heads), lse);
        Combined { o, lse: lse.expect("one element each") }
    }
}

#[cfg(test)]
mod tests {
    use fa3_quant::E4m3;
    use fa3_types::{CombineProblemError, Dim, ProblemError, TensorName};
    use half::{bf16, f16};
    use ndarray::{Array5, Axis};

    use super::*;

    const NONE: f32 = f32::NEG_INFINITY;

    fn parts<T: Scalar>(splits: usize, head_dim: usize) -> (Array5<T>, Array4<f32>) {
        let mut x = 0.0_f32;
        let mut next = || {
            x += 0.7;
            3.0 * x.sin()
        };
        let o = Array5::from_shape_simple_fn((splits, 2, 3, 2, head_dim), || T::from_f32(next()));
        // Some parts are empty, and all of the first row.
        let lse = Array4::from_shape_fn((splits, 2, 3, 2), |(split, batch, row, head)| {
            let is_empty = (batch, row, head) == (0, 0, 0) || (split + row + head) % 3 == 0;
            if is_empty { NONE } else { next() }
        });
        (o, lse)
    }

    fn is_as_the_reference_s<T: Scalar + Copy, O: Scalar + Copy>(tolerance: f64) {
        for (splits, head_dim) in [(1, 8), (2, 64), (33, 128)] {
            let (mut o, lse) = parts::<T>(splits, head_dim);
            for ((split, batch, row, head, _), o) in o.indexed_iter_mut() {
                if lse[[split, batch, row, head]] == NONE {
                    *o = T::from_f32(f32::NAN);
                }
            }
            // In memory it is (num_splits, batch, heads, seqlen).
            let in_memory = lse.view().permuted_axes([0, 1, 3, 2]).as_standard_layout().into_owned();
            let given = in_memory.view().permuted_axes([0, 1, 3, 2]);
            let combined = Combine::new(&o, given).run::<O>(&Device::Cpu).unwrap();
            let expected = fa3_ref::combine::combine(o.mapv(|x| x.to_f32()).view(), lse.view());
            let close = |x: f32, y: f64| f64::from(x) == y || (f64::from(x) - y).abs() < tolerance;
            assert!(combined.o.iter().zip(&expected.o).all(|(x, &y)| close(x.to_f32(), y)));
            assert!(combined.lse.iter().zip(&expected.lse).all(|(&x, &y)| close(x, y)));
        }
    }

    #[test]
    fn results_are_those_of_the_reference() {
        is_as_the_reference_s::<f32, f32>(1e-5);
        is_as_the_reference_s::<f32, bf16>(2e-2);
        is_as_the_reference_s::<f16, f16>(2e-3);
        is_as_the_reference_s::<bf16, f32>(1e-5);
    }

    #[test]
    fn a_large_lse_is_no_infinity() {
        let o = Array5::from_shape_fn((2, 1, 1, 1, 4), |(split, ..)| split as f32);
        let lse = Array4::from_shape_vec((2, 1, 1, 1), vec![1e5, 1e5]).unwrap();
        let combined = Combine::new(&o, &lse).run::<f32>(&Device::Cpu).unwrap();
        assert_eq!((combined.o[[0; 4]], combined.lse[[0; 3]]), (0.5, 1e5 + 2_f32.ln()));
    }

    #[test]
    fn without_rows_there_is_nothing() {
        let (o, lse) = (Array5::<f32>::zeros((3, 2, 0, 2, 8)), Array4::zeros((3, 2, 0, 2)));
        let combined = Combine::new(&o, &lse).run::<f16>(&Device::Cpu).unwrap();
        assert_eq!((combined.o.dim(), combined.lse.dim()), ((2, 0, 2, 8), (2, 0, 2)));
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let (o, lse) = parts::<f32>(3, 8);
        let refused = |o: &Array5<f32>, lse: &Array4<f32>| {
            Combine::new(o, lse).run::<bf16>(&Device::Cpu).unwrap_err().to_string()
        };
        let no_parts = (Array5::zeros((0, 2, 3, 2, 8)), Array4::zeros((0, 2, 3, 2)));
        assert_eq!(refused(&no_parts.0, &no_parts.1), "out_partial has num_splits 0");
        assert_eq!(refused(&o, &parts::<f32>(2, 8).1), "lse_partial has num_splits 2, expected 3");
        let (narrow, _) = parts::<f32>(3, 12);
        let sentence = "o has head_dim 12, not a multiple of 8 as bf16 needs (16-byte rows)";
        assert_eq!(refused(&narrow, &lse), sentence);
        assert!(Combine::new(&narrow, &lse).run::<f32>(&Device::Cpu).is_ok());

        let error = Combine::new(&o, &lse).run::<E4m3>(&Device::Cpu).unwrap_err();
        assert_eq!(error, CombineProblemError::Dtype { tensor: TensorName::O, given: Dtype::E4m3 }.into());
        let (dim, tensor) = (Dim::Heads, TensorName::LsePartial);
        let mismatch = ProblemError::DimMismatch { tensor, dim, given: 1, expected: 2 };
        let error = Combine::new(&o, lse.slice_axis(Axis(3), (..1).into())).problem::<f32>().unwrap_err();
        assert_eq!(error, CombineProblemError::Tensor(mismatch).into());
    }
}
