//! One attention call, as a builder.

use fa3_types::{Mask, Problem, ProblemError, ProblemSpec, Sequences, Shape, Strides, TensorDesc};
use ndarray::{Array3, Array4, ArrayView4};

#[cfg(feature = "cuda")]
use crate::cuda;
use crate::{Device, Error, Scalar, cpu};

/// An attention call: Q, K and V, and the options that are not default. A builder; [`Attention::forward`] computes it.
///
/// Q is (batch, seqlen_q, heads_q, head_dim), K (batch, seqlen_k, heads_kv, head_dim), V (batch, seqlen_k, heads_kv,
/// head_dim_v). heads_q is a multiple of heads_kv, and query head h reads key/value head h / (heads_q / heads_kv). With
/// [`Attention::packed`], batch is 1 and the sequences lie one after the other.
///
/// The elements of a row must be contiguous, and rows must lie at multiples of 16 bytes. Other strides are free, so a
/// transposed view works without a copy.
///
/// NaN in Q or K reaches O and LSE of the rows that see it, and no others. NaN or an infinity in V may also reach rows
/// that do not see its key: blocks of V are multiplied as a whole, by 0 where a key is hidden, so every row of a tile
/// of queries that visits the block may become NaN. Nothing beyond a sequence's end reaches any result.
#[derive(Clone, Debug)]
#[must_use = "nothing is computed before `forward`"]
pub struct Attention<'a, T> {
    q: ArrayView4<'a, T>,
    k: ArrayView4<'a, T>,
    v: ArrayView4<'a, T>,
    cu_seqlens: Option<(&'a [i32], &'a [i32])>,
    seqused_q: Option<&'a [i32]>,
    seqused_k: Option<&'a [i32]>,
    mask: Mask,
    softmax_scale: Option<f64>,
    softcap: Option<f64>,
}

/// The result of attention.
#[derive(Clone, Debug, PartialEq)]
pub struct Output<T> {
    /// O (batch, seqlen_q, heads_q, head_dim_v). 0 in rows that see no key or belong to no sequence.
    pub o: Array4<T>,
    /// Natural log-sum-exp of the scores (batch, heads_q, seqlen_q). -inf in such rows.
    pub lse: Array3<f32>,
}

impl<'a, T: Scalar> Attention<'a, T> {
    /// Attention over all keys, scaled by 1/√head_dim.
    pub fn new(q: ArrayView4<'a, T>, k: ArrayView4<'a, T>, v: ArrayView4<'a, T>) -> Attention<'a, T> {
        Attention {
            q,
            k,
            v,
            cu_seqlens: None,
            seqused_q: None,
            seqused_k: None,
            mask: Mask::None,
            softmax_scale: None,
            softcap: None,
        }
    }

    /// Sets the mask.
    pub fn mask(mut self, mask: Mask) -> Attention<'a, T> {
        self.mask = mask;
        self
    }

