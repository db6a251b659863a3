//! Attention over listed rows of a cache (sparse attention).

use std::num::NonZeroU32;

use fa3_types::{
    ExtraCache, KnownProblem, LseForm, Mask, Problem, ProblemSpec, SequenceRows, Sequences, Shape, TensorDesc,
};
use ndarray::{Array3, ArrayView1, ArrayView2, ArrayView4, ArrayViewMut3, ArrayViewMut4, Axis};

use crate::attention::contiguous;
use crate::cpu::keys::{Keys, ListedRows, Pages};
use crate::cpu::queries::Queries;
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::results::{Results, computed};
use crate::scores::{Scores, score_setters};
use crate::{CacheError, Device, Error, Output, Scalar};

/// A cache of keys and values, and a list of its rows for each sequence.
///
/// Row r of the cache is row r mod page_rows of page r / page_rows. An index that is no row, such as -1, is no key,
/// wherever in the list it is. A row that is listed twice counts twice.
#[derive(Clone, Copy, Debug)]
pub struct ListedCache<'a, T> {
    /// Keys (pages, page_rows, heads_kv, head_dim).
    pub k: ArrayView4<'a, T>,
    /// Values, of the shape of the keys, but with head_dim_v.
    pub v: ArrayView4<'a, T>,
    /// The lists (sequences, entries).
    pub indices: ArrayView2<'a, i32>,
    /// Number of first entries of each list that count, clamped to the list's entries; all entries if `None`.
    pub lengths: Option<&'a [i32]>,
}

/// Attention of queries over the rows of a cache that a list names: a builder. Each sequence of Q (batch, seqlen_q,
/// heads_q, head_dim) has a list. In sparse latent attention, where an indexer chooses the keys of each token, a
/// sequence is one token. There are no masks and no gradients.
///
/// ```
/// use fa3::ndarray::{Array4, arr2};
/// use fa3::{Device, ListedCache, SparseAttention};
///
/// // Two tokens of 4 heads choose rows of a cache of 3 pages of 16 rows.
/// let cache = Array4::from_shape_fn((3, 16, 1, 64), |(page, row, ..)| (16 * page + row) as f32);
/// let indices = arr2(&[[40, -1, 2], [7, 7, 1]]);
/// let cache = ListedCache { k: cache.view(), v: cache.view(), indices: indices.view(), lengths: Some(&[3, 1]) };
/// let q = Array4::zeros((2, 1, 4, 64));
/// let output = SparseAttention::new(&q, cache).forward(&Device::Cpu)?;
/// // The first token sees rows 40 and 2, the second one row 7.
/// assert_eq!([output.o[[0, 0, 0, 0]], output.o[[1, 0, 0, 0]]], [21.0, 7.0]);
/// # Ok::<(), fa3::Error>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "nothing is computed before `forward`"]
pub struct SparseAttention<'a, T> {
    q: ArrayView4<'a, T>,
    qv: Option<ArrayView4<'a, T>>,
    cache: ListedCache<'a, T>,
    extra: Option<ListedCache<'a, T>>,
    scores: Scores<'a>,
}

