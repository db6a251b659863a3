//! Calls on the CPU, which the crate `fa3` computes over the caller's memory.

mod cache;
mod combine;
mod e4m3;
mod fp8;
mod lists;
mod memory;
mod quantize;
mod rotary;
mod sparse;
mod threads;

use fa3::half::{bf16, f16};
use fa3::ndarray::{Array3, ArrayView3, ArrayView4, ArrayViewMut3};
use fa3::{Attention, Device, Output, OutputGradients, Scalar};
use fa3_types::{BackwardProblem, BackwardSpec, Dtype, Problem, ProblemSpec, TensorDesc};

use crate::attention::Attention as Call;
use crate::error::Error;
use crate::gradients::Gradients;
use lists::Lists;

pub(crate) use cache::{append_forward, problem as cached_problem};
pub(crate) use combine::combine;
pub(crate) use fp8::{forward as fp8_forward, problem as fp8_problem};
pub use memory::Memory;
pub(crate) use quantize::quantize;
pub use threads::threads;

/// The problem of a call with contiguous inputs, because the CPU takes any strides. Rows of outputs have no gaps and do
/// not overlap.
///
/// # Errors
/// The call is invalid.
pub(crate) fn problem(call: &Call) -> Result<Problem, Error> {
    if call.numbers.sm_margin < 0 {
        return Err(Error::NegativeMargin { margin: call.numbers.sm_margin });
    }
    Ok(contiguous(call.spec()?).validate()?)
}

/// The problem of a backward pass with contiguous inputs.
///
/// # Errors
/// The call is invalid.
pub(crate) fn backward_problem(call: &Gradients) -> Result<BackwardProblem, Error> {
    problem(&call.forward)?;
    let mut spec = call.spec()?;
    spec.forward = contiguous(spec.forward);
    spec.dout = TensorDesc::contiguous(spec.dout.dtype, spec.dout.shape);
    Ok(spec.validate()?)
}

fn contiguous(mut spec: ProblemSpec) -> ProblemSpec {
    for x in [&mut spec.q, &mut spec.k, &mut spec.v].into_iter().chain(&mut spec.qv) {
        *x = TensorDesc::contiguous(x.dtype, x.shape);
    }
    if let Some(extra) = &mut spec.extra {
        [extra.k, extra.v] = [extra.k, extra.v].map(|x| TensorDesc::contiguous(x.dtype, x.shape));
    }
    spec
}

/// Computes the forward pass of `call` over its tensors in `memory`.
///
/// # Errors
/// The call or an address is invalid.
pub(crate) fn forward(call: &Call, memory: &Memory<'_>) -> Result<(), Error> {
    let (problem, spec) = (problem(call)?, call.spec()?);
    // SAFETY: the maker of `memory` guarantees the call's tensors.
    #[allow(unsafe_code, reason = "tensors are plain addresses")]
    let lists = unsafe { Lists::of(&spec, memory) }?;
    if spec.seqs_k.list().is_some() {
        return sparse::forward(&spec, &problem, memory);
    }
    if cache::is_cache(&spec) || problem.converts_keys() {
        return cache::forward(&spec, &problem, lists, memory);
    }
    match problem.dtype() {
        Dtype::F32 => forward_of::<f32>(&spec, &problem, lists, memory),
        Dtype::F16 => forward_of::<f16>(&spec, &problem, lists, memory),
        Dtype::Bf16 => forward_of::<bf16>(&spec, &problem, lists, memory),
        Dtype::E4m3 => e4m3::forward(&spec, lists, memory),
    }
}

fn forward_of<T: Scalar<Output = T>>(
    spec: &ProblemSpec,
    problem: &Problem,
    lists: Lists<'_>,
    memory: &Memory<'_>,
) -> Result<(), Error> {
    // SAFETY: the maker of `memory` guarantees the call's tensors. In a valid problem no two elements of an output
    // overlap.
    #[allow(unsafe_code, reason = "tensors are plain addresses")]
    let (qkv, qv, intervals, sink, o, lse) = unsafe {
        let (o, lse) = (memory.view_mut("o", problem.o())?, of_rows("lse", problem, memory)?);
        let qv = spec.qv.as_ref().map(|qv| memory.view::<T>("qv", qv)).transpose()?;
        (qkv::<T>(spec, memory)?, qv, intervals(problem, memory)?, sink(problem, memory)?, o, lse)
    };
    let attention = lists.given(attention(problem, qkv, sink));
    let attention = match qv {
        Some(qv) => attention.qv(qv),
        None => attention,
    };
    let attention = match intervals {
        Some(intervals) => attention.intervals(intervals),
        None => attention,
    };
    match lse {
        Some(lse) => attention.forward_into(&Device::Cpu, o, lse)?,
        None => {
            let mut unwanted = Array3::zeros(problem.lse_shape());
            attention.forward_into(&Device::Cpu, o, unwanted.view_mut())?;
        }
    }
    Ok(())
}

