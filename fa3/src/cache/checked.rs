//! Validated calls over a cache.

use fa3_types::{
    CachedProblem, CachedSpec, Dtype, Intervals, KnownProblem, Mask, Problem, ProblemSpec, SequenceRows,
    Shape, TensorDesc, TokenScales,
};
use ndarray::Axis;

use super::append::Appending;
use super::{CacheError, CacheView, CachedAttention, Held, NewRows};
use crate::attention::contiguous;
use crate::{Error, Scalar};

impl<T: Scalar> CachedAttention<'_, T> {
    /// The validated call.
    pub(super) fn checked<C: Scalar>(
        &self,
        cache: &CacheView<'_, C>,
        max_logits: bool,
    ) -> Result<Checked, Error> {
        let (held, rows) = (cache.held(|_| 0)?, self.rows()?);
        let problem = self.spec(cache, &rows, held.lens.iter().copied().max(), max_logits)?.validate()?;
        self.check_scales(cache)?;
        self.known(problem, rows, held)
    }

    /// The validated call after an append of new rows.
    pub(super) fn checked_append<'n, C: Scalar>(
        &self,
        cache: &CacheView<'_, C>,
        new: &NewRows<'n, T>,
        max_logits: bool,
    ) -> Result<CheckedAppend<'n>, Error> {
        let (rows, rows_new) = (self.rows()?, new.rows()?);
        let problem = self.cached_problem(cache, &rows, (new, &rows_new), max_logits)?;
        self.check_scales(cache)?;
        // Validation has checked that the cache and the new rows have the same number of sequences.
        let appending = Appending::new(cache, new, rows_new)?;
        if let Some((queries, rotation)) = problem.append().queries().zip(appending.rotation.as_ref()) {
            rotation.check(&rows, queries.positions)?;
        }
        let call = self.known(problem.attention().clone(), rows, appending.held_after())?;
        Ok(CheckedAppend { problem, appending, call })
    }

    /// The rows of each sequence of Q.
    fn rows(&self) -> Result<SequenceRows, Error> {
        let (batch, seqlen, ..) = self.q.dim();
        let rows = SequenceRows::listed(batch, seqlen, self.cu_seqlens_q, self.seqused_q);
        rows.map_err(Error::SequencesOfQ)
    }

    /// Checks that the scales have the sequences and heads of an e4m3 cache.
    fn check_scales<C: Scalar>(&self, cache: &CacheView<'_, C>) -> Result<(), CacheError> {
        if self.token_scales.is_some() && self.scales() != [None; 2] {
            return Err(CacheError::ScaledTwice);
        }
        let expected = [cache.count(), cache.k.len_of(Axis(2))];
        for (list, scales) in ["k_descale", "v_descale"].into_iter().zip(&self.scales()) {
            let Some(given) = scales.as_ref().map(|scales| scales.shape()) else { continue };
            if C::DTYPE != Dtype::E4m3 {
                return Err(CacheError::ScaledDtype { given: C::DTYPE });
            }
            if given != expected {
                return Err(CacheError::Scales { list, given: given.to_vec(), expected });
            }
        }
        Ok(())
    }

    /// The problem of attention over a cache, with contiguous tensors. `longest` estimates the longest sequence, if
    /// known. Its results may have the largest scores.
    fn spec<C: Scalar>(
        &self,
        cache: &CacheView<'_, C>,
        rows: &SequenceRows,
        longest: Option<usize>,
        max_logits: bool,
    ) -> Result<ProblemSpec, Error> {
        let (q, k, v) = (contiguous(&self.q), contiguous(&cache.k), contiguous(&cache.v));
        let o = TensorDesc::contiguous(T::Output::DTYPE, Shape { head_dim: v.shape.head_dim, ..q.shape });
        let (seqs_q, seqs_k) = (rows.sequences(), cache.sequences(longest.unwrap_or(0)));
        let mut spec = ProblemSpec::new(q, k, v, o).seqs_q(seqs_q).seqs_k(seqs_k);
        spec.token_scales =
            self.token_scales.as_ref().map(|[k, v]| TokenScales { k: contiguous(k), v: contiguous(v) });
        (spec.qv, spec.max_logits) = (self.qv.as_ref().map(contiguous), max_logits);
        if let Some(intervals) = &self.intervals {
            spec = spec.mask(Mask::of_intervals(Intervals::of_shape(intervals.dim().into(), q.shape)?));
        }
        self.scores.given_to(spec, [Some(self.seqused_q.is_some()), None])
    }

    /// The problem of attention over a cache with an append first.
    fn cached_problem<C: Scalar>(
        &self,
        cache: &CacheView<'_, C>,
        rows: &SequenceRows,
        (new, rows_new): (&NewRows<'_, T>, &SequenceRows),
        max_logits: bool,
    ) -> Result<CachedProblem, Error> {
        let longest = cache.cache_seqlens.iter().map(|&used| used.max(0) as usize).max();
        let longest = longest.map(|longest| longest + rows_new.max_len());
        let attention = self.spec(cache, rows, longest, max_logits)?;
        let descs = new.tensors().map(|x| contiguous(&x));
        let mut spec = CachedSpec::new(attention, descs, rows_new.sequences());
        spec.rotary = new.rotary_spec()?;
        Ok(spec.validate()?)
    }

    /// The call over sequences of contiguous rows, with host-side lengths.
    fn known(&self, problem: Problem, rows_q: SequenceRows, held: Held) -> Result<Checked, Error> {
        let rows_k = held.rows(rows_q.is_packed())?;
        let gathered = |x: &TensorDesc| {
            let batch = if rows_k.is_packed() { 1 } else { rows_k.count() };
            TensorDesc::contiguous(x.dtype, Shape { batch, seqlen: rows_k.end(), ..x.shape })
        };
        let mut spec = problem.spec();
        spec.score = None;
        (spec.k, spec.v) = (gathered(&spec.k), gathered(&spec.v));
        spec.token_scales = spec.token_scales.map(|_| TokenScales::contiguous(spec.k.shape));
        (spec.seqs_q, spec.seqs_k) = (rows_q.sequences(), rows_k.sequences());
        let known = match &self.intervals {
            None => KnownProblem::new(spec.validate()?, rows_q, rows_k)?,
            Some(intervals) => {
                let bounds = Vec::from_iter(intervals.iter().copied());
                KnownProblem::with_intervals(spec.validate()?, rows_q, rows_k, bounds)?
            }
        };
        Ok(Checked { problem, known: self.scores.known(known), held })
    }
}

/// A validated call.
pub(super) struct Checked {
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only a GPU plans it"))]
    pub(super) problem: Problem,
    /// The problem over sequences of contiguous rows, with host-side lengths.
    pub(super) known: KnownProblem,
    /// The rows of the cache.
    pub(super) held: Held,
}

/// A validated call after an append.
pub(super) struct CheckedAppend<'n> {
    pub(super) problem: CachedProblem,
    pub(super) appending: Appending<'n>,
    pub(super) call: Checked,
}
