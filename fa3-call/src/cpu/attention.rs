//! The forward pass.

use fa3::half::{bf16, f16};
use fa3::{Device, Scalar};
use fa3_types::{Dtype, Problem, ProblemSpec};

use super::cache::rows::is_cache;
use super::call::CpuCall;
use super::inputs::{attention, intervals, problem, qkv, score, sink};
use super::lists::Lists;
use super::memory::Memory;
use super::results::Results;
use super::{cache, e4m3, sparse};
use crate::attention::Attention;
use crate::error::Error;
use crate::table::Table;

impl CpuCall for Attention {
    fn check_for_cpu(&self) -> Result<(), Error> {
        problem(self).map(drop)
    }

    fn compute(&self, memory: &Memory<'_>) -> Result<(), Error> {
        forward(self, memory)
    }
}

impl CpuCall for Table {
    fn check_for_cpu(&self) -> Result<(), Error> {
        self.0.check_for_cpu()
    }

    /// The CPU needs no table.
    fn compute(&self, _memory: &Memory<'_>) -> Result<(), Error> {
        Ok(())
    }
}

/// Computes the forward pass of `call` over its tensors in `memory`.
///
/// # Errors
/// The call or an address is invalid.
fn forward(call: &Attention, memory: &Memory<'_>) -> Result<(), Error> {
    let (problem, spec) = (problem(call)?, call.spec()?);
    // SAFETY: the maker of `memory` guarantees the call's tensors.
    #[allow(unsafe_code, reason = "tensors are plain addresses")]
    let lists = unsafe { Lists::of(&spec, memory) }?;
    if spec.seqs_k.list().is_some() {
        return sparse::forward(&spec, &problem, memory);
    }
    if is_cache(&spec) || problem.converts_keys() {
        return cache::forward(&spec, &problem, lists, memory);
    }
    match problem.dtype() {
        Dtype::F32 => forward_of::<f32>(&spec, &problem, lists, memory),
        Dtype::F16 => forward_of::<f16>(&spec, &problem, lists, memory),
        Dtype::Bf16 => forward_of::<bf16>(&spec, &problem, lists, memory),
        Dtype::E4m3 => e4m3::forward(&spec, lists, memory),
        Dtype::Int8 => unreachable!("q of int8 is no valid problem"),
    }
}

fn forward_of<T: Scalar<Output = T>>(
    spec: &ProblemSpec,
    problem: &Problem,
    lists: Lists<'_>,
    memory: &Memory<'_>,
) -> Result<(), Error> {
    // SAFETY: the maker of `memory` guarantees the call's tensors.
    #[allow(unsafe_code, reason = "tensors are plain addresses")]
    let (qkv, qv, intervals, sink, score, results) = unsafe {
        let results = Results::of(problem, memory)?;
        let qv = spec.qv.as_ref().map(|qv| memory.view::<T>("qv", qv)).transpose()?;
        let (intervals, sink) = (intervals(problem, memory)?, sink(problem, memory)?);
        (qkv::<T>(spec, memory)?, qv, intervals, sink, score(problem.score(), memory)?, results)
    };
    let attention = lists.given(attention(problem, qkv, sink, intervals));
    let attention = score.into_iter().fold(attention, fa3::Attention::score);
    let attention = qv.into_iter().fold(attention, |attention, qv| attention.qv(qv));
    if results.has_max_logits() {
        results.assign(attention.forward_with_max_logits(&Device::Cpu)?);
        return Ok(());
    }
    Ok(results.write(|o, lse| attention.forward_into(&Device::Cpu, o, lse))?)
}
