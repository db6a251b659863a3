//! Arguments as they come from Python.

use fa3::problem::hint;
use fa3_types::{
    AppendRotary, Dtype, Partials, Positions, QkRotary, RopeStyle, Rotary, SequenceBase, Sequences, Shape,
    Strides, TensorDesc,
};
use pyo3::exceptions::{PyOverflowError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::error::Error;

/// (dtype, address, shape, strides) of a tensor with four dimensions.
pub(crate) type Tensor<'py> = (Bound<'py, PyString>, u64, Four<usize>, Four<i64>);

/// (dtype, address, shape, strides) of a tensor with five dimensions, the first of them of parts.
pub(crate) type Parts<'py> = (Bound<'py, PyString>, u64, Five<usize>, Five<i64>);

/// Numbers of five dimensions.
pub(crate) type Five<T> = (T, T, T, T, T);

/// Numbers of four dimensions.
pub(crate) type Four<T> = (T, T, T, T);

/// (address, shape) of intervals of keys, contiguous int32.
pub(crate) type Intervals = (u64, Four<usize>);

/// (left, right, chunk): how many keys a query sees to the left and to the right of its position, -1 being unbounded,
/// and how many keys a chunk has, 0 being none.
pub(crate) type Window = (Number<i64>, Number<i64>, Number<i64>);

/// (v_transposed, rows of Q that share a scale, dtype of O).
pub(crate) type Fp8<'py> = (bool, Option<usize>, Option<Bound<'py, PyString>>);

/// (sequences, cu_seqlens, seqused, longest): how many sequences there are, and of Q and of K and V the address of
/// cu_seqlens, that of seqused if there is one, and a hint of the longest sequence's rows if there is one.
pub(crate) type Packed = (usize, (u64, u64), (Option<u64>, Option<u64>), (Hint, Hint));

/// (sequences, cu_seqlens_q, seqused, leftpad_k, page_table, longest): how many sequences there are, and the addresses
/// of the lists that there are. Pairs are of Q and of K and V.
pub(crate) type Cache =
    (usize, Option<u64>, (Option<u64>, Option<u64>), Option<u64>, Option<PageTable>, (Hint, Hint));

/// (table, pages, stride, index): the address of a page table, its pages a sequence, how many entries a row is behind
/// the one before, and, if an index says which row of the table is each sequence's, the index's address and how many
/// rows the table has.
pub(crate) type PageTable = (u64, usize, usize, Option<(u64, usize)>);

/// (k_new, v_new, cu_seqlens_k_new, rotation): new rows of a cache.
pub(crate) type NewRows<'py> = (Tensor<'py>, Tensor<'py>, Option<u64>, Option<AppendRotation<'py>>);

/// (dtype of the tables, cos, sin, table_rows, rotary_dim, interleaved, rotary_seqlens), with addresses.
pub(crate) type AppendRotation<'py> = (Bound<'py, PyString>, u64, u64, usize, usize, bool, Option<u64>);

/// A number that decides how a call is computed. One that makes no sense is as good as none.
pub(crate) type Hint = Option<Number<i64>>;

/// (cos, sin, table_rows, rotary_dim, interleaved, positions, first_position). cos, sin and positions are addresses.
/// The first position counts if there are no positions.
pub(crate) type Rotation = (u64, u64, usize, usize, bool, Option<u64>, Number<usize>);

/// (cos, sin, table_rows, rotary_dim, interleaved, q_positions, k_positions), the last two (positions, first_position).
pub(crate) type QkRotation = (u64, u64, usize, usize, bool, RowPositions, RowPositions);

/// (positions, first_position), as of [`Rotation`].
pub(crate) type RowPositions = (Option<u64>, Number<usize>);

/// A tensor's description, without the strides that mean nothing: calls that differ in those alone share a plan.
///
/// # Errors
/// A dtype that has no such name.
pub(crate) fn desc((dtype, _, shape, strides): &Tensor<'_>) -> PyResult<TensorDesc> {
    let dtype = named(dtype)?;
    let &(batch, seqlen, heads, head_dim) = shape;
    let shape = Shape { batch, seqlen, heads, head_dim };
    Ok(TensorDesc { dtype, shape, strides: in_order(*strides) }.canonical())
}

/// The description of a tensor of parts, without the strides that mean nothing.
///
/// # Errors
/// A dtype that has no such name.
pub(crate) fn partials((dtype, _, shape, strides): &Parts<'_>) -> PyResult<Partials> {
    let &(splits, batch, seqlen, heads, head_dim) = shape;
    let &(stride, of_batch, of_seqlen, of_heads, of_head_dim) = strides;
    let strides = in_order((of_batch, of_seqlen, of_heads, of_head_dim));
    let shape = Shape { batch, seqlen, heads, head_dim };
    Ok(Partials { splits, stride, first: TensorDesc { dtype: named(dtype)?, shape, strides } }.canonical())
}

/// An output of this dtype and shape: contiguous, unless it has strides.
pub(crate) fn output(dtype: Dtype, shape: Shape, strides: Option<Four<i64>>) -> TensorDesc {
    let contiguous = TensorDesc::contiguous(dtype, shape);
    let strides = strides.map_or(contiguous.strides, in_order);
    TensorDesc { strides, ..contiguous }.canonical()
}

fn in_order((batch, seqlen, heads, head_dim): Four<i64>) -> Strides {
    Strides { batch, seqlen, heads, head_dim }
}

