//! One attention call over a cache, as a builder.

use std::num::NonZeroU32;

use fa3_types::{
    CachedProblem, CachedSpec, KnownProblem, Mask, Problem, ProblemError, ProblemSpec, QueryPositions,
    SequenceRows, Shape, TensorDesc, TensorName,
};
use ndarray::{Array3, Array4, ArrayView1, ArrayView4};

use super::{Held, KvCache, NewRows};
use crate::attention::{check_input, contiguous};
use crate::cpu::inputs::Inputs;
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::{Device, Error, Output, Scalar};

/// Attention of queries over a [`KvCache`], as FlashAttention-3's `flash_attn_with_kvcache` computes it at each step
/// of a decoding loop. A builder; [`CachedAttention::forward`] computes it, and [`CachedAttention::append_forward`]
/// puts new rows into the cache before. There is no backward pass.
///
/// Q is (batch, seqlen_q, heads_q, head_dim). The last row of a sequence of Q stands at its last key in use. Strides
/// are free, and so are dtypes and head dimensions, as far as [`Attention`](crate::Attention) takes them and
/// [`NewRows`] does.
///
/// On a GPU, the whole cache is copied there at each call, and back where rows were appended: for a cache that stays
/// there, use `cuda::CachedForward`. Where rows of Q are few, a GPU's CTAs share the keys of all sequences, and the
/// last bits of a row depend on the batch's other sequences.
///
/// ```
/// use fa3::half::bf16;
/// use fa3::ndarray::{Array4, array};
/// use fa3::{CachedAttention, Device, KvCache, NewRows, Rope, RopeStyle};
///
/// // 8 pages of 16 rows for two sequences, which have 3 of them each. Two query heads share a key/value head.
/// let pool = Array4::from_elem((8, 16, 1, 64), bf16::ZERO);
/// let mut cache = KvCache::paged(pool.clone(), pool, array![[0, 2, 4], [1, 7, 5]]);
/// let table = Rope::new(RopeStyle::Interleaved, 64, 10_000.0)?.table(48);
///
/// // 20 tokens of each sequence at first, then one by one.
/// for tokens in [20, 1, 1] {
///     let q = Array4::from_elem((2, tokens, 2, 64), bf16::ONE);
///     let kv = Array4::from_elem((2, tokens, 1, 64), bf16::ONE);
///     let new = NewRows::new(&kv, &kv).rotary(&table);
///     let output = CachedAttention::new(&q).causal().append_forward(&Device::Cpu, &mut cache, &new)?;
///     assert_eq!(output.o, q); // the mean of ones
/// }
/// assert_eq!(cache.cache_seqlens, [22, 22]);
/// assert_eq!(cache.v[[2, 5, 0, 0]], bf16::ONE); // the last row of the first sequence
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "nothing is computed before `forward` or `append_forward`"]
pub struct CachedAttention<'a, T> {
    q: ArrayView4<'a, T>,
    qv: Option<ArrayView4<'a, T>>,
    cu_seqlens_q: Option<&'a [i32]>,
    mask: Result<Mask, ProblemError>,
    softmax_scale: Option<f64>,
    softcap: Option<f64>,
    sink: Option<ArrayView1<'a, f32>>,
}

impl<'a, T: Scalar> CachedAttention<'a, T> {
    /// Attention of queries over all keys in use, scaled by 1/√head_dim, of an array or a view of one.
    pub fn new(q: impl Into<ArrayView4<'a, T>>) -> CachedAttention<'a, T> {
        let (mask, q) = (Ok(Mask::None), q.into());
        CachedAttention {
            q,
            qv: None,
            cu_seqlens_q: None,
            mask,
            softmax_scale: None,
            softcap: None,
            sink: None,
        }
    }

    /// Takes Q as packed, with batch 1: sequence i is rows `cu_seqlens[i] .. cu_seqlens[i + 1]`.
    pub fn cu_seqlens_q(mut self, cu_seqlens: &'a [i32]) -> CachedAttention<'a, T> {
        self.cu_seqlens_q = Some(cu_seqlens);
        self
    }

    /// Adds the product of `qv`, of O's shape, and the cache's values to the scores, as
    /// [`Attention::qv`](crate::Attention::qv) does: V is the cache of latent vectors, K that of the rotated columns.
    /// Where new rows rotate Q, `qv` stays as it is.
    pub fn qv(mut self, qv: impl Into<ArrayView4<'a, T>>) -> CachedAttention<'a, T> {
        self.qv = Some(qv.into());
        self
    }

    /// Hides what `mask` hides, beside what is hidden already. Chunks of two sizes are refused when it is computed.
    pub fn mask(mut self, mask: Mask) -> CachedAttention<'a, T> {
        self.mask = self.mask.and_then(|other| other.and(mask));
        self
    }

    /// Lets each query see no keys after its own position, the last query standing at the last key.
    pub fn causal(self) -> CachedAttention<'a, T> {
        self.mask(Mask::Causal)
    }

    /// Lets each query see at most `left` keys before its own position and `right` after it; `None` is unbounded.
    pub fn window(self, left: Option<u32>, right: Option<u32>) -> CachedAttention<'a, T> {
        self.mask(Mask::window(left, right))
    }

