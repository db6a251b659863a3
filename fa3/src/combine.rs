//! A reduction of partial results, as a builder.

use fa3_types::{CombineProblem, CombineSpec, Dtype, Partials, Shape, TensorDesc, TensorName};
use ndarray::{Array3, Array4, ArrayView, ArrayView3, ArrayView4, ArrayView5, Axis, Dimension, RemoveAxis};
use rayon::prelude::*;

use crate::attention::check_input;
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::{Device, Error, Output, Scalar};

/// Partial results of attention of the same rows over disjoint sets of keys. It is a builder: [`Combine::run`] reduces
/// the parts.
///
/// ```text
/// LSE = ln Σ_s exp(LSE_s)        O = Σ_s exp(LSE_s - LSE) O_s        s over the parts
/// ```
///
/// [`Combine::of`] takes the [`Output`]s of calls. [`Combine::new`] takes O of all parts in one array and their LSE in
/// another. The CPU copies nothing. A packed tensor has batch 1. Rows of parts and of O have a multiple of 16 bytes,
/// and up to 512 elements, since nothing is padded.
///
/// A part whose LSE is -inf has seen no key, and its O counts for nothing, even NaN. If all parts are empty, O is 0 and
/// LSE is -inf. Sums are f32 and are divided at the end, so |O_s| may be up to 2¹²⁸ / num_splits.
///
/// ```
/// use fa3::ndarray::{Array4, s};
/// use fa3::{Attention, Combine, Device};
///
/// let x = Array4::from_shape_fn((1, 100, 2, 64), |(_, s, h, d)| ((s * 7 + h * 5 + d) % 11) as f32 / 5.0);
/// let [first, others] = [x.slice(s![.., ..30, .., ..]), x.slice(s![.., 30.., .., ..])];
/// let parts = [first, others].map(|keys| Attention::new(&x, keys, keys).forward(&Device::Cpu));
/// let [first, others] = parts;
/// let combined = Combine::of(&[first?, others?]).run::<f32>(&Device::Cpu)?.into_output();
///
/// let whole = Attention::new(&x, &x, &x).forward(&Device::Cpu)?;
/// assert!(whole.o.iter().zip(&combined.o).all(|(x, y)| (x - y).abs() < 1e-5));
/// assert!(whole.lse.iter().zip(&combined.lse).all(|(x, y)| (x - y).abs() < 1e-5));
/// # Ok::<(), fa3::Error>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "nothing is computed before `run`"]
pub struct Combine<'a, T> {
    /// O (batch, seqlen, heads, head_dim) of each part.
    out_partial: Vec<ArrayView4<'a, T>>,
    /// LSE (batch, seqlen, heads) of each part.
    lse_partial: Vec<ArrayView3<'a, f32>>,
}

/// O (batch, seqlen, heads, head_dim) and LSE (batch, seqlen, heads) over all parts.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Combined<O> {
    /// The output.
    pub o: Array4<O>,
    /// The log-sum-exp. It has the dimensions of the parts' LSE, unlike [`Output`](crate::Output).
    pub lse: Array3<f32>,
}

