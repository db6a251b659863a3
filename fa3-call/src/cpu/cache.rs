//! Attention over caches. Caches of e4m3 may go with 16-bit queries.

mod new_rows;
pub(super) mod rows;

use std::collections::BTreeSet;

use fa3::half::{bf16, f16};
use fa3::ndarray::{ArrayView2, ArrayViewMut4, Axis};
use fa3::{CachedAttention, Device, E4m3, Scalar};
use fa3_cuda::host::{OperationError, PlacementError};
use fa3_types::{CachedProblem, Dtype, Problem, ProblemSpec, SequenceRows, TensorDesc, TokenScales};

use super::call::CpuCall;
use super::e4m3;
use super::inputs::{self, contiguous, intervals, score, sink};
use super::lists::Lists;
use super::memory::Memory;
use super::results::Results;
use crate::cached::Cached;
use crate::error::Error;
use new_rows::NewTensors;
use rows::CacheRows;

impl CpuCall for Cached {
    fn check_for_cpu(&self) -> Result<(), Error> {
        problem(self).map(drop)
    }

    fn compute(&self, memory: &Memory<'_>) -> Result<(), Error> {
        append_forward(self, memory)
    }
}

/// The problem of a call in which only the cache keeps its strides. The CPU takes any strides of the other tensors.
///
/// # Errors
/// The call is invalid.
fn problem(call: &Cached) -> Result<CachedProblem, Error> {
    inputs::problem(&call.attention)?;
    let spec = call.attention.spec()?;
    let mut read = contiguous(spec.clone());
    (read.k, read.v) = (spec.k, spec.v);
    call.problem_of(read, call.new.map(|x| TensorDesc::contiguous(x.dtype, x.shape)))
}

/// Computes O and LSE.
///
/// # Errors
/// A list or an address is invalid.
pub(super) fn forward(
    spec: &ProblemSpec,
    problem: &Problem,
    lists: Lists<'_>,
    memory: &Memory<'_>,
) -> Result<(), Error> {
    match (problem.dtype(), problem.k().dtype) {
        (Dtype::F16, Dtype::E4m3) => forward_of::<f16, E4m3>(spec, problem, lists, memory),
        (Dtype::F16, Dtype::Int8) => forward_of::<f16, i8>(spec, problem, lists, memory),
        (Dtype::F16, _) => forward_of::<f16, f16>(spec, problem, lists, memory),
        (Dtype::Bf16, Dtype::E4m3) => forward_of::<bf16, E4m3>(spec, problem, lists, memory),
        (Dtype::Bf16, Dtype::Int8) => forward_of::<bf16, i8>(spec, problem, lists, memory),
        (Dtype::Bf16, _) => forward_of::<bf16, bf16>(spec, problem, lists, memory),
        (Dtype::F32, _) => forward_of::<f32, f32>(spec, problem, lists, memory),
        (Dtype::E4m3, _) => e4m3::forward(spec, lists, memory),
        (Dtype::Int8, _) => unreachable!("q of int8 is no valid problem"),
    }
}

fn forward_of<T: Scalar<Output = T>, C: Scalar>(
    spec: &ProblemSpec,
    problem: &Problem,
    lists: Lists<'_>,
    memory: &Memory<'_>,
) -> Result<(), Error> {
    // SAFETY: the maker of `memory` guarantees the call's tensors.
    #[allow(unsafe_code, reason = "tensors are plain addresses")]
    let (rows, call, k, v) = unsafe {
        let rows = CacheRows::of(spec, lists, memory)?;
        let call = call::<T>(spec, problem, lists, memory)?;
        (rows, call, memory.view::<C>("k", &spec.k)?, memory.view::<C>("v", &spec.v)?)
    };
    let (Call { attention, results }, cache) = (call, rows.of_tensors([k, v]));
    if results.has_max_logits() {
        results.assign(attention.forward_with_max_logits(&Device::Cpu, cache)?);
        return Ok(());
    }
    Ok(results.write(|o, lse| attention.forward_into(&Device::Cpu, cache, o, lse))?)
}