    /// Lets each query see the keys of its own chunk of `keys`, counted from the sequence's first key.
    pub fn chunk(self, keys: NonZeroU32) -> CachedAttention<'a, T> {
        self.mask(Mask::chunk(keys))
    }

    /// Sets the factor on Q·Kᵀ.
    pub fn softmax_scale(mut self, scale: f64) -> CachedAttention<'a, T> {
        self.softmax_scale = Some(scale);
        self
    }

    /// Bounds scaled scores s to ±cap by cap · tanh(s / cap).
    pub fn softcap(mut self, cap: f64) -> CachedAttention<'a, T> {
        self.softcap = Some(cap);
        self
    }

    /// Gives each query head a sink (heads_q), as [`Attention::sink`](crate::Attention::sink) does.
    pub fn sink(mut self, sink: impl Into<ArrayView1<'a, f32>>) -> CachedAttention<'a, T> {
        self.sink = Some(sink.into());
        self
    }

    /// Computes O and LSE over the rows in use. A problem that the GPU's kernels do not take is an error; it is not
    /// computed on the CPU instead.
    ///
    /// # Errors
    /// [`Error`] with the first thing that is wrong.
    pub fn forward(&self, device: &Device, cache: &KvCache<T>) -> Result<Output<T::Output>, Error> {
        let (held, rows) = (cache.held(|_| 0)?, self.rows()?);
        let problem = self.spec(cache, &rows, held.lens.iter().copied().max())?.validate()?;
        let known = self.known(&problem, rows, &held)?;
        match device {
            Device::Cpu => Ok(self.on_cpu(self.q, cache, &known, &held)),
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => Ok(cuda::cached::forward(device, &problem, self, cache)?),
        }
    }

    /// Puts new rows behind those in use, which they are afterwards, and computes O and LSE then. The cache is as it
    /// was if there is an error.
    ///
    /// # Errors
    /// [`Error`] with the first thing that is wrong.
    pub fn append_forward(
        &self,
        device: &Device,
        cache: &mut KvCache<T>,
        new: &NewRows<'_, T>,
    ) -> Result<Output<T::Output>, Error> {
        let (rows, rows_new) = (self.rows()?, new.rows()?);
        let problem = self.cached_problem(cache, &rows, new, &rows_new)?;
        // The problem's counts agree, and so there are new rows of each sequence.
        let mut held = cache.held(|sequence| rows_new.len(sequence))?;
        held.check_places(&rows_new)?;
        let rotation = new.rotation(&held.used)?;
        let of_q = problem.append().queries().map(|queries| queries.positions);
        if let Some((rotation, of_q)) = rotation.as_ref().zip(of_q) {
            rotation.check(&rows_new, QueryPositions::Each)?;
            rotation.check(&rows, of_q)?;
        }
        let after = |lens: &[usize]| lens.iter().enumerate().map(|(i, len)| len + rows_new.len(i)).collect();
        let (lens, used): (Vec<usize>, Vec<usize>) = (after(&held.lens), after(&held.used));
        held.lens = lens;
        let known = self.known(problem.attention(), rows.clone(), &held)?;
        let output = match device {
            Device::Cpu => {
                held.append(new.k, &rows_new, rotation.as_ref(), cache.k.view_mut());
                held.append(new.v, &rows_new, None, cache.v.view_mut());
                let rotated =
                    rotation.zip(of_q).map(|(rotation, of_q)| rotation.rotated(self.q, &rows, of_q));
                let q = rotated.as_ref().map_or(self.q, |rotated| rotated.view());
                self.on_cpu(q, cache, &known, &held)
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => {
                let table = rotation.map(|rotation| rotation.table);
                cuda::cached::append_forward(device, &problem, self, cache, new, table)?
            }
        };
        // Not more than the capacity, which is below 2^31 in a valid problem.
        cache.cache_seqlens = used.into_iter().map(|used| used as i32).collect();
        Ok(output)
    }

    /// Q.
    #[cfg(feature = "cuda")]
    pub(crate) fn q(&self) -> ArrayView4<'a, T> {
        self.q
    }

    /// The part of Q that is multiplied by V, if there is one.
    #[cfg(feature = "cuda")]
    pub(crate) fn qv_view(&self) -> Option<ArrayView4<'a, T>> {
        self.qv
    }

    /// The list of packed rows, if Q is packed.
    #[cfg(feature = "cuda")]
    pub(crate) fn packed(&self) -> Option<&'a [i32]> {
        self.cu_seqlens_q
    }

    /// The sinks of query heads, if they have some.
    #[cfg(feature = "cuda")]
    pub(crate) fn sinks(&self) -> Option<ArrayView1<'a, f32>> {
        self.sink
    }

    fn on_cpu(
        &self,
        q: ArrayView4<'_, T>,
        cache: &KvCache<T>,
        known: &KnownProblem,
        held: &Held,
    ) -> Output<T::Output> {
        let mut o = Array4::from_elem(known.o().shape.dims(), T::Output::default());
        let mut lse = Array3::zeros(known.lse_shape());
        let inputs = Inputs { qkv: [q, cache.k.view(), cache.v.view()], qv: self.qv, sink: self.sink };
        T::forward_on_cpu(known, inputs, Some(&held.pages), o.view_mut(), lse.view_mut());
        Output::new(o, lse)
    }

    /// The rows of each sequence of Q.
    fn rows(&self) -> Result<SequenceRows, Error> {
        let (batch, seqlen, ..) = self.q.dim();
        SequenceRows::listed(batch, seqlen, self.cu_seqlens_q, None).map_err(Error::SequencesOfQ)
    }

    /// The attention over a cache, of contiguous tensors. The longest sequence has about so many rows, if that is
    /// known.
    fn spec(
        &self,
        cache: &KvCache<T>,
        rows: &SequenceRows,
        longest: Option<usize>,
    ) -> Result<ProblemSpec, Error> {
        let [q, k, v] = [self.q, cache.k.view(), cache.v.view()].map(|x| contiguous(&x));
        let o = TensorDesc::contiguous(T::Output::DTYPE, Shape { head_dim: v.shape.head_dim, ..q.shape });
        let (seqs_q, seqs_k) = (rows.sequences(), cache.sequences(longest.unwrap_or(0)));
        let mut spec = ProblemSpec::new(q, k, v, o).seqs_q(seqs_q).seqs_k(seqs_k).mask(self.mask.clone()?);
        (spec.softmax_scale, spec.softcap) = (self.softmax_scale, self.softcap);
        spec.qv = self.qv.as_ref().map(contiguous);
        if let Some(sink) = &self.sink {
            check_input(TensorName::Sink, sink.shape(), &[q.shape.heads])?;
            spec = spec.sink();
        }
        Ok(spec)
    }

    /// The same with new rows before.
    fn cached_problem(
        &self,
        cache: &KvCache<T>,
        rows: &SequenceRows,
        new: &NewRows<'_, T>,
        rows_new: &SequenceRows,
    ) -> Result<CachedProblem, Error> {
        let longest = cache.cache_seqlens.iter().map(|&used| used.max(0) as usize).max();
        let attention = self.spec(cache, rows, longest.map(|longest| longest + rows_new.max_len()))?;
        let descs = new.tensors().map(|x| contiguous(&x));
        let mut spec = CachedSpec::new(attention, descs, rows_new.sequences());
        spec.rotary = new.rotary_spec()?;
        Ok(spec.validate()?)
    }

    /// The same attention over sequences of contiguous rows, whose lengths the host knows.
    fn known(&self, problem: &Problem, rows_q: SequenceRows, held: &Held) -> Result<KnownProblem, Error> {
        let used: Vec<i32> = held.lens.iter().map(|&len| len as i32).collect();
        let rows_k = match rows_q.is_packed() {
            true => SequenceRows::packed_lengths(&held.lens),
            false => SequenceRows::dense(held.lens.len(), held.capacity).with_used(&used)?,
        };
        let gathered = |x: &TensorDesc| {
            let batch = if rows_k.is_packed() { 1 } else { rows_k.count() };
            TensorDesc::contiguous(x.dtype, Shape { batch, seqlen: rows_k.end(), ..x.shape })
        };
        let (k, v) = (gathered(problem.k()), gathered(problem.v()));
        let mut spec = ProblemSpec::new(*problem.q(), k, v, *problem.o()).mask(self.mask.clone()?);
        (spec.softmax_scale, spec.softcap, spec.sink) =
            (self.softmax_scale, self.softcap, self.sink.is_some());
        spec.qv = problem.qv().copied();
        Ok(spec.with_rows(rows_q, rows_k)?)
    }
}
