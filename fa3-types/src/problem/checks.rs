//! Checks of the properties that the parts of a problem have in common.

use super::HEAD_DIM_LIMIT;
use crate::{Dim, Dtype, ProblemError, Sequences, Shape, TensorDesc, TensorName};

/// Checks that Q, K and V have one type, or that Q has 16 bits and K and V are e4m3, or that V is e4m3 and Q and K are
/// bf16, or that Q has 16 bits and K and V are int8, whose tokens have scales.
pub(super) fn check_dtypes([q, k, v, o]: [Dtype; 4], token_scales: bool) -> Result<(), ProblemError> {
    let may_convert = matches!(q, Dtype::F16 | Dtype::Bf16);
    if [q, k, v].contains(&Dtype::Int8) && !(may_convert && [k, v] == [Dtype::Int8; 2] && token_scales) {
        return Err(ProblemError::Int8 { q, k, v, token_scales });
    }
    match [k, v].map(|dtype| may_convert && dtype == Dtype::E4m3) {
        [true, true] => {}
        _ if k == Dtype::Int8 => {}
        [false, true] if [q, k] == [Dtype::Bf16; 2] => {}
        [false, false] => {
            for (tensor, given) in [(TensorName::K, k), (TensorName::V, v)] {
                if given != q {
                    return Err(ProblemError::DtypeMismatch { tensor, given, expected: q });
                }
            }
        }
        _ => return Err(ProblemError::KeysAndValues { k, v }),
    }
    if !q.may_output(o) {
        return Err(ProblemError::OutputDtype { given: o, input: q });
    }
    Ok(())
}

pub(super) fn check_shapes(q: Shape, k: Shape, v: Shape, o: Shape) -> Result<(), ProblemError> {
    k.check(TensorName::K, Shape { head_dim: q.head_dim, ..k })?;
    v.check(TensorName::V, Shape { head_dim: v.head_dim, ..k })?;
    o.check(TensorName::O, Shape { head_dim: v.head_dim, ..q })
}

/// Checks that `qv` has the type of Q, which is not e4m3, and the shape of O.
pub(super) fn check_qv(qv: &TensorDesc, q: &TensorDesc, o: Shape) -> Result<(), ProblemError> {
    let tensor = TensorName::Qv;
    if q.dtype == Dtype::E4m3 {
        return Err(ProblemError::LatentDtype { given: q.dtype });
    }
    if qv.dtype != q.dtype {
        return Err(ProblemError::DtypeMismatch { tensor, given: qv.dtype, expected: q.dtype });
    }
    qv.shape.check(tensor, o)?;
    let (head_dim, head_dim_v) = (q.shape.head_dim, o.head_dim);
    if head_dim + head_dim_v > HEAD_DIM_LIMIT {
        return Err(ProblemError::LatentHeadDim { head_dim, head_dim_v, limit: HEAD_DIM_LIMIT });
    }
    Ok(())
}

pub(crate) fn check_sequences(
    tensor: TensorName,
    desc: &TensorDesc,
    seqs: Sequences,
) -> Result<(), ProblemError> {
    let Shape { batch, seqlen, .. } = desc.shape;
    if tensor == TensorName::Q && seqs.is_cache() {
        return Err(ProblemError::CachedQueries);
    }
    if let Some(pages) = seqs.pages() {
        // The cache may have any number of pages; the table assigns them to sequences.
        let (given, limit) = (seqs.capacity(seqlen), i32::MAX as usize);
        if given > limit {
            return Err(ProblemError::PagesTooMany { pages, rows: seqlen, limit });
        }
        // The limit holds for the table's entries and row stride, and for its number of rows even where rows are empty.
        let (stride, entries) = seqs.table_entries().unwrap_or_default();
        let entries = entries.max(stride).max(seqs.table_rows().unwrap_or(0));
        return if entries > limit { Err(ProblemError::TableTooLarge { entries, limit }) } else { Ok(()) };
    }
    if let Some((keys, stride)) = seqs.list() {
        let (entries, limit, rows) = (keys.max(stride), i32::MAX as usize, batch.saturating_mul(seqlen));
        if entries > limit {
            return Err(ProblemError::ListTooLong { tensor, entries, limit });
        }
        return if rows > limit { Err(ProblemError::ListedRows { tensor, rows }) } else { Ok(()) };
    }
    if seqs.is_packed() && seqs.has_leftpad() {
        return Err(ProblemError::PackedLeftpad);
    }
    let expected = if seqs.is_packed() { 1 } else { seqs.count() };
    if batch != expected {
        return Err(ProblemError::DimMismatch { tensor, dim: Dim::Batch, given: batch, expected });
    }
    match seqs.seqlen() {
        Some(expected) if expected != seqlen => {
            Err(ProblemError::DimMismatch { tensor, dim: Dim::Seqlen, given: seqlen, expected })
        }
        _ => Ok(()),
    }
}

/// Checks that Q has as many sequences as K. For two batches the error names the batch dimension.
pub(super) fn check_counts(q: Sequences, k: Sequences) -> Result<(), ProblemError> {
    match (q.count(), k.count()) {
        (q, k) if q == k => Ok(()),
        (expected, given) if !q.is_packed() && !k.is_packed() && k.list().is_none() => {
            Err(ProblemError::DimMismatch { tensor: TensorName::K, dim: Dim::Batch, given, expected })
        }
        (q, k) => Err(ProblemError::SequenceCount { q, k }),
    }
}
