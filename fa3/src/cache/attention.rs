//! One attention call over a cache, as a builder.

use std::num::NonZeroU32;

use fa3_types::{LseForm, Mask, Problem, ScoreFunction};
use ndarray::{Array3, ArrayView1, ArrayView2, ArrayView3, ArrayView4, ArrayViewMut3, ArrayViewMut4, Axis};

use super::checked::{Checked, CheckedAppend};
use super::{CacheView, CacheViewMut, NewRows};
use crate::cpu::keys::{Keys, TokenScales};
use crate::cpu::queries::Queries;
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::results::{Results, computed};
use crate::scores::{Scores, score_setters};
use crate::{Device, Error, Output, Scalar, cpu};

/// Attention of queries over a [`KvCache`](crate::KvCache), as FlashAttention-3's `flash_attn_with_kvcache` computes it
/// at each step of a decoding loop. It is a builder: [`CachedAttention::forward`] computes it, and
/// [`CachedAttention::append_forward`] first appends new rows to the cache. There is no backward pass.
///
/// Q is (batch, seqlen_q, heads_q, head_dim). Masks are aligned at the bottom right: the last row of a sequence of Q
/// has the position of its last key in use. Any strides are allowed, and all dtypes and head dimensions that
/// [`Attention`](crate::Attention) and [`NewRows`] take. The cache has Q's dtype, or it is e4m3 with Q of f16 or bf16,
/// with [scales](CachedAttention::k_descale).
///
/// On a GPU, the whole cache is copied to the device at each call, and back if rows were appended. For a cache that
/// stays on the GPU, use `cuda::CachedForward`. If Q has few rows, a GPU uses split-KV over all sequences, and the last
/// bits of a row depend on the batch's other sequences.
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
    pub(super) q: ArrayView4<'a, T>,
    pub(super) qv: Option<ArrayView4<'a, T>>,
    pub(super) cu_seqlens_q: Option<&'a [i32]>,
    pub(super) seqused_q: Option<&'a [i32]>,
    k_descale: Option<ArrayView2<'a, f32>>,
    v_descale: Option<ArrayView2<'a, f32>>,
    pub(super) token_scales: Option<[ArrayView4<'a, f32>; 2]>,
    pub(super) intervals: Option<ArrayView4<'a, i32>>,
    pub(super) scores: Scores<'a>,
}