/// Appends the rows of the call to their cache, and computes the attention after the append.
///
/// # Errors
/// The call, an address or a list is invalid.
fn append_forward(call: &Cached, memory: &Memory<'_>) -> Result<(), Error> {
    let (problem, spec) = (problem(call)?, call.attention.spec()?);
    // SAFETY: the maker of `memory` guarantees the call's tensors.
    #[allow(unsafe_code, reason = "tensors are plain addresses")]
    let lists = unsafe { Lists::of(&spec, memory) }?;
    let given = Given { call, spec: &spec, problem: &problem, lists };
    match (problem.append().dtype(), problem.append().quantizes()) {
        (Dtype::F16, false) => given.append_forward_of::<f16, f16>(memory),
        (Dtype::F16, true) => given.append_forward_of::<f16, E4m3>(memory),
        (Dtype::Bf16, false) => given.append_forward_of::<bf16, bf16>(memory),
        (Dtype::Bf16, true) => given.append_forward_of::<bf16, E4m3>(memory),
        (Dtype::F32, _) => given.append_forward_of::<f32, f32>(memory),
        (Dtype::Int8, _) => unreachable!("new rows of int8 are no valid problem"),
        (Dtype::E4m3, _) => {
            let seqused = given.append_codes(memory)?;
            // The views of the append are gone.
            memory.release_all();
            e4m3::forward(&spec, lists.with_used_k(&seqused), memory)
        }
    }
}

/// A call that appends rows.
struct Given<'a> {
    call: &'a Cached,
    spec: &'a ProblemSpec,
    problem: &'a CachedProblem,
    lists: Lists<'a>,
}

impl Given<'_> {
    fn append_forward_of<T: Scalar<Output = T>, C: Scalar>(&self, memory: &Memory<'_>) -> Result<(), Error> {
        // SAFETY: as in [`forward_of`]. The caller also gave the cache as an output, and in a valid problem it has no
        // overlapping elements.
        #[allow(unsafe_code, reason = "tensors are plain addresses")]
        let (mut rows, call, [k, v], new) = unsafe {
            let rows = CacheRows::of(self.spec, self.lists, memory)?;
            let call = call::<T>(self.spec, self.problem.attention(), self.lists, memory)?;
            let new = NewTensors::<T>::of(self.call, memory)?;
            let written = written::<C>(self.spec, &rows, &new.rows().rows()?, memory)?;
            (rows, call, written, new)
        };
        let (Call { attention, results }, cache, new) = (call, rows.of_written([k, v]), new.rows());
        if results.has_max_logits() {
            results.assign(attention.append_forward_with_max_logits(&Device::Cpu, cache, &new)?);
            return Ok(());
        }
        Ok(results.write(|o, lse| attention.append_forward_into(&Device::Cpu, cache, &new, o, lse))?)
    }

    /// Appends e4m3 rows. Returns the number of rows of each sequence that are in use afterwards.
    fn append_codes(&self, memory: &Memory<'_>) -> Result<Vec<i32>, Error> {
        // SAFETY: as in [`Given::append_forward_of`].
        #[allow(unsafe_code, reason = "tensors are plain addresses")]
        let (mut rows, tensors, new) = unsafe {
            let rows = CacheRows::of(self.spec, self.lists, memory)?;
            let new = NewTensors::<E4m3>::of(self.call, memory)?;
            let written = written::<E4m3>(self.spec, &rows, &new.rows().rows()?, memory)?;
            (rows, written, new)
        };
        rows.of_written(tensors).append(&new.rows())?;
        Ok(rows.seqused)
    }
}

/// An attention over a cache, and the memory of its results.
struct Call<'a, T: Scalar> {
    attention: CachedAttention<'a, T>,
    results: Results<'a, T>,
}