impl<'a, T: Scalar> Combine<'a, T> {
    /// A reduction of arrays or views, of any strides: O of the parts (num_splits, batch, seqlen, heads, head_dim),
    /// f32, f16 or bf16, and their LSE (num_splits, batch, seqlen, heads), natural logarithms.
    ///
    /// The order of LSE differs from [`Output`]'s, which is (batch, heads, seqlen). If there are as many heads as rows,
    /// a wrong order cannot be detected; [`Combine::of`] avoids this.
    pub fn new(
        out_partial: impl Into<ArrayView5<'a, T>>,
        lse_partial: impl Into<ArrayView4<'a, f32>>,
    ) -> Combine<'a, T> {
        Combine { out_partial: parts(&out_partial.into()), lse_partial: parts(&lse_partial.into()) }
    }

    /// A reduction of the outputs of calls with the same Q and disjoint sets of keys.
    pub fn of(outputs: impl IntoIterator<Item = &'a Output<T>>) -> Combine<'a, T> {
        let views = |output: &'a Output<T>| (output.o.view(), output.lse.view().permuted_axes([0, 2, 1]));
        let (out_partial, lse_partial) = outputs.into_iter().map(views).unzip();
        Combine { out_partial, lse_partial }
    }

    /// The validated problem, of contiguous tensors and O of type `O`: the strides of the views are not part of it.
    ///
    /// # Errors
    /// [`Error`] with the first violation.
    pub fn problem<O: Scalar>(&self) -> Result<CombineProblem, Error> {
        let [batch, seqlen, heads, head_dim] = shape_of(TensorName::OutPartial, &self.out_partial)?;
        let of_lse: [usize; 3] = shape_of(TensorName::LsePartial, &self.lse_partial)?;
        if of_lse == [batch, heads, seqlen] && heads != seqlen {
            return Err(Error::LseOrder { given: of_lse, expected: [batch, seqlen, heads] });
        }
        let shape = Shape { batch, seqlen, heads, head_dim };
        let mut spec = CombineSpec::contiguous(T::DTYPE, O::DTYPE, self.out_partial.len(), shape);
        let [batch, seqlen, heads] = of_lse;
        let of_lse = Shape { batch, seqlen, heads, head_dim: 1 };
        spec.lse_partial = Partials::contiguous(Dtype::F32, self.lse_partial.len(), of_lse);
        Ok(spec.validate()?)
    }

    /// Reduces the parts. O has type `O`: f32, f16 or bf16. On a GPU, the parts are copied to it and the results are
    /// copied back.
    ///
    /// # Errors
    /// [`Error`] with the first violation.
    pub fn run<O: Scalar>(&self, device: &Device) -> Result<Combined<O>, Error> {
        let problem = self.problem::<O>()?;
        match device {
            Device::Cpu => Ok(self.on_cpu(&problem)),
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => {
                Ok(cuda::combine(device, &problem, &self.out_partial, &self.lse_partial)?)
            }
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

    /// Reduces a row to f32, and returns its LSE.
    fn row(&self, [batch, row, head]: [usize; 3], o: &mut [f32]) -> f32 {
        let lse = |split: usize| self.lse_partial[split][[batch, row, head]];
        let splits = 0..self.out_partial.len();
        let max = splits.clone().map(lse).fold(f32::NEG_INFINITY, f32::max);
        // Without keys, 0 stands in for the maximum.
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
                *o += weight * self.out_partial[split][[batch, row, head, column]].to_f32();
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
    /// If the numbers of elements differ from the problem's.
    pub(crate) fn new(problem: &CombineProblem, o: Vec<O>, lse: Vec<f32>) -> Combined<O> {
        let TensorDesc { shape, .. } = *problem.o();
        let o = Array4::from_shape_vec(shape.dims(), o).expect("one element each");
        let lse = Array3::from_shape_vec((shape.batch, shape.seqlen, shape.heads), lse);
        Combined { o, lse: lse.expect("one element each") }
    }

    /// Converts to an [`Output`], whose LSE is (batch, heads, seqlen), for another reduction or for a backward pass.
    pub fn into_output(self) -> Output<O> {
        Output::new(self.o, self.lse.permuted_axes([0, 2, 1]))
    }
}

/// Each part of an array that holds all parts.
fn parts<'a, T, D: RemoveAxis>(stack: &ArrayView<'a, T, D>) -> Vec<ArrayView<'a, T, D::Smaller>> {
    (0..stack.len_of(Axis(0))).map(|part| stack.clone().index_axis_move(Axis(0), part)).collect()
}

/// The common shape of all parts; zeros if there are no parts.
fn shape_of<T, D: Dimension, const N: usize>(
    tensor: TensorName,
    parts: &[ArrayView<'_, T, D>],
) -> Result<[usize; N], Error> {
    let mut shape = [0; N];
    let Some((first, others)) = parts.split_first() else { return Ok(shape) };
    others.iter().try_for_each(|part| check_input(tensor, part.shape(), first.shape()))?;
    shape.copy_from_slice(first.shape());
    Ok(shape)
}