impl<'a, T: Scalar> SparseAttention<'a, T> {
    /// Attention over the listed keys, scaled by 1/√head_dim, for queries in an array or a view.
    pub fn new(q: impl Into<ArrayView4<'a, T>>, cache: ListedCache<'a, T>) -> SparseAttention<'a, T> {
        SparseAttention { q: q.into(), qv: None, cache, extra: None, scores: Scores::new() }
    }

    score_setters! {
        /// Hides keys. Lists exclude masks: the call is refused when it is computed.
        mask;

        /// Gives each query head a sink (heads_q), as [`Attention::sink`](crate::Attention::sink) does.
        sink;
    }

    fa3_types::setters! {
        /// Adds a second cache, whose listed rows follow the listed rows of the first one.
        extra(cache: ListedCache<'a, T>) { extra: Some(cache) }

        /// Adds the product of `qv`, of O's shape, and the values to the scores, as
        /// [`Attention::qv`](crate::Attention::qv) does.
        qv(qv: impl Into<ArrayView4<'a, T>>) { qv: Some(qv.into()) }
    }

    /// The validated problem, with contiguous tensors.
    ///
    /// # Errors
    /// [`Error`] with the first violation.
    pub fn problem(&self) -> Result<Problem, Error> {
        self.problem_of(false)
    }

    /// The problem, whose results may have the largest scores.
    fn problem_of(&self, max_logits: bool) -> Result<Problem, Error> {
        let (q, k, v) = (contiguous(&self.q), contiguous(&self.cache.k), contiguous(&self.cache.v));
        let o = TensorDesc::contiguous(T::Output::DTYPE, Shape { head_dim: v.shape.head_dim, ..q.shape });
        let mut spec = ProblemSpec::new(q, k, v, o).seqs_k(self.cache.sequences()?);
        (spec.qv, spec.max_logits) = (self.qv.as_ref().map(contiguous), max_logits);
        if let Some(extra) = &self.extra {
            let (k, v) = (contiguous(&extra.k), contiguous(&extra.v));
            spec = spec.extra(ExtraCache { k, v, sequences: extra.sequences()? });
        }
        Ok(self.scores.given_to(spec, [Some(false), None])?.validate()?)
    }

    /// Computes O and LSE. A problem that the GPU's kernels do not take is an error; the CPU does not compute it
    /// instead.
    ///
    /// # Errors
    /// [`Error`] with the first violation.
    pub fn forward(&self, device: &Device) -> Result<Output<T::Output>, Error> {
        let problem = self.problem()?;
        Ok(computed(&problem, |results| self.compute(device, &problem, results))?.0)
    }

    /// Computes O, LSE, and the largest score of each row, of LSE's shape: scaled and capped, without the sink, and
    /// -inf for a row that sees no key.
    ///
    /// # Errors
    /// The errors of [`SparseAttention::forward`].
    pub fn forward_with_max_logits(
        &self,
        device: &Device,
    ) -> Result<(Output<T::Output>, Array3<f32>), Error> {
        let problem = self.problem_of(true)?;
        computed(&problem, |results| self.compute(device, &problem, results))
    }

    /// Computes O and LSE into existing arrays, which have the shapes of [`Output`] and any strides. All of their
    /// elements are written, unless there is an error.
    ///
    /// # Errors
    /// The errors of [`SparseAttention::forward`], and [`Error::OutputShape`].
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

    fn compute(&self, device: &Device, problem: &Problem, results: Results<'_, T>) -> Result<(), Error> {
        let queries = Queries { q: self.q, qv: self.qv, sink: self.scores.sink };
        match device {
            Device::Cpu => {
                let (known, pages) = self.gathered(problem)?;
                let rows = |of: fn(&ListedCache<'a, T>) -> ArrayView4<'a, T>| {
                    ListedRows([Some(of(&self.cache)), self.extra.as_ref().map(of)])
                };
                let (k, v) = (rows(|cache| cache.k), rows(|cache| cache.v));
                let mut keys = Keys::new(&k, &v);
                keys.pages = Some(&pages);
                results.compute_on_cpu(&known, queries, keys)?;
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => {
                let caches = (&self.cache, self.extra.as_ref());
                cuda::sparse::forward(device, problem, queries, caches, results)?;
            }
        }
        Ok(())
    }

    /// The problem of gathered keys, and the rows of the caches that are the keys of each sequence.
    fn gathered(&self, problem: &Problem) -> Result<(KnownProblem, Pages), Error> {
        let count = problem.batch();
        let (mut entries, mut starts, mut used) = (vec![], vec![0], vec![]);
        for sequence in 0..count {
            entries.extend(self.cache.keys(sequence));
            if let Some(extra) = &self.extra {
                entries.extend(extra.keys(sequence).map(|row| self.cache.rows() + row));
            }
            used.push((entries.len() - starts[sequence]) as i32);
            starts.push(entries.len());
        }
        let spec = problem.gathered().spec();
        let rows = SequenceRows::dense(count, spec.k.shape.seqlen).with_used(&used)?;
        // Even if all rows are in use, the lengths are data.
        let known = spec
            .seqs_k(rows.sequences())
            .with_rows(SequenceRows::dense(count, self.q.len_of(Axis(1))), rows)?;
        Ok((known, Pages { entries, starts, first: vec![0; count] }))
    }
}

impl<T> ListedCache<'_, T> {
    /// Number of rows.
    fn rows(&self) -> usize {
        self.k.len_of(Axis(0)) * self.k.len_of(Axis(1))
    }

    /// The rows that are keys of a sequence, in order.
    fn keys(&self, sequence: usize) -> impl Iterator<Item = usize> {
        let (rows, entries) = (self.rows(), self.indices.index_axis(Axis(0), sequence));
        let length = self.lengths.map_or(entries.len(), |lengths| lengths[sequence].max(0) as usize);
        let is_key = move |&entry: &i32| usize::try_from(entry).ok().filter(|&row| row < rows);
        entries.into_iter().take(length).filter_map(is_key)
    }

    /// The lists of sequences, as planning knows them.
    fn sequences(&self) -> Result<Sequences, CacheError> {
        let (sequences, keys) = self.indices.dim();
        let listed = Sequences::listed(sequences, keys);
        match self.lengths.map(<[i32]>::len) {
            None => Ok(listed),
            Some(given) if given == sequences => Ok(listed.used()),
            Some(given) => Err(CacheError::Count { list: "lengths", given, sequences }),
        }
    }
}
