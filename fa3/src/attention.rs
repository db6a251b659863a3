//! One attention call, as a builder.

use std::num::NonZeroU32;

use fa3_types::{
    Intervals, KnownProblem, LseForm, Mask, Problem, ProblemSpec, ScoreFunction, SequenceRows, Shape,
    TensorDesc, TensorName,
};
use ndarray::{Array3, ArrayView1, ArrayView4, ArrayViewMut3, ArrayViewMut4};

use crate::cpu::keys::Keys;
use crate::cpu::queries::Queries;
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::results::{Results, computed};
use crate::scales::Scaled;
use crate::scores::{Scores, score_setters};
use crate::{Device, Error, Fp8, Output, Scalar};

/// An attention call: a builder that takes Q, K and V, and options. [`Attention::forward`] computes it and
/// [`Attention::backward`] its gradients.
///
/// Q is (batch, seqlen_q, heads_q, head_dim), K (batch, seqlen_k, heads_kv, head_dim), V (batch, seqlen_k, heads_kv,
/// head_dim_v); heads_q is a multiple of heads_kv, and query head h reads key/value head h / (heads_q / heads_kv). With
/// [`Attention::packed`], batch is 1 and the sequences lie one after the other.
///
/// Any strides are allowed: views may be transposed, sliced, reversed or broadcast, and need no contiguous copy. Head
/// dimensions may be any number up to 576 for Q and K and up to 512 for V. On a GPU, e4m3 and gradients take up to 256.
/// A GPU's kernels take rows of a multiple of 16 bytes, which is 4 elements of f32, 8 of f16 and bf16, 16 of e4m3:
/// other rows are copied and padded with zeros, which change no result.
///
/// NaN in Q or K reaches O and LSE of the rows that see it, and of no other rows. NaN or an infinity in V may also
/// reach O of rows that do not see its key: tiles of query rows are multiplied with whole blocks of V, by 0 where a key
/// is hidden, and 0 · NaN is NaN. So such a value may reach every row of a tile in which some row sees some key of the
/// value's block, for example all earlier rows of the tile under a causal mask. A tile has up to 192 rows and a block
/// up to 512 keys. O of rows that see no key is 0 even in such a tile, and LSE never changes. No value beyond a
/// sequence's end reaches a result.
///
/// With e4m3 on a GPU, LSE belongs to P rounded to e4m3. It is typically off by less than 0.01, and by up to 0.09 for
/// 1024 keys.
#[derive(Clone, Debug)]
#[must_use = "nothing is computed before `forward` or `backward`"]
pub struct Attention<'a, T> {
    qkv: [ArrayView4<'a, T>; 3],
    qv: Option<ArrayView4<'a, T>>,
    /// Q, K and V with their scales, if any.
    pub(crate) scaled: Option<Scaled<'a>>,
    cu_seqlens: Option<(&'a [i32], &'a [i32])>,
    seqused_q: Option<&'a [i32]>,
    seqused_k: Option<&'a [i32]>,
    intervals: Option<ArrayView4<'a, i32>>,
    scores: Scores<'a>,
    deterministic: bool,
}

