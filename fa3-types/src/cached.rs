//! Attention over a cache to which new keys and values are appended first.

use crate::{
    AppendProblem, AppendProblemError, AppendRotary, AppendSpec, AppendedRows, Problem, ProblemError,
    ProblemSpec, QueryPositions, RotatedQueries, Sequences, TensorDesc,
};

/// A caller's request, not yet checked: attention over a cache, and the rows that are appended first. Before the call
/// the cache holds `seqused_k` rows of each sequence; the new rows follow them.
///
/// ```
/// use fa3_types::{CachedSpec, Dtype, ProblemSpec, Sequences, Shape, TensorDesc};
///
/// // One new token for each of 4 sequences. The cache has room for 1024 rows of each.
/// let q = Shape { batch: 4, seqlen: 1, heads: 8, head_dim: 128 };
/// let cache = Shape { seqlen: 1024, heads: 2, ..q };
/// let attention = ProblemSpec::dense(Dtype::Bf16, q, cache).seqs_k(Sequences::dense(4, 1024).used());
/// let new = TensorDesc::contiguous(Dtype::Bf16, Shape { heads: 2, ..q });
/// let problem = CachedSpec::new(attention, [new, new], Sequences::dense(4, 1)).validate()?;
/// assert_eq!((problem.append().capacity(), problem.attention().longest().k), (1024, 1024));
/// # Ok::<(), fa3_types::CachedProblemError>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CachedSpec {
    /// The attention. K and V are the cache, with `seqused`, and Q is not rotated yet.
    pub attention: ProblemSpec,
    /// New keys and values, of Q's type, or e4m3 if the cache is. Only the CPU appends f32.
    pub new: [TensorDesc; 2],
    /// The sequences of the new rows: dense, or packed by `cu_seqlens_k_new`.
    pub sequences: Sequences,
    /// The rotation of new keys and of Q, if any.
    pub rotary: Option<AppendRotary>,
}

impl CachedSpec {
    /// Appends new rows without a rotation.
    pub fn new(attention: ProblemSpec, new: [TensorDesc; 2], sequences: Sequences) -> CachedSpec {
        CachedSpec { attention, new, sequences, rotary: None }
    }

    /// Rotates new keys and Q.
    #[must_use]
    pub fn rotary(self, rotary: AppendRotary) -> CachedSpec {
        CachedSpec { rotary: Some(rotary), ..self }
    }

    /// Calls [`CachedProblem::new`].
    ///
    /// # Errors
    /// [`CachedProblemError`].
    pub fn validate(self) -> Result<CachedProblem, CachedProblemError> {
        CachedProblem::new(self)
    }
}

/// Everything that [`CachedProblem::new`] rejects.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CachedProblemError {
    /// The attention is invalid.
    #[error(transparent)]
    Attention(#[from] ProblemError),
    /// Rows cannot be appended.
    #[error(transparent)]
    Append(#[from] AppendProblemError),
}

/// Attention over a cache with new rows: an append, and attention with the lengths afterwards.
#[derive(Clone, Debug)]
pub struct CachedProblem {
    append: AppendProblem,
    attention: Problem,
}

impl CachedProblem {
    /// Validates `spec`.
    ///
    /// # Errors
    /// The first violation found, with its numbers.
    pub fn new(spec: CachedSpec) -> Result<CachedProblem, CachedProblemError> {
        let CachedSpec { mut attention, new: [k_new, v_new], sequences: new, rotary } = spec;
        // The attention is checked first, because its errors name all tensors.
        attention.clone().validate()?;
        if attention.token_scales.is_some() {
            return Err(AppendProblemError::TokenScales.into());
        }
        let (k_cache, v_cache, cache) = (attention.k, attention.v, attention.seqs_k);
        let mut append = AppendSpec::new(AppendedRows { k_new, v_new, new, k_cache, v_cache, cache });
        if let Some(rotary) = rotary {
            let (q, sequences) = (attention.q, attention.seqs_q);
            let positions = QueryPositions::under(attention.mask.clone()?);
            append = append.rotary(rotary).queries(RotatedQueries { q, sequences, positions });
            attention.q = TensorDesc::contiguous(q.dtype, q.shape);
        }
        Ok(CachedProblem { append: append.validate()?, attention: attention.validate()? })
    }

    /// The new rows and the rotation.
    pub fn append(&self) -> &AppendProblem {
        &self.append
    }

    /// The attention after the append, of rotated queries.
    pub fn attention(&self) -> &Problem {
        &self.attention
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dtype, RopeStyle, SequenceBase, Shape, TokenScales};

    fn spec() -> CachedSpec {
        let q = Shape { batch: 2, seqlen: 3, heads: 4, head_dim: 64 };
        let cache = Shape { seqlen: 50, heads: 2, ..q };
        let mut attention = ProblemSpec::dense(Dtype::F16, q, cache).seqs_k(Sequences::dense(2, 50).used());
        attention.q.strides.seqlen *= 2;
        attention.q.strides.batch *= 2;
        let new = TensorDesc::contiguous(Dtype::F16, Shape { heads: 2, ..q });
        CachedSpec::new(attention, [new, new], Sequences::dense(2, 3))
    }

    #[test]
    fn attention_is_of_rotated_queries() {
        let rotary = AppendRotary {
            style: RopeStyle::Interleaved,
            rotary_dim: 32,
            table: Dtype::F32,
            table_rows: 10,
            base: SequenceBase::Used,
        };
        let plain = spec().validate().unwrap();
        assert_eq!(*plain.attention().q(), spec().attention.q);
        assert!(plain.append().queries().is_none());
        let mut causal = spec().rotary(rotary);
        causal.attention = causal.attention.causal();
        let positions = [(spec().rotary(rotary), QueryPositions::First), (causal, QueryPositions::Each)];
        for (spec, positions) in positions {
            let problem = spec.validate().unwrap();
            assert_eq!(Some(*problem.attention().q()), problem.append().q_rotated());
            assert_eq!(problem.append().queries().unwrap().positions, positions);
        }
    }

    #[test]
    fn both_parts_are_checked() {
        let mut odd = spec();
        odd.attention.q.shape.heads = 3;
        assert!(matches!(odd.validate(), Err(CachedProblemError::Attention(_))));
        let mut full = spec();
        full.attention.seqs_k = Sequences::dense(2, 50);
        assert_eq!(full.validate().unwrap_err(), AppendProblemError::Unused.into());
        let mut scaled = spec();
        let scales = TokenScales::contiguous(scaled.attention.k.shape);
        scaled.attention = scaled.attention.e4m3_keys().token_scales(scales);
        assert_eq!(scaled.validate().unwrap_err(), AppendProblemError::TokenScales.into());
    }
}
