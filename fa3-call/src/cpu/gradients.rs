//! The backward pass.

use fa3::half::{bf16, f16};
use fa3::ndarray::{Array3, ArrayView3};
use fa3::{Device, Output, OutputGradients, Scalar};
use fa3_types::{BackwardProblem, BackwardSpec, Dtype, ScoreForm, ScoreTable, TensorDesc};

use super::call::CpuCall;
use super::inputs::{attention, contiguous, intervals, problem, qkv, score, sink};
use super::lists::Lists;
use super::memory::Memory;
use crate::error::Error;
use crate::gradients::Gradients;

impl CpuCall for Gradients {
    fn check_for_cpu(&self) -> Result<(), Error> {
        backward_problem(self).map(drop)
    }

    fn compute(&self, memory: &Memory<'_>) -> Result<(), Error> {
        backward(self, memory)
    }
}

/// The problem of a backward pass with contiguous inputs.
///
/// # Errors
/// The call is invalid.
fn backward_problem(call: &Gradients) -> Result<BackwardProblem, Error> {
    problem(&call.forward)?;
    let mut spec = call.spec()?;
    spec.forward = contiguous(spec.forward);
    spec.dout = TensorDesc::contiguous(spec.dout.dtype, spec.dout.shape);
    Ok(spec.validate()?)
}

/// Computes the backward pass of `call` over its tensors in `memory`.
///
/// # Errors
/// The call or an address is invalid.
fn backward(call: &Gradients, memory: &Memory<'_>) -> Result<(), Error> {
    let (problem, spec) = (backward_problem(call)?, call.spec()?);
    // SAFETY: the maker of `memory` guarantees the call's tensors.
    #[allow(unsafe_code, reason = "tensors are plain addresses")]
    let lists = unsafe { Lists::of(&spec.forward, memory) }?;
    match problem.forward().dtype() {
        Dtype::F32 => backward_of::<f32>(&spec, &problem, lists, memory),
        Dtype::F16 => backward_of::<f16>(&spec, &problem, lists, memory),
        Dtype::Bf16 => backward_of::<bf16>(&spec, &problem, lists, memory),
        Dtype::E4m3 | Dtype::Int8 => unreachable!("no gradients of 8 bits are a valid problem"),
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
    let (qkv, sink, intervals, score, dout, o, lse, dlse, gradients, dsink, dtables) = unsafe {
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
        let (intervals, score) = (intervals(forward, memory)?, score(forward.score(), memory)?);
        let extents = forward.score().map_or(&[][..], ScoreForm::extents).iter();
        let dtables = ScoreTable::OF_GRADIENTS.into_iter().zip(extents).filter(|(name, _)| memory.has(name));
        let dtables = dtables.map(|(name, extents)| memory.slice_mut::<f32>(name, extents.iter().product()));
        let dtables = dtables.collect::<Result<Vec<_>, _>>()?;
        (qkv, sink(forward, memory)?, intervals, score, dout, o, lse, dlse, gradients, dsink, dtables)
    };
    let o = o.as_standard_layout().into_owned();
    let lse = Array3::from_shape_vec(of_lse, lse.to_vec()).expect("one element for each index");
    let output = Output::new(o, lse);
    let mut given = OutputGradients::new(dout);
    if let Some(dlse) = dlse {
        given = given.dlse(ArrayView3::from_shape(of_lse, dlse).expect("one element for each index"));
    }
    let attention = lists.given(attention(forward, qkv, sink, intervals));
    let attention = score.into_iter().fold(attention, fa3::Attention::score);
    let computed = attention.backward(&Device::Cpu, &output, given)?;
    for (mut to, from) in gradients.into_iter().zip([&computed.dq, &computed.dk, &computed.dv]) {
        to.assign(from);
    }
    if let Some((to, from)) = dsink.zip(computed.dsink) {
        to.iter_mut().zip(from).for_each(|(to, from)| *to = from);
    }
    for (to, from) in dtables.into_iter().zip(computed.dtables.iter().filter(|x| !x.is_empty())) {
        to.copy_from_slice(from);
    }
    Ok(())
}
