//! The tensors of attention in memory, and its problem by the rules of the CPU.

use fa3::ndarray::{ArrayView4, ArrayViewMut3};
use fa3::{Attention, Scalar, ScoreFunction};
use fa3_types::{Problem, ProblemSpec, ScoreForm, ScoreTable, TensorDesc};

use super::memory::Memory;
use crate::attention::Attention as Call;
use crate::error::Error;

/// The problem of a call with contiguous inputs, because the CPU takes any strides. Rows of outputs have no gaps and do
/// not overlap.
///
/// # Errors
/// The call is invalid.
pub(super) fn problem(call: &Call) -> Result<Problem, Error> {
    if call.numbers.sm_margin < 0 {
        return Err(Error::NegativeMargin { margin: call.numbers.sm_margin });
    }
    Ok(contiguous(call.spec()?).validate()?)
}

pub(super) fn contiguous(mut spec: ProblemSpec) -> ProblemSpec {
    for x in [&mut spec.q, &mut spec.k, &mut spec.v].into_iter().chain(&mut spec.qv) {
        *x = TensorDesc::contiguous(x.dtype, x.shape);
    }
    if let Some(extra) = &mut spec.extra {
        [extra.k, extra.v] = [extra.k, extra.v].map(|x| TensorDesc::contiguous(x.dtype, x.shape));
    }
    spec
}

/// The call as an `fa3::Attention`, which is refused if it differs from `problem`.
pub(super) fn attention<'a, T: Scalar>(
    problem: &Problem,
    [q, k, v]: [ArrayView4<'a, T>; 3],
    sink: Option<&'a [f32]>,
    intervals: Option<ArrayView4<'a, i32>>,
) -> Attention<'a, T> {
    let attention = Attention::new(q, k, v).for_problem(problem);
    let attention = match sink {
        Some(sink) => attention.sink(sink),
        None => attention,
    };
    match intervals {
        Some(intervals) => attention.intervals(intervals),
        None => attention,
    }
}

/// Q, K and V.
///
/// # Safety
/// `memory` must have Q, K and V of `spec`. They stay alive and are not written to as long as the views live.
///
/// # Errors
/// An address is invalid.
#[allow(unsafe_code, reason = "tensors are plain addresses")]
pub(super) unsafe fn qkv<'a, T: Scalar>(
    spec: &ProblemSpec,
    memory: &Memory<'_>,
) -> Result<[ArrayView4<'a, T>; 3], Error> {
    // SAFETY: the caller guarantees the tensors.
    unsafe { Ok([memory.view("q", &spec.q)?, memory.view("k", &spec.k)?, memory.view("v", &spec.v)?]) }
}

/// The sinks of query heads, if the problem has sinks.
///
/// # Safety
/// `memory` must have the sinks. They stay alive and are not written to as long as the result lives.
///
/// # Errors
/// An address is invalid.
#[allow(unsafe_code, reason = "tensors are plain addresses")]
pub(super) unsafe fn sink<'a>(problem: &Problem, memory: &Memory<'_>) -> Result<Option<&'a [f32]>, Error> {
    // SAFETY: the caller guarantees the tensors.
    problem.has_sink().then(|| unsafe { memory.slice("sink", problem.heads().q()) }).transpose()
}

/// The intervals of rows, if the mask has intervals.
///
/// # Safety
/// `memory` must have the intervals. They stay alive and are not written to as long as the result lives.
///
/// # Errors
/// An address is invalid.
#[allow(unsafe_code, reason = "tensors are plain addresses")]
pub(super) unsafe fn intervals<'a>(
    problem: &Problem,
    memory: &Memory<'_>,
) -> Result<Option<ArrayView4<'a, i32>>, Error> {
    let Some(form) = problem.mask().intervals() else { return Ok(None) };
    let dims = form.shape(problem.q().shape);
    // SAFETY: the caller guarantees the tensors.
    let bounds = unsafe { memory.slice("intervals", dims.iter().product()) }?;
    Ok(Some(ArrayView4::from_shape(dims, bounds).expect("one element for each index")))
}

/// The function of scores with copies of its tables, if there is one.
///
/// # Safety
/// `memory` must have the tables, which are not written to during this call.
///
/// # Errors
/// An address is invalid.
#[allow(unsafe_code, reason = "tensors are plain addresses")]
pub(super) unsafe fn score(
    form: Option<&ScoreForm>,
    memory: &Memory<'_>,
) -> Result<Option<ScoreFunction>, Error> {
    let Some(form) = form else { return Ok(None) };
    let tables = form.extents().iter().zip(ScoreTable::NAMES).map(|(extents, name)| {
        // SAFETY: the caller guarantees the tensors.
        unsafe { memory.slice::<f32>(name, extents.iter().product()) }.map(Into::into)
    });
    Ok(Some(form.with_tables(tables.collect::<Result<Vec<_>, _>>()?)?))
}

/// LSE, or another output of its shape, by its name, if it is wanted.
///
/// # Safety
/// `memory` must have an array of the shape of the problem's LSE, and no other code uses it as long as the view lives.
///
/// # Errors
/// An address is invalid.
#[allow(unsafe_code, reason = "tensors are plain addresses")]
pub(super) unsafe fn of_rows<'a>(
    name: &'static str,
    problem: &Problem,
    memory: &Memory<'_>,
) -> Result<Option<ArrayViewMut3<'a, f32>>, Error> {
    if !memory.has(name) {
        return Ok(None);
    }
    let dims = problem.lse_shape();
    // SAFETY: the caller guarantees the tensors.
    let lse = unsafe { memory.slice_mut(name, dims.iter().product()) }?;
    Ok(Some(ArrayViewMut3::from_shape(dims, lse).expect("one element for each index")))
}
