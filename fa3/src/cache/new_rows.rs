//! Rows that are appended to a cache.

use fa3_types::{AppendRotary, Dtype, ProblemError, SequenceBase, SequenceRows, TensorName};
use ndarray::ArrayView4;

use super::CacheError;
use super::check_count;
use crate::{Error, RopeTable, Scalar};

/// New keys and values, which [`CachedAttention::append_forward`] appends to the rows in use of each sequence of a
/// cache. It is a builder.
///
/// K is (batch, seqlen_new, heads_kv, head_dim), V (batch, seqlen_new, heads_kv, head_dim_v), of f16, bf16 or e4m3, or
/// on the CPU of f32. Rows are multiples of 16 bytes. Any strides are allowed. Rows of e4m3 are not rotated. The cache
/// has the type of the new rows, or it is e4m3 and the rows are f16 or bf16.
///
/// [`CachedAttention::append_forward`]: crate::CachedAttention::append_forward
#[derive(Clone, Debug)]
#[must_use = "nothing is appended before `append_forward`"]
pub struct NewRows<'a, T> {
    pub(super) k: ArrayView4<'a, T>,
    pub(super) v: ArrayView4<'a, T>,
    cu_seqlens: Option<&'a [i32]>,
    table: Option<&'a RopeTable>,
    rotary_seqlens: Option<&'a [i32]>,
}

/// A rotation of new keys and of queries, and the position of each sequence's first row.
pub(crate) struct Rotation<'a> {
    pub(crate) table: &'a RopeTable,
    pub(crate) base: Vec<usize>,
}

impl<'a, T: Scalar> NewRows<'a, T> {
    /// New keys and values without a rotation, from arrays or views.
    pub fn new(k: impl Into<ArrayView4<'a, T>>, v: impl Into<ArrayView4<'a, T>>) -> NewRows<'a, T> {
        NewRows { k: k.into(), v: v.into(), cu_seqlens: None, table: None, rotary_seqlens: None }
    }

    fa3_types::setters! {
        /// Rotates new keys and Q by these tables, which are FlashAttention-3's `rotary_cos` and `rotary_sin`. The
        /// tables' style says whether pairs are interleaved. A new row's position is its row in the cache. The first
        /// row of Q has the position of the sequence's first new row. The other rows of Q follow if the mask is causal
        /// or has a window; otherwise all have this position.
        rotary(table: &'a RopeTable) { table: Some(table) }

        /// Sets the position of each sequence's first new row and first row of Q, in place of the number of rows in use
        /// before. A cache with `cache_leftpad` needs this list if positions are to count from a sequence's first row.
        rotary_seqlens(seqlens: &'a [i32]) { rotary_seqlens: Some(seqlens) }

        /// Takes K and V as packed, with batch 1: new rows of sequence i are rows `cu_seqlens[i] .. cu_seqlens[i + 1]`.
        cu_seqlens_k_new(cu_seqlens: &'a [i32]) { cu_seqlens: Some(cu_seqlens) }
    }

    /// `cu_seqlens_k_new`, if the new rows are packed.
    #[cfg(feature = "cuda")]
    pub(crate) fn packed(&self) -> Option<&'a [i32]> {
        self.cu_seqlens
    }

    /// The tables of the rotation, if any.
    #[cfg(feature = "cuda")]
    pub(crate) fn table(&self) -> Option<&'a RopeTable> {
        self.table
    }

    /// The list of positions, if any.
    #[cfg(feature = "cuda")]
    pub(crate) fn listed(&self) -> Option<&'a [i32]> {
        self.rotary_seqlens
    }

    pub(crate) fn tensors(&self) -> [ArrayView4<'a, T>; 2] {
        [self.k, self.v]
    }

    /// The rows of each sequence.
    ///
    /// # Errors
    /// [`Error::SequencesOfNewRows`] if a list is invalid, or reaches past the rows.
    pub fn rows(&self) -> Result<SequenceRows, Error> {
        let (batch, seqlen, ..) = self.k.dim();
        let rows = SequenceRows::listed(batch, seqlen, self.cu_seqlens, None);
        let rows = rows.map_err(Error::SequencesOfNewRows)?;
        match rows.end() {
            given if given > seqlen => {
                let tensor = TensorName::KNew;
                Err(Error::SequencesOfNewRows(ProblemError::CuSeqlensEnd { tensor, given, rows: seqlen }))
            }
            _ => Ok(rows),
        }
    }

    /// The rotation as a part of a problem.
    ///
    /// # Errors
    /// Positions were given without a rotation.
    pub(super) fn rotary_spec(&self) -> Result<Option<AppendRotary>, Error> {
        let base = match (self.rotary_seqlens, self.table) {
            (Some(_), None) => return Err(Error::PositionsWithoutRotary),
            (Some(_), Some(_)) => SequenceBase::Listed,
            (None, _) => SequenceBase::Used,
        };
        Ok(self.table.map(|table| AppendRotary {
            style: table.style(),
            rotary_dim: table.rotary_dim(),
            table: Dtype::F32,
            table_rows: table.positions(),
            base,
        }))
    }

    /// The rotation of sequences that have `used` rows before the append.
    ///
    /// # Errors
    /// An invalid list.
    pub(super) fn rotation(&self, used: &[usize]) -> Result<Option<Rotation<'a>>, CacheError> {
        let Some(table) = self.table else { return Ok(None) };
        let Some(listed) = self.rotary_seqlens else {
            return Ok(Some(Rotation { table, base: used.to_vec() }));
        };
        check_count("rotary_seqlens", listed.len(), used.len())?;
        let checked = |(sequence, &given): (usize, &i32)| {
            usize::try_from(given).map_err(|_| CacheError::RotarySeqlen { sequence, given })
        };
        let base = listed.iter().enumerate().map(checked).collect::<Result<_, _>>()?;
        Ok(Some(Rotation { table, base }))
    }
}