impl<'a, T: Scalar> Attention<'a, T> {
    /// Attention over all keys, scaled by 1/√head_dim. Takes arrays or views. Convert an array of dynamic dimension by
    /// `into_dimensionality::<Ix4>()`. Heads come after rows: an array (batch, heads, seqlen, head_dim) is passed by
    /// `permuted_axes([0, 2, 1, 3])`. Without `permuted_axes` the call may succeed, with heads and rows exchanged.
    pub fn new(
        q: impl Into<ArrayView4<'a, T>>,
        k: impl Into<ArrayView4<'a, T>>,
        v: impl Into<ArrayView4<'a, T>>,
    ) -> Attention<'a, T> {
        Attention {
            qkv: [q.into(), k.into(), v.into()],
            qv: None,
            scaled: None,
            cu_seqlens: None,
            seqused_q: None,
            seqused_k: None,
            intervals: None,
            scores: Scores::new(),
            deterministic: false,
        }
    }

    score_setters! {
        /// Hides keys in addition to the ones hidden already. Masks intersect, in any order. Chunks of two sizes are
        /// refused when the call is computed.
        ///
        /// ```
        /// # use fa3::ndarray::Array4;
        /// # use fa3::{Attention, Mask};
        /// # let x = Array4::<f32>::zeros((1, 100, 1, 64));
        /// let attention = Attention::new(&x, &x, &x).causal().window(Some(3), None);
        /// assert_eq!(attention.problem()?.mask(), Mask::window(Some(3), Some(0)));
        /// # Ok::<(), fa3::Error>(())
        /// ```
        mask;

        /// Gives each query head an attention sink (heads_q), as in GPT-OSS: the logit of one more key that every row
        /// sees, whose value is 0. The sink is neither scaled nor capped. It adds to the softmax's denominator, and to
        /// LSE:
        ///
        /// ```text
        /// P = exp(S) / (exp(sink) + Σ exp(S))        LSE = ln (exp(sink) + Σ exp(S))
        /// ```
        ///
        /// A row that sees no key has O = 0 and LSE = sink. A sink of -inf has no effect. With a sink of +inf, O is 0
        /// and LSE +inf. With a sink of NaN, O and LSE of rows that see a key are NaN.
        ///
        /// ```
        /// # use fa3::ndarray::{Array4, array};
        /// # use fa3::{Attention, Device};
        /// let x = Array4::<f32>::ones((1, 3, 2, 64));
        /// let zeros = Array4::zeros((1, 3, 2, 64));
        /// // Each of 3 keys has the weight 1, and so has the sink of the first head.
        /// let sinks = array![0.0, f32::NEG_INFINITY];
        /// let output = Attention::new(&zeros, &zeros, &x).sink(&sinks).forward(&Device::Cpu)?;
        /// assert_eq!([output.o[[0, 0, 0, 0]], output.o[[0, 0, 1, 0]]], [0.75, 1.0]);
        /// assert_eq!([output.lse[[0, 0, 0]], output.lse[[0, 1, 0]]], [4_f32.ln(), 3_f32.ln()]);
        /// # Ok::<(), fa3::Error>(())
        /// ```
        sink;

        /// Replaces each score by a function of the score, its sequence, query head, row and key, and of numbers and
        /// tables. The function takes scaled and capped scores, and the mask applies to its values.
        /// [`ScoreFunction::parse`] describes the text. A function of -inf hides a key. Gradients go through its
        /// derivative; its numbers and tables have no gradients.
        ///
        /// ```
        /// # use fa3::ndarray::Array4;
        /// # use fa3::{Attention, Device, ScoreFunction, ScoreTable};
        /// let x = Array4::<f32>::zeros((1, 3, 2, 64));
        /// // ALiBi: a score loses a head's slope for each key between it and the query.
        /// let slopes = ScoreTable::new(&[2], [1.0, 0.5])?;
        /// let alibi = ScoreFunction::parse("s + slope[h] * (k - q)", [("slope", slopes.into())])?;
        /// let output = Attention::new(&x, &x, &x).causal().score(alibi).forward(&Device::Cpu)?;
        /// let sum = 1.0 + (-1.0_f32).exp() + (-2.0_f32).exp();
        /// assert!((output.lse[[0, 0, 2]] - sum.ln()).abs() < 1e-6);
        /// # Ok::<(), Box<dyn std::error::Error>>(())
        /// ```
        score;
    }

    fa3_types::setters! {
        /// Lets each query see only keys of one or two intervals `start .. end`: i32 (batch or 1, heads_q or 1,
        /// seqlen_q, 2 or 4), whose last axis is `start, end` or `start, end, start, end`. The two intervals may be in
        /// any order, overlap and be empty; bounds are clamped to the keys. With a causal mask, a window or chunks, a
        /// query sees the keys that both show. This expresses masks of documents, of prefixes, of windows beside a sink
        /// of first keys, and of padding. Keys outside of the intervals take no time.
        ///
        /// In place of bounds, the array may say which sequences are causal, (sequences, 1, 1, 1): rows of sequences
        /// whose number is 0 see every key, and rows of others the keys up to their own positions. Or which new keys a
        /// row sees, (batch, seqlen_q, words, 1). Or which blocks of keys a block of rows sees, (batch or 1,
        /// heads_q or 1, blocks of rows, words): see [`Intervals`].
        ///
        /// Keys are counted from the sequence's first one. Packed sequences have intervals (1, heads_q or 1, total_q, 2
        /// or 4). Elements have 16 bits or more, and `qv` is not allowed.
        ///
        /// ```
        /// # use fa3::ndarray::{Array4, arr2};
        /// # use fa3::{Attention, Device};
        /// let x = Array4::<f32>::ones((1, 6, 2, 64));
        /// // Two documents of 2 and 4 rows, each with a causal mask; all heads share these intervals.
        /// let rows = arr2(&[[0, 1], [0, 2], [2, 3], [2, 4], [2, 5], [2, 6]]);
        /// let intervals = rows.into_shape_with_order((1, 1, 6, 2)).unwrap();
        /// let output = Attention::new(&x, &x, &x).intervals(&intervals).softmax_scale(1e-9).forward(&Device::Cpu)?;
        /// assert!((output.lse[[0, 1, 4]] - 3_f32.ln()).abs() < 1e-5);
        /// # Ok::<(), fa3::Error>(())
        /// ```
        intervals(intervals: impl Into<ArrayView4<'a, i32>>) { intervals: Some(intervals.into()) }

        /// Adds the product of `qv` and V to the scores: DeepSeek's latent attention (MLA) in its absorbed form, where
        /// a token's latent vector is its value and most of its key at once. `qv` has the shape of O. The scale
        /// defaults to 1/√(head_dim + head_dim_v):
        ///
        /// ```text
        /// S = softmax_scale · (Q Kᵀ + Qv Vᵀ)
        /// ```
        ///
        /// head_dim and head_dim_v are at most 576 together; on a GPU head_dim is at most 64. A call with `qv` has no
        /// gradients, and does not take e4m3.
        ///
        /// ```
        /// # use fa3::ndarray::{Array4, Axis, concatenate};
        /// # use fa3::{Attention, Device};
        /// # let wave = |heads: usize, columns: usize| {
        /// #     Array4::from_shape_fn((1, 20, heads, columns), |(_, s, h, d)| ((7 * s + 3 * h + d) as f32).sin())
        /// # };
        /// // 4 heads share latent vectors of 32 columns, beside 8 columns that are rotated.
        /// let (q, qv) = (wave(4, 8), wave(4, 32));
        /// let (rotated, latent) = (wave(1, 8), wave(1, 32));
        /// let output = Attention::new(&q, &rotated, &latent).qv(&qv).causal().forward(&Device::Cpu)?;
        /// assert_eq!(output.o.dim(), (1, 20, 4, 32));
        ///
        /// // Attention of both parts side by side gives the same output.
        /// let q = concatenate(Axis(3), &[qv.view(), q.view()]).unwrap();
        /// let k = concatenate(Axis(3), &[latent.view(), rotated.view()]).unwrap();
        /// assert_eq!(Attention::new(&q, &k, &latent).causal().forward(&Device::Cpu)?, output);
        /// # Ok::<(), fa3::Error>(())
        /// ```
        qv(qv: impl Into<ArrayView4<'a, T>>) { qv: Some(qv.into()) }

        /// Gives gradients the same bits in every run. Otherwise a GPU adds the parts of dQ in any order if rows see
        /// many keys ([`MOST_KEYS_IN_ORDER`](fa3_sched::backward::MOST_KEYS_IN_ORDER) is the rule), because this is
        /// faster, and dQ's last bits differ from run to run. O, LSE, dK and dV always have the same bits in every run,
        /// and so have all results of the CPU.
        deterministic() { deterministic: true }

        /// Takes the tensors as packed: sequence i is rows `cu_seqlens[i] .. cu_seqlens[i + 1]`.
        ///
        /// ```
        /// use fa3::ndarray::Array4;
        /// use fa3::{Attention, Device};
        ///
        /// // Three sequences of 30, 50 and 20 rows, one after the other; batch is 1.
        /// let x = Array4::from_shape_fn((1, 100, 2, 64), |(_, s, h, d)| ((7 * s + 3 * h + d) as f32).sin());
        /// let ends = [0, 30, 80, 100];
        /// let output = Attention::new(&x, &x, &x).packed(&ends, &ends).causal().forward(&Device::Cpu)?;
        /// assert_eq!(output.o.dim(), (1, 100, 2, 64));
        /// assert_eq!(output.lse.dim(), (1, 2, 100));
        /// # Ok::<(), fa3::Error>(())
        /// ```
        packed(cu_seqlens_q: &'a [i32], cu_seqlens_k: &'a [i32]) { cu_seqlens: Some((cu_seqlens_q, cu_seqlens_k)) }

        /// Uses only the first `seqused[i]` query rows of sequence i.
        seqused_q(seqused: &'a [i32]) { seqused_q: Some(seqused) }

        /// Uses only the first `seqused[i]` keys of sequence i.
        seqused_k(seqused: &'a [i32]) { seqused_k: Some(seqused) }
    }

    /// The validated problem, with contiguous tensors: the strides of the views are not part of it. It has the views'
    /// head dimensions; a GPU computes [`KnownProblem::padded`].
    ///
    /// # Errors
    /// [`Error`] with the first violation.
    pub fn problem(&self) -> Result<KnownProblem, Error> {
        self.problem_of(false)
    }

    /// The problem, whose results may have the largest scores.
    fn problem_of(&self, max_logits: bool) -> Result<KnownProblem, Error> {
        let ([rows_q, rows_k], mut spec) = (self.rows()?, self.spec_of(max_logits)?);
        spec.score = None;
        let problem = match &self.intervals {
            None => spec.with_rows(rows_q, rows_k)?,
            Some(intervals) => {
                let bounds = Vec::from_iter(intervals.iter().copied());
                KnownProblem::with_intervals(spec.validate()?, rows_q, rows_k, bounds)?
            }
        };
        Ok(self.scores.known(problem))
    }

    /// The rows of the sequences of Q and of K.
    pub(crate) fn rows(&self) -> Result<[SequenceRows; 2], Error> {
        let (cu_seqlens_q, cu_seqlens_k) = self.cu_seqlens.unzip();
        let [(batch_q, seqlen_q, ..), (batch_k, seqlen_k, ..), _] = self.qkv.each_ref().map(ArrayView4::dim);
        let rows_q = SequenceRows::listed(batch_q, seqlen_q, cu_seqlens_q, self.seqused_q);
        let rows_k = SequenceRows::listed(batch_k, seqlen_k, cu_seqlens_k, self.seqused_k);
        Ok([rows_q.map_err(Error::SequencesOfQ)?, rows_k.map_err(Error::SequencesOfK)?])
    }

    pub(crate) fn spec(&self) -> Result<ProblemSpec, Error> {
        self.spec_of(false)
    }

    /// The problem as plain data, whose results may have the largest scores.
    pub(crate) fn spec_of(&self, max_logits: bool) -> Result<ProblemSpec, Error> {
        // No `..` here: every part of a call must be considered.
        let Attention {
            qkv,
            qv,
            scaled: _, // the codes are `qkv`
            cu_seqlens: _,
            seqused_q,
            seqused_k,
            intervals,
            scores,
            deterministic: _,
        } = self;
        let [q, k, v] = qkv.each_ref().map(contiguous);
        let o = Shape { head_dim: v.shape.head_dim, ..q.shape };
        let [seqs_q, seqs_k] = self.rows()?.map(|rows| rows.sequences());
        let o = TensorDesc::contiguous(T::Output::DTYPE, o);
        let mut spec = ProblemSpec::new(q, k, v, o).seqs_q(seqs_q).seqs_k(seqs_k);
        if let Some(intervals) = intervals {
            spec = spec.mask(Mask::of_intervals(Intervals::of_shape(intervals.dim().into(), q.shape)?));
        }
        (spec.qv, spec.max_logits) = (qv.as_ref().map(contiguous), max_logits);
        scores.given_to(spec, [seqused_q, seqused_k].map(|used| Some(used.is_some())))
    }

    /// Computes this call in 8 bits: Q, K and V of f16 or bf16 are quantized first.
    pub fn fp8(self) -> Fp8<'a, T>
    where
        T: Scalar<Output = T>,
    {
        Fp8::new(self)
    }

    pub(crate) fn tensors(&self) -> [ArrayView4<'a, T>; 3] {
        self.qkv
    }

    /// This call for `qkv` in place of Q, K and V, of the same shapes, without `qv` and scales.
    pub(crate) fn of<'b, U>(&self, qkv: [ArrayView4<'b, U>; 3]) -> Attention<'b, U>
    where
        'a: 'b,
    {
        Attention {
            qkv,
            qv: None,
            scaled: None,
            cu_seqlens: self.cu_seqlens,
            seqused_q: self.seqused_q,
            seqused_k: self.seqused_k,
            intervals: self.intervals,
            scores: Scores { problem: None, ..self.scores.clone() },
            deterministic: self.deterministic,
        }
    }

    /// Q with its optional arrays.
    fn queries(&self) -> Queries<'a, T> {
        Queries { q: self.qkv[0], qv: self.qv, sink: self.scores.sink }
    }

    fn compute(&self, device: &Device, problem: &KnownProblem, results: Results<'_, T>) -> Result<(), Error> {
        let [_, k, v] = &self.qkv;
        match (device, self.scaled) {
            (Device::Cpu, None) => Ok(results.compute_on_cpu(problem, self.queries(), Keys::new(k, v))?),
            (Device::Cpu, Some(scaled)) => self.scaled_on_cpu(scaled, results),
            #[cfg(feature = "cuda")]
            (Device::Cuda(device), None) => {
                Ok(cuda::forward(device, problem, self.queries(), [*k, *v], None, results)?)
            }
            #[cfg(feature = "cuda")]
            (Device::Cuda(device), Some(scaled)) => {
                let (problem, descales) = self.descaled(scaled, problem.has_max_logits())?;
                Ok(cuda::forward(device, &problem, self.queries(), [*k, *v], Some(&descales), results)?)
            }
        }
    }

    /// `cu_seqlens` of Q and of K, if the tensors are packed.
    pub(crate) fn cu_seqlens(&self) -> Option<(&'a [i32], &'a [i32])> {
        self.cu_seqlens
    }

    /// The sinks of query heads, if any.
    pub(crate) fn sinks(&self) -> Option<ArrayView1<'a, f32>> {
        self.scores.sink
    }

    /// Whether gradients must have the same bits in every run.
    #[cfg(feature = "cuda")]
    pub(crate) fn is_deterministic(&self) -> bool {
        self.deterministic
    }

    /// Computes O and LSE. On a GPU, Q, K and V are copied to it and the results are copied back. A problem that the
    /// GPU's kernels do not take is an error; the CPU does not compute it instead.
    ///
    /// # Errors
    /// [`Error`] with the first violation.
    pub fn forward(&self, device: &Device) -> Result<Output<T::Output>, Error> {
        let problem = self.problem()?;
        let (output, _) = computed(&problem, |results| self.compute(device, &problem, results))?;
        Ok(Output::of(&problem, output.o, output.lse))
    }

    /// Computes O, LSE, and the largest score of each row, of LSE's shape: scaled and capped, without the sink, and
    /// -inf for a row that sees no key. Their maximum over a head's rows is what QK-clip compares with its threshold.
    /// On a GPU, Q has 16 bits.
    ///
    /// ```
    /// # use fa3::ndarray::Array4;
    /// # use fa3::{Attention, Device};
    /// let x = Array4::<f32>::from_shape_fn((1, 3, 1, 16), |(_, row, ..)| row as f32);
    /// let (_, largest) = Attention::new(&x, &x, &x).causal().forward_with_max_logits(&Device::Cpu)?;
    /// // 16 columns, divided by their root
    /// assert_eq!(largest.into_raw_vec_and_offset().0, [0.0, 4.0, 16.0]);
    /// # Ok::<(), fa3::Error>(())
    /// ```
    ///
    /// # Errors
    /// The errors of [`Attention::forward`].
    pub fn forward_with_max_logits(
        &self,
        device: &Device,
    ) -> Result<(Output<T::Output>, Array3<f32>), Error> {
        let problem = self.problem_of(true)?;
        let (output, largest) = computed(&problem, |results| self.compute(device, &problem, results))?;
        Ok((Output::of(&problem, output.o, output.lse), largest))
    }

    /// Computes O and LSE into existing arrays, which have the shapes of [`Output`] and any strides. All of their
    /// elements are written, unless there is an error.
    ///
    /// # Errors
    /// The errors of [`Attention::forward`], and [`Error::OutputShape`].
    pub fn forward_into(
        &self,
        device: &Device,
        o: ArrayViewMut4<'_, T::Output>,
        lse: ArrayViewMut3<'_, f32>,
    ) -> Result<(), Error> {
        let problem = self.problem()?;
        let results = Results::into(&problem, o, lse)?;
        self.compute(device, &problem, results)
    }
}

pub(crate) fn check_input(tensor: TensorName, given: &[usize], expected: &[usize]) -> Result<(), Error> {
    if given == expected {
        return Ok(());
    }
    Err(Error::InputShape { tensor, given: given.to_vec(), expected: expected.to_vec() })
}

/// A tensor of the view's type and shape.
pub(crate) fn contiguous<T: Scalar>(view: &ArrayView4<'_, T>) -> TensorDesc {
    let (batch, seqlen, heads, head_dim) = view.dim();
    TensorDesc::contiguous(T::DTYPE, Shape { batch, seqlen, heads, head_dim })
}