/// The sequences of Q, and of K and V, with hints as plans need them.
pub(crate) fn sequences((count, _, used, longest): &Packed) -> [Sequences; 2] {
    let of = |used: Option<u64>, longest: Option<usize>| {
        let mut sequences = Sequences::packed(*count);
        if let Some(rows) = longest {
            sequences = sequences.longest(rows);
        }
        if used.is_some() { sequences.used() } else { sequences }
    };
    [of(used.0, rows(&longest.0).map(hint::rounded_up)), of(used.1, rows(&longest.1).map(hint::rounded_down))]
}

/// The addresses of the lists, by the names of the tensors that they are.
pub(crate) fn lists(packed: Option<&Packed>) -> [(&'static str, Option<u64>); 4] {
    let (ends, used) = packed.map(|&(_, ends, used, _)| (ends, used)).unzip();
    let ((ends_q, ends_k), (used_q, used_k)) = (ends.unzip(), used.unwrap_or_default());
    [("cu_seqlens_q", ends_q), ("cu_seqlens_k", ends_k), ("seqused_q", used_q), ("seqused_k", used_k)]
}

/// The sequences of Q and of a cache of K and V, of tensors of these shapes, with hints as plans need them.
pub(crate) fn cached(cache: &Cache, [q, k, _]: [Shape; 3]) -> [Sequences; 2] {
    let (count, packed, used, leftpad, pages, longest) = cache;
    let of_q = packed.map_or(Sequences::dense(q.batch, q.seqlen), |_| Sequences::packed(*count));
    let of_k = match *pages {
        Some((_, pages, stride, Some((_, rows)))) => {
            Sequences::indexed(*count, [rows, pages]).table_stride(stride)
        }
        Some((_, pages, stride, None)) => Sequences::paged(*count, pages).table_stride(stride),
        None => Sequences::dense(k.batch, k.seqlen),
    };
    let of_q = rows(&longest.0).map_or(of_q, |rows| of_q.longest(hint::rounded_up(rows)));
    let of_k = rows(&longest.1).map_or(of_k, |rows| of_k.longest(hint::rounded_down(rows)));
    let of_k = leftpad.map_or(of_k, |_| of_k.left_padded());
    [used.0.map_or(of_q, |_| of_q.used()), used.1.map_or(of_k, |_| of_k.used())]
}

/// The addresses of the lists, by the names of the tensors that they are.
pub(crate) fn lists_of_cache(cache: &Cache) -> [(&'static str, Option<u64>); 6] {
    let &(_, cu_seqlens_q, (seqused_q, seqused_k), leftpad_k, page_table, _) = cache;
    let index = page_table.and_then(|(.., index)| index);
    [
        ("cu_seqlens_q", cu_seqlens_q),
        ("seqused_q", seqused_q),
        ("seqused_k", seqused_k),
        ("leftpad_k", leftpad_k),
        ("page_table", page_table.map(|(address, ..)| address)),
        ("cache_batch_idx", index.map(|(address, _)| address)),
    ]
}

/// The rotation of new keys and of queries.
///
/// # Errors
/// A dtype that has no such name.
pub(crate) fn append_rotary(rotation: &AppendRotation<'_>) -> PyResult<AppendRotary> {
    let (dtype, _, _, table_rows, rotary_dim, interleaved, listed) = rotation;
    let base = listed.map_or(SequenceBase::Used, |_| SequenceBase::Listed);
    Ok(AppendRotary {
        style: style(*interleaved),
        rotary_dim: *rotary_dim,
        table: named(dtype)?,
        table_rows: *table_rows,
        base,
    })
}

fn rows(hint: &Hint) -> Option<usize> {
    hint.as_ref().and_then(|Number(rows)| usize::try_from(*rows).ok())
}

/// A dtype by its name.
///
/// # Errors
/// There is none of that name.
pub(crate) fn named(name: &Bound<'_, PyString>) -> PyResult<Dtype> {
    let name = name.to_str()?;
    Ok(name.parse().map_err(|_| Error::Dtype { given: name.to_owned() })?)
}

/// The rotation of a tensor.
pub(crate) fn rotary(rotation: &Rotation) -> Rotary {
    let &(_, _, table_rows, rotary_dim, interleaved, listed, Number(first)) = rotation;
    let positions = positions(&(listed, Number(first)));
    Rotary { style: style(interleaved), rotary_dim, table_rows, positions }
}

/// The rotation of Q and K.
pub(crate) fn qk_rotary(rotation: &QkRotation) -> QkRotary {
    let (_, _, table_rows, rotary_dim, interleaved, of_q, of_k) = rotation;
    QkRotary {
        style: style(*interleaved),
        rotary_dim: *rotary_dim,
        table_rows: *table_rows,
        q_positions: positions(of_q),
        k_positions: positions(of_k),
    }
}

fn style(interleaved: bool) -> RopeStyle {
    if interleaved { RopeStyle::Interleaved } else { RopeStyle::HalfSplit }
}

fn positions((listed, Number(first)): &RowPositions) -> Positions {
    listed.map_or(Positions::From(*first), |_| Positions::Listed)
}

/// A number of Python's, which has no bounds: one that is none of T's is as wrong as any other that makes no sense.
pub(crate) struct Number<T>(pub(crate) T);

impl<'a, 'py, T: FromPyObject<'a, 'py>> FromPyObject<'a, 'py> for Number<T> {
    type Error = PyErr;

    fn extract(given: Borrowed<'a, 'py, PyAny>) -> PyResult<Number<T>> {
        given.extract().map(Number).map_err(|error: T::Error| {
            let error: PyErr = error.into();
            if error.is_instance_of::<PyOverflowError>(given.py()) {
                PyValueError::new_err(format!("{} is too large or too small a number", &*given))
            } else {
                error
            }
        })
    }
}