impl<'a, T: Scalar> CachedAttention<'a, T> {
    /// Attention over all keys in use, scaled by 1/√head_dim, for queries in an array or a view.
    pub fn new(q: impl Into<ArrayView4<'a, T>>) -> CachedAttention<'a, T> {
        CachedAttention {
            q: q.into(),
            qv: None,
            cu_seqlens_q: None,
            seqused_q: None,
            k_descale: None,
            v_descale: None,
            token_scales: None,
            intervals: None,
            scores: Scores::new(),
        }
    }

    score_setters! {
        /// Hides keys in addition to the ones hidden already. Chunks of two sizes are refused when the call is
        /// computed.
        mask;

        /// Gives each query head a sink (heads_q), as [`Attention::sink`](crate::Attention::sink) does.
        sink;

        /// Replaces each score by a function of it, as [`Attention::score`](crate::Attention::score) does. The last
        /// query stands at the last key in use, and rows of left padding are not counted.
        ///
        /// ```
        /// use fa3::ndarray::Array4;
        /// use fa3::{CachedAttention, Device, KvCache, ScoreFunction};
        ///
        /// let x = Array4::<f32>::ones((1, 9, 1, 64));
        /// let mut cache = KvCache::dense(x.clone(), x);
        /// cache.cache_seqlens = vec![3];
        /// let distance = ScoreFunction::parse("s + k - q", [])?;
        /// let q = Array4::<f32>::zeros((1, 1, 1, 64));
        /// let output = CachedAttention::new(&q).score(distance).forward(&Device::Cpu, &cache)?;
        /// let sum = 1.0 + (-1.0_f32).exp() + (-2.0_f32).exp();
        /// assert!((output.lse[[0, 0, 0]] - sum.ln()).abs() < 1e-6);
        /// # Ok::<(), Box<dyn std::error::Error>>(())
        /// ```
        score;
    }

    fa3_types::setters! {
        /// Takes Q as packed, with batch 1: sequence i is rows `cu_seqlens[i] .. cu_seqlens[i + 1]`.
        cu_seqlens_q(cu_seqlens: &'a [i32]) { cu_seqlens_q: Some(cu_seqlens) }

        /// Uses only the first `seqused[i]` query rows of sequence i.
        seqused_q(seqused: &'a [i32]) { seqused_q: Some(seqused) }

        /// Sets the factors on the elements of K in an e4m3 cache, (sequences, heads_kv), 1 by default. New rows of 16
        /// bits are divided by these factors and rounded, saturating at ±448.
        ///
        /// ```
        /// use fa3::half::bf16;
        /// use fa3::ndarray::{Array2, Array4};
        /// use fa3::{CachedAttention, Device, E4m3, KvCache, NewRows};
        ///
        /// let zeros = Array4::from_elem((1, 512, 2, 64), E4m3::ZERO);
        /// let mut cache = KvCache::dense(zeros.clone(), zeros);
        /// let x = Array4::from_elem((1, 1, 2, 64), bf16::from_f32(3.0));
        /// let scales = Array2::from_elem((1, 2), 0.5);
        /// let attention = CachedAttention::new(&x).k_descale(&scales).v_descale(&scales);
        /// let output = attention.append_forward(&Device::Cpu, &mut cache, &NewRows::new(&x, &x))?;
        /// assert_eq!((output.o[[0, 0, 0, 0]].to_f32(), cache.v[[0, 0, 0, 0]].to_f32()), (3.0, 6.0));
        /// # Ok::<(), fa3::Error>(())
        /// ```
        k_descale(scales: impl Into<ArrayView2<'a, f32>>) { k_descale: Some(scales.into()) }

        /// Sets the factors on the elements of V, like [`CachedAttention::k_descale`] for K.
        v_descale(scales: impl Into<ArrayView2<'a, f32>>) { v_descale: Some(scales.into()) }

        /// Sets a factor on each row and head of K, and one of V, in a cache of e4m3 or `i8`: (entries, rows,
        /// heads_kv), with any strides, as vLLM's `fp8_per_token_head` and `int8_per_token_head` have them. An element
        /// is its code times the factor, rounded to the type of Q, once. Rows are not appended to such a cache.
        ///
        /// ```
        /// use fa3::half::bf16;
        /// use fa3::ndarray::{Array3, Array4};
        /// use fa3::{CachedAttention, Device, E4m3, KvCache};
        ///
        /// let ones = Array4::from_elem((1, 2, 2, 64), E4m3::from_f32(1.0));
        /// let mut cache = KvCache::dense(ones.clone(), ones);
        /// cache.cache_seqlens = vec![2];
        /// let q = Array4::from_elem((1, 1, 2, 64), bf16::ZERO);
        /// let scales = Array3::from_shape_fn((1, 2, 2), |(_, row, head)| (1 + 2 * row + 4 * head) as f32);
        /// let attention = CachedAttention::new(&q).token_scales([scales.view(), scales.view()]);
        /// let output = attention.forward(&Device::Cpu, &cache)?;
        /// assert_eq!(output.o[[0, 0, 1, 0]].to_f32(), 6.0); // the mean of 5 and 7
        /// # Ok::<(), fa3::Error>(())
        /// ```
        token_scales(scales: [ArrayView3<'a, f32>; 2]) {
            token_scales: Some(scales.map(|scales| scales.insert_axis(Axis(3))))
        }

        /// Lets each query see only keys of one or two intervals, as
        /// [`Attention::intervals`](crate::Attention::intervals) does. Keys are counted from the sequence's first key
        /// behind its left padding, and new rows follow the rows in use.
        ///
        /// ```
        /// use fa3::ndarray::{Array4, arr2};
        /// use fa3::{CachedAttention, Device, KvCache};
        ///
        /// let x = Array4::<f32>::ones((1, 9, 1, 64));
        /// let mut cache = KvCache::dense(x.clone(), x);
        /// cache.cache_seqlens = vec![7];
        /// // Two drafts after five tokens: each sees these and itself.
        /// let rows = arr2(&[[0, 5, 5, 6], [0, 5, 6, 7]]).into_shape_with_order((1, 1, 2, 4)).unwrap();
        /// let q = Array4::<f32>::zeros((1, 2, 1, 64));
        /// let output = CachedAttention::new(&q).intervals(&rows).forward(&Device::Cpu, &cache)?;
        /// assert_eq!(output.lse[[0, 0, 1]], 6_f32.ln());
        /// # Ok::<(), Box<dyn std::error::Error>>(())
        /// ```
        intervals(intervals: impl Into<ArrayView4<'a, i32>>) { intervals: Some(intervals.into()) }

        /// Adds the product of `qv`, of O's shape, and the cache's values to the scores, as
        /// [`Attention::qv`](crate::Attention::qv) does: V is the cache of latent vectors, K the cache of the rotated
        /// columns. A rotation of new rows and Q does not change `qv`.
        qv(qv: impl Into<ArrayView4<'a, T>>) { qv: Some(qv.into()) }
    }

    /// Computes O and LSE over the rows in use. A problem that the GPU's kernels do not take is an error; the CPU does
    /// not compute it instead.
    ///
    /// # Errors
    /// [`Error`] with the first violation.
    pub fn forward<'c, C: Scalar>(
        &self,
        device: &Device,
        cache: impl Into<CacheView<'c, C>>,
    ) -> Result<Output<T::Output>, Error> {
        let cache = cache.into();
        let call = self.checked(&cache, false)?;
        Ok(computed(&call.known, |results| self.compute(device, &cache, &call, results))?.0)
    }

    /// Computes O, LSE, and the largest score of each row, as
    /// [`Attention::forward_with_max_logits`](crate::Attention::forward_with_max_logits) does.
    ///
    /// # Errors
    /// The errors of [`CachedAttention::forward`].
    pub fn forward_with_max_logits<'c, C: Scalar>(
        &self,
        device: &Device,
        cache: impl Into<CacheView<'c, C>>,
    ) -> Result<(Output<T::Output>, Array3<f32>), Error> {
        let cache = cache.into();
        let call = self.checked(&cache, true)?;
        computed(&call.known, |results| self.compute(device, &cache, &call, results))
    }

    /// Computes O and LSE into existing arrays, which have the shapes of [`Output`] and any strides. All of their
    /// elements are written, unless there is an error.
    ///
    /// # Errors
    /// The errors of [`CachedAttention::forward`], and [`Error::OutputShape`].
    pub fn forward_into<'c, C: Scalar>(
        &self,
        device: &Device,
        cache: impl Into<CacheView<'c, C>>,
        o: ArrayViewMut4<'_, T::Output>,
        lse: ArrayViewMut3<'_, f32>,
    ) -> Result<(), Error> {
        let cache = cache.into();
        let call = self.checked(&cache, false)?;
        let results = Results::into(&call.known, o, lse)?;
        self.compute(device, &cache, &call, results)
    }

    /// Appends new rows, which then count as in use, and computes O and LSE. The cache is unchanged if there is an
    /// error.
    ///
    /// # Errors
    /// [`Error`] with the first violation.
    pub fn append_forward<'c, C: Scalar>(
        &self,
        device: &Device,
        cache: impl Into<CacheViewMut<'c, C>>,
        new: &NewRows<'_, T>,
    ) -> Result<Output<T::Output>, Error> {
        let mut cache = cache.into();
        let append = self.checked_append(&cache.view(), new, false)?;
        let compute =
            |results: Results<'_, T>| self.append_and_compute(device, &append, (&mut cache, new), results);
        Ok(computed(&append.call.known, compute)?.0)
    }

    /// Appends, and computes O, LSE, and the largest score of each row: see
    /// [`CachedAttention::forward_with_max_logits`].
    ///
    /// # Errors
    /// The errors of [`CachedAttention::append_forward`].
    pub fn append_forward_with_max_logits<'c, C: Scalar>(
        &self,
        device: &Device,
        cache: impl Into<CacheViewMut<'c, C>>,
        new: &NewRows<'_, T>,
    ) -> Result<(Output<T::Output>, Array3<f32>), Error> {
        let mut cache = cache.into();
        let append = self.checked_append(&cache.view(), new, true)?;
        computed(&append.call.known, |results: Results<'_, T>| {
            self.append_and_compute(device, &append, (&mut cache, new), results)
        })
    }

    /// Appends and computes into existing arrays: see [`CachedAttention::forward_into`].
    ///
    /// # Errors
    /// The errors of [`CachedAttention::append_forward`], and [`Error::OutputShape`].
    pub fn append_forward_into<'c, C: Scalar>(
        &self,
        device: &Device,
        cache: impl Into<CacheViewMut<'c, C>>,
        new: &NewRows<'_, T>,
        o: ArrayViewMut4<'_, T::Output>,
        lse: ArrayViewMut3<'_, f32>,
    ) -> Result<(), Error> {
        let mut cache = cache.into();
        let append = self.checked_append(&cache.view(), new, false)?;
        let results = Results::into(&append.call.known, o, lse)?;
        self.append_and_compute(device, &append, (&mut cache, new), results)
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn q(&self) -> ArrayView4<'a, T> {
        self.q
    }

    /// The part of Q that is multiplied by V, if any.
    #[cfg(feature = "cuda")]
    pub(crate) fn qv_view(&self) -> Option<ArrayView4<'a, T>> {
        self.qv
    }