    /// Lets each query see the keys up to its own position, the last query standing at the last key.
    pub fn causal(self) -> Attention<'a, T> {
        self.mask(Mask::Causal)
    }

    /// Lets each query see `left` keys before its own position and `right` after it; `None` is unbounded.
    pub fn window(self, left: Option<u32>, right: Option<u32>) -> Attention<'a, T> {
        self.mask(Mask::window(left, right))
    }

    /// Sets the factor on Q·Kᵀ.
    pub fn softmax_scale(mut self, scale: f64) -> Attention<'a, T> {
        self.softmax_scale = Some(scale);
        self
    }

    /// Bounds scaled scores s to ±cap by cap · tanh(s / cap).
    pub fn softcap(mut self, cap: f64) -> Attention<'a, T> {
        self.softcap = Some(cap);
        self
    }

    /// Takes the tensors as packed: sequence i is rows `cu_seqlens[i] .. cu_seqlens[i + 1]`.
    pub fn packed(mut self, cu_seqlens_q: &'a [i32], cu_seqlens_k: &'a [i32]) -> Attention<'a, T> {
        self.cu_seqlens = Some((cu_seqlens_q, cu_seqlens_k));
        self
    }

    /// Uses only the first `seqused[i]` query rows of sequence i.
    pub fn seqused_q(mut self, seqused: &'a [i32]) -> Attention<'a, T> {
        self.seqused_q = Some(seqused);
        self
    }

    /// Uses only the first `seqused[i]` keys of sequence i.
    pub fn seqused_k(mut self, seqused: &'a [i32]) -> Attention<'a, T> {
        self.seqused_k = Some(seqused);
        self
    }

    /// The problem, validated, with O contiguous.
    ///
    /// # Errors
    /// [`Error`] with the first thing that is wrong.
    pub fn problem(&self) -> Result<Problem, Error> {
        Ok(self.spec()?.validate()?)
    }

    fn spec(&self) -> Result<ProblemSpec, Error> {
        let [q, k, v] = [&self.q, &self.k, &self.v].map(describe);
        let o = Shape { head_dim: v.shape.head_dim, ..q.shape };
        let (cu_seqlens_q, cu_seqlens_k) = self.cu_seqlens.unzip();
        let seqs_q = sequences(q.shape, cu_seqlens_q, self.seqused_q).map_err(Error::SequencesOfQ)?;
        let seqs_k = sequences(k.shape, cu_seqlens_k, self.seqused_k).map_err(Error::SequencesOfK)?;
        let o = TensorDesc::contiguous(T::Output::DTYPE, o);
        let mut spec = ProblemSpec::new(q, k, v, o).seqs_q(seqs_q).seqs_k(seqs_k).mask(self.mask);
        (spec.softmax_scale, spec.softcap) = (self.softmax_scale, self.softcap);
        Ok(spec)
    }

    /// The problem of contiguous copies of Q, K and V.
    #[cfg(feature = "cuda")]
    fn contiguous_problem(&self) -> Result<Problem, Error> {
        let mut spec = self.spec()?;
        for x in [&mut spec.q, &mut spec.k, &mut spec.v] {
            *x = TensorDesc::contiguous(x.dtype, x.shape);
        }
        Ok(spec.validate()?)
    }

    /// Computes O and LSE. On a GPU, Q, K and V are copied there and the results are copied back. A problem that the
    /// GPU's kernels do not take is an error; it is not computed on the CPU instead.
    ///
    /// # Errors
    /// [`Error`] with the first thing that is wrong.
    pub fn forward(&self, device: &Device) -> Result<Output<T::Output>, Error> {
        let (problem, qkv) = (self.problem()?, [self.q, self.k, self.v]);
        match device {
            Device::Cpu => Ok(cpu::forward(&problem, qkv)),
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => Ok(cuda::forward(device, &self.contiguous_problem()?, qkv)?),
        }
    }
}

fn describe<T: Scalar>(view: &ArrayView4<'_, T>) -> TensorDesc {
    let (batch, seqlen, heads, head_dim) = view.dim();
    let strides: Vec<i64> = view.strides().iter().map(|&stride| stride as i64).collect();
    TensorDesc {
        dtype: T::DTYPE,
        shape: Shape { batch, seqlen, heads, head_dim },
        strides: Strides { batch: strides[0], seqlen: strides[1], heads: strides[2], head_dim: strides[3] },
    }
}

fn sequences(
    shape: Shape,
    cu_seqlens: Option<&[i32]>,
    seqused: Option<&[i32]>,
) -> Result<Sequences, ProblemError> {
    let sequences = match cu_seqlens {
        Some(cu_seqlens) => Sequences::packed(cu_seqlens)?,
        None => Sequences::dense(shape.batch, shape.seqlen),
    };
    match seqused {
        Some(seqused) => sequences.with_used(seqused),
        None => Ok(sequences),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::Axis;

    #[test]
    fn tensors_without_elements_are_legal() {
        for (batch, seqlen_q, seqlen_k) in [(0, 4, 4), (2, 0, 4), (2, 4, 0), (2, 0, 0)] {
            let q = Array4::from_elem((batch, seqlen_q, 2, 8), 1.0f32);
            let kv = Array4::from_elem((batch, seqlen_k, 1, 8), 1.0f32);
            let output =
                Attention::new(q.view(), kv.view(), kv.view()).causal().forward(&Device::Cpu).unwrap();
            assert_eq!(output.o, Array4::zeros((batch, seqlen_q, 2, 8)));
            assert!(output.lse.iter().all(|&lse| lse == f32::NEG_INFINITY));
            assert_eq!(output.lse.dim(), (batch, 2, seqlen_q));
        }
    }

    #[test]
    fn a_bad_list_is_named() {
        let x = Array4::from_elem((1, 8, 1, 8), 1.0f32);
        let attention = Attention::new(x.view(), x.view(), x.view());
        let error = attention.clone().packed(&[0, 8], &[0, 5, 4]).problem().unwrap_err();
        assert_eq!(error.to_string(), "k and v: cu_seqlens falls from 5 to 4 at entry 2");
        let error = attention.seqused_q(&[9]).problem().unwrap_err();
        assert_eq!(error.to_string(), "q: seqused is 9 for sequence 0, outside 0 to 8");
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn what_is_copied_to_a_gpu_has_no_gaps() {
        let x = Array4::from_elem((2, 6, 4, 8), 1.0f32);
        let heads_first = || x.view().permuted_axes([0, 2, 1, 3]);
        let attention = Attention::new(heads_first(), heads_first(), heads_first()).causal();
        let (given, copied) = (attention.problem().unwrap(), attention.contiguous_problem().unwrap());
        for (given, copied) in [(given.q(), copied.q()), (given.k(), copied.k()), (given.v(), copied.v())] {
            assert_ne!(given, copied);
            assert_eq!(*copied, TensorDesc::contiguous(given.dtype, given.shape));
        }
        assert_eq!((copied.mask(), copied.lse_shape()), (given.mask(), given.lse_shape()));
    }

    #[test]
    fn a_transposed_view_is_the_same_problem() {
        let wave = |step: f32| {
            Array4::from_shape_fn((2, 5, 3, 8), |(b, s, h, d)| {
                (step * (b + 7 * s + 3 * h + 5 * d) as f32).sin()
            })
        };
        let [q, k, v] = [0.3, 0.5, 0.7].map(wave);
        let expected = Attention::new(q.view(), k.view(), v.view()).forward(&Device::Cpu).unwrap();
        let heads_first = |x: &Array4<f32>| {
            let mut x = x.clone();
            x.swap_axes(1, 2);
            x.as_standard_layout().into_owned()
        };
        let [q, k, v] = [heads_first(&q), heads_first(&k), heads_first(&v)];
        let [q, k, v] = [&q, &k, &v].map(|x| x.view().permuted_axes([0, 2, 1, 3]));
        assert_ne!(q.strides()[1], 3 * 8, "rows are not neighbours' heads apart");
        assert_eq!(Attention::new(q, k, v).forward(&Device::Cpu).unwrap(), expected);
        assert_eq!(expected.o.len_of(Axis(2)), 3);
    }
}