/// The attention of a call.
///
/// # Safety
/// `memory` must have the problem's tensors, Q and `qv` with the strides of `spec`. As long as the result lives, they
/// stay alive, inputs are not written to, and no other code uses the results.
///
/// # Errors
/// An address is invalid.
#[allow(unsafe_code, reason = "tensors are plain addresses")]
unsafe fn call<'a, T: Scalar<Output = T>>(
    spec: &ProblemSpec,
    problem: &Problem,
    lists: Lists<'a>,
    memory: &Memory<'_>,
) -> Result<Call<'a, T>, Error> {
    // SAFETY: the caller guarantees the tensors.
    let (q, qv, sink, intervals, score, results) = unsafe {
        let qv = spec.qv.as_ref().map(|qv| memory.view::<T>("qv", qv)).transpose()?;
        let results = Results::of(problem, memory)?;
        let q = memory.view::<T>("q", &spec.q)?;
        let (sink, intervals) = (sink(problem, memory)?, intervals(problem, memory)?);
        (q, qv, sink, intervals, score(problem.score(), memory)?, results)
    };
    let mut attention = lists.of_q(CachedAttention::new(q)).for_problem(problem);
    attention = score.into_iter().fold(attention, CachedAttention::score);
    if let Some(qv) = qv {
        attention = attention.qv(qv);
    }
    if let Some(sink) = sink {
        attention = attention.sink(sink);
    }
    if let Some(intervals) = intervals {
        attention = attention.intervals(intervals);
    }
    if let Some(TokenScales { k, v }) = &spec.token_scales {
        // SAFETY: as above.
        let scales = unsafe { [memory.view::<f32>("k_scales", k)?, memory.view("v_scales", v)?] };
        attention = attention.token_scales(scales.map(|scales| scales.index_axis_move(Axis(3), 0)));
    }
    if problem.has_scales() && problem.converts_keys() {
        let [_, of_k, of_v] = problem.descale_shapes();
        // SAFETY: as above.
        let (of_k, of_v) =
            unsafe { (scales("k_descale", &of_k, memory)?, scales("v_descale", &of_v, memory)?) };
        attention = of_k.into_iter().fold(attention, |attention, scales| attention.k_descale(scales));
        attention = of_v.into_iter().fold(attention, |attention, scales| attention.v_descale(scales));
    }
    Ok(Call { attention, results })
}

/// Scales (sequences, heads_kv), if given.
///
/// # Safety
/// `memory` must have the scales. They stay alive and are not written to as long as the view lives.
///
/// # Errors
/// An address is invalid.
#[allow(unsafe_code, reason = "tensors are plain addresses")]
unsafe fn scales<'a>(
    name: &'static str,
    shape: &[usize],
    memory: &Memory<'_>,
) -> Result<Option<ArrayView2<'a, f32>>, Error> {
    let &[sequences, heads] = shape else {
        unreachable!("scales of keys that become numbers are those of heads")
    };
    if !memory.has(name) {
        return Ok(None);
    }
    // SAFETY: the caller guarantees the tensors.
    let scales = unsafe { memory.slice(name, sequences * heads) }?;
    Ok(Some(ArrayView2::from_shape([sequences, heads], scales).expect("one element for each index")))
}

/// Keys and values of a cache, as outputs.
///
/// # Safety
/// `memory` must have the cache of `spec`, and no other code uses it as long as the views live. The caller uses only
/// the entries of the views that hold these rows.
///
/// # Errors
/// An address is invalid, or keys overlap values.
#[allow(unsafe_code, reason = "tensors are plain addresses")]
unsafe fn written<'a, C: Scalar>(
    spec: &ProblemSpec,
    rows: &CacheRows<'_>,
    new: &SequenceRows,
    memory: &Memory<'_>,
) -> Result<[ArrayViewMut4<'a, C>; 2], Error> {
    // SAFETY: the caller guarantees the tensors.
    unsafe {
        let k = memory.view_mut("k", &spec.k)?;
        match memory.view_mut("v", &spec.v) {
            // K and V may be views of one pool, as long as each page in use holds only keys or only values.
            Err(Error::Operation(OperationError::Placement(PlacementError::Overlap {
                other: "k", ..
            }))) if are_apart(spec, &rows.entries(spec, new), memory) => {
                memory.release("k");
                Ok([k, memory.view_mut("v", &spec.v)?])
            }
            v => Ok([k, v?]),
        }
    }
}

/// Whether these entries of K and of V have no byte in common.
fn are_apart(spec: &ProblemSpec, entries: &[usize], memory: &Memory<'_>) -> bool {
    let bytes = |name, x: &TensorDesc| {
        let of = |count: usize, stride: i64| count.saturating_sub(1) as u64 * stride.unsigned_abs();
        let (shape, strides) = (x.shape, x.strides);
        let span = of(shape.seqlen, strides.seqlen) + of(shape.heads, strides.heads);
        let span = span + of(shape.head_dim, strides.head_dim) + 1;
        let (first, size) = (memory.address(name).unwrap_or_default(), x.dtype.bytes() as u64);
        let start = move |&entry: &usize| first + entry as u64 * strides.batch.unsigned_abs() * size;
        (entries.iter().map(start).collect::<BTreeSet<u64>>(), span * size)
    };
    let ((k, of_k), (v, of_v)) = (bytes("k", &spec.k), bytes("v", &spec.v));
    k.iter().all(|&start| v.range((start + 1).saturating_sub(of_v)..start + of_k).next().is_none())
}