/// Computes the backward pass of `call` over its tensors in `memory`.
///
/// # Errors
/// The call or an address is invalid.
pub(crate) fn backward(call: &Gradients, memory: &Memory<'_>) -> Result<(), Error> {
    let (problem, spec) = (backward_problem(call)?, call.spec()?);
    // SAFETY: as in [`forward`].
    #[allow(unsafe_code, reason = "tensors are plain addresses")]
    let lists = unsafe { Lists::of(&spec.forward, memory) }?;
    match problem.forward().dtype() {
        Dtype::F32 => backward_of::<f32>(&spec, &problem, lists, memory),
        Dtype::F16 => backward_of::<f16>(&spec, &problem, lists, memory),
        Dtype::Bf16 => backward_of::<bf16>(&spec, &problem, lists, memory),
        Dtype::E4m3 => unreachable!("no gradients of e4m3 are a valid problem"),
    }
}

fn backward_of<T: Scalar<Output = T>>(
    spec: &BackwardSpec,
    problem: &BackwardProblem,
    lists: Lists<'_>,
    memory: &Memory<'_>,
) -> Result<(), Error> {
    let forward = problem.forward();
    let of_lse = forward.lse_shape();
    let rows = of_lse.iter().product();
    // SAFETY: the maker of `memory` guarantees the call's tensors. In a valid problem no two elements of an output
    // overlap.
    #[allow(unsafe_code, reason = "tensors are plain addresses")]
    let (qkv, sink, intervals, dout, o, lse, dlse, gradients, dsink) = unsafe {
        let dlse = memory.has("dlse").then(|| memory.slice::<f32>("dlse", rows)).transpose()?;
        let o = memory.view::<T>("o", forward.o())?;
        let (qkv, dout) = (qkv::<T>(&spec.forward, memory)?, memory.view::<T>("dout", &spec.dout)?);
        let lse = memory.slice::<f32>("lse", rows)?;
        let gradients = [
            memory.view_mut::<T>("dq", problem.dq())?,
            memory.view_mut("dk", problem.dk())?,
            memory.view_mut("dv", problem.dv())?,
        ];
        let heads = forward.heads().q();
        let dsink = forward.has_sink().then(|| memory.slice_mut::<f32>("dsink", heads)).transpose()?;
        let intervals = intervals(forward, memory)?;
        (qkv, sink(forward, memory)?, intervals, dout, o, lse, dlse, gradients, dsink)
    };
    let o = o.as_standard_layout().into_owned();
    let lse = Array3::from_shape_vec(of_lse, lse.to_vec()).expect("one element for each index");
    let output = Output::new(o, lse);
    let mut given = OutputGradients::new(dout);
    if let Some(dlse) = dlse {
        given = given.dlse(ArrayView3::from_shape(of_lse, dlse).expect("one element for each index"));
    }
    let attention = lists.given(attention(forward, qkv, sink));
    let attention = match intervals {
        Some(intervals) => attention.intervals(intervals),
        None => attention,
    };
    let computed = attention.backward(&Device::Cpu, &output, given)?;
    for (mut to, from) in gradients.into_iter().zip([&computed.dq, &computed.dk, &computed.dv]) {
        to.assign(from);
    }
    if let Some((to, from)) = dsink.zip(computed.dsink) {
        to.iter_mut().zip(from).for_each(|(to, from)| *to = from);
    }
    Ok(())
}

/// The call as an `fa3::Attention`, which is refused if it differs from `problem`.
fn attention<'a, T: Scalar>(
    problem: &Problem,
    [q, k, v]: [ArrayView4<'a, T>; 3],
    sink: Option<&'a [f32]>,
) -> Attention<'a, T> {
    let attention = Attention::new(q, k, v).for_problem(problem);
    match sink {
        Some(sink) => attention.sink(sink),
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
unsafe fn qkv<'a, T: Scalar>(
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
unsafe fn sink<'a>(problem: &Problem, memory: &Memory<'_>) -> Result<Option<&'a [f32]>, Error> {
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
unsafe fn intervals<'a>(
    problem: &Problem,
    memory: &Memory<'_>,
) -> Result<Option<ArrayView4<'a, i32>>, Error> {
    let Some(form) = problem.mask().intervals() else { return Ok(None) };
    let dims = form.shape(problem.q().shape);
    // SAFETY: the caller guarantees the tensors.
    let bounds = unsafe { memory.slice("intervals", dims.iter().product()) }?;
    Ok(Some(ArrayView4::from_shape(dims, bounds).expect("one element for each index")))
}

/// LSE, or another output of its shape, by its name, if it is wanted.
///
/// # Safety
/// `memory` must have an array of the shape of the problem's LSE, and no other code uses it as long as the view lives.
///
/// # Errors
/// An address is invalid.
#[allow(unsafe_code, reason = "tensors are plain addresses")]
unsafe fn of_rows<'a>(
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