    /// `cu_seqlens_q`, if Q is packed, and `seqused_q`, if given.
    #[cfg(feature = "cuda")]
    pub(crate) fn lists(&self) -> [Option<&'a [i32]>; 2] {
        [self.cu_seqlens_q, self.seqused_q]
    }

    /// The intervals of rows, if any.
    #[cfg(feature = "cuda")]
    pub(crate) fn interval_rows(&self) -> Option<ArrayView4<'a, i32>> {
        self.intervals
    }

    /// The scales of K and of V, if they are given.
    pub(crate) fn scales(&self) -> [Option<ArrayView2<'a, f32>>; 2] {
        [self.k_descale, self.v_descale]
    }

    /// The scales of the rows of K and of V, if they are given.
    #[cfg(feature = "cuda")]
    pub(crate) fn scales_of_tokens(&self) -> [Option<ArrayView4<'a, f32>>; 2] {
        self.token_scales.map_or([None; 2], |scales| scales.map(Some))
    }

    /// The sinks of query heads, if any.
    #[cfg(feature = "cuda")]
    pub(crate) fn sinks(&self) -> Option<ArrayView1<'a, f32>> {
        self.scores.sink
    }

    /// The function of scores, if any.
    #[cfg(feature = "cuda")]
    pub(crate) fn function(&self) -> Option<&ScoreFunction> {
        self.scores.function.as_ref()
    }

    /// Computes O and LSE of Q, which may have been rotated.
    fn on_cpu<C: Scalar>(
        &self,
        q: ArrayView4<'_, T>,
        cache: &CacheView<'_, C>,
        call: &Checked,
        results: Results<'_, T>,
    ) -> Result<(), Error> {
        let mut keys = Keys::new(&cache.k, &cache.v);
        (keys.scales, keys.pages) = (self.scales(), Some(&call.held.pages));
        keys.of_tokens =
            self.token_scales.as_ref().map(|[k, v]| TokenScales { factors: [k, v], round: rounded::<T> });
        let queries = Queries { q, qv: self.qv, sink: self.scores.sink };
        Ok(results.compute_on_cpu(&call.known, queries, keys)?)
    }

    /// Computes O and LSE of a validated call.
    fn compute<C: Scalar>(
        &self,
        device: &Device,
        cache: &CacheView<'_, C>,
        call: &Checked,
        results: Results<'_, T>,
    ) -> Result<(), Error> {
        match device {
            Device::Cpu => self.on_cpu(self.q, cache, call, results)?,
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => cuda::cached::forward(device, &call.problem, self, cache, results)?,
        }
        Ok(())
    }

    /// Appends new rows, and computes O and LSE.
    fn append_and_compute<C: Scalar>(
        &self,
        device: &Device,
        CheckedAppend { problem, appending, call }: &CheckedAppend<'_>,
        (cache, new): (&mut CacheViewMut<'_, C>, &NewRows<'_, T>),
        results: Results<'_, T>,
    ) -> Result<(), Error> {
        match device {
            Device::Cpu => {
                cpu::KNOWN.check(&call.known)?; // before the cache is written
                appending.write(new, self.scales(), cache);
                let rotated =
                    problem.append().queries().zip(appending.rotation.as_ref()).map(|(queries, rotation)| {
                        rotation.rotated(self.q, call.known.rows_q(), queries.positions)
                    });
                let q = rotated.as_ref().map_or(self.q, |rotated| rotated.view());
                self.on_cpu(q, &cache.view(), call, results)?;
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => {
                cuda::cached::append_forward(device, problem, self, cache, new, results)?;
                appending.count_in(cache);
            }
        }
        Ok(())
    }
}

/// The nearest number of type `T`.
fn rounded<T: Scalar>(number: f32) -> f32 {
    T::from_f32(number).to_f32()
}
