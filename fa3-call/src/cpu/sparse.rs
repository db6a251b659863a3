//! Attention over listed rows of one cache or of two.

use fa3::half::{bf16, f16};
use fa3::ndarray::ArrayView2;
use fa3::{Device, Error as CpuError, ListedCache, Scalar, SparseAttention};
use fa3_types::{Dtype, Feature, Known, Problem, ProblemSpec, Sequences, TensorDesc};

use super::inputs::sink;
use super::memory::Memory;
use super::results::Results;
use crate::error::Error;

/// The features that the CPU computes over lists of keys.
const KNOWN: Known = Known::new(
    "the CPU engine of lists of keys",
    &[
        Feature::SoftCap,
        Feature::Sinks,
        Feature::Qv,
        Feature::Used,
        Feature::Lists,
        Feature::Extra,
        Feature::LseForm,
        Feature::MaxLogits,
    ],
);

/// Computes O and LSE.
///
/// # Errors
/// The problem has another feature, or an address is invalid.
pub(super) fn forward(spec: &ProblemSpec, problem: &Problem, memory: &Memory<'_>) -> Result<(), Error> {
    KNOWN.check(problem).map_err(CpuError::from)?;
    match problem.dtype() {
        Dtype::F32 => forward_of::<f32>(spec, problem, memory),
        Dtype::F16 => forward_of::<f16>(spec, problem, memory),
        Dtype::Bf16 => forward_of::<bf16>(spec, problem, memory),
        Dtype::E4m3 | Dtype::Int8 => unreachable!("a problem of 8 bits has a feature that is not known"),
    }
}

fn forward_of<T: Scalar<Output = T>>(
    spec: &ProblemSpec,
    problem: &Problem,
    memory: &Memory<'_>,
) -> Result<(), Error> {
    // SAFETY: the maker of `memory` guarantees the call's tensors.
    #[allow(unsafe_code, reason = "tensors are plain addresses")]
    let (q, qv, cache, extra, sink, results) = unsafe {
        let results = Results::of(problem, memory)?;
        let (q, qv) =
            (memory.view("q", &spec.q)?, spec.qv.as_ref().map(|qv| memory.view("qv", qv)).transpose()?);
        let cache = listed::<T>(["k", "v", "indices", "seqused_k"], [&spec.k, &spec.v], spec.seqs_k, memory)?;
        let of_extra = ["extra_k", "extra_v", "extra_indices", "extra_seqused_k"];
        let extra = spec.extra.as_ref().map(|x| listed(of_extra, [&x.k, &x.v], x.sequences, memory));
        (q, qv, cache, extra.transpose()?, sink(problem, memory)?, results)
    };
    let mut attention = SparseAttention::new(q, cache).for_problem(problem);
    attention = qv.into_iter().fold(attention, |attention, qv| attention.qv(qv));
    attention = extra.into_iter().fold(attention, |attention, extra| attention.extra(extra));
    attention = sink.into_iter().fold(attention, |attention, sink| attention.sink(sink));
    if results.has_max_logits() {
        results.assign(attention.forward_with_max_logits(&Device::Cpu)?);
        return Ok(());
    }
    Ok(results.write(|o, lse| attention.forward_into(&Device::Cpu, o, lse))?)
}

/// A cache whose K, V, lists and lengths have these names.
///
/// # Safety
/// `memory` must have the tensors. They stay alive and are not written to as long as the views live.
///
/// # Errors
/// An address is invalid.
#[allow(unsafe_code, reason = "tensors are plain addresses")]
unsafe fn listed<'a, T: Scalar>(
    [k, v, indices, lengths]: [&'static str; 4],
    [of_k, of_v]: [&TensorDesc; 2],
    sequences: Sequences,
    memory: &Memory<'_>,
) -> Result<ListedCache<'a, T>, Error> {
    let (count, (keys, _)) = (sequences.count(), sequences.list().unwrap_or_default());
    // SAFETY: the caller guarantees the tensors. Lists have no gaps on the CPU.
    let (k, v, entries, lengths) = unsafe {
        let lengths = sequences.has_used().then(|| memory.slice(lengths, count)).transpose()?;
        (memory.view(k, of_k)?, memory.view(v, of_v)?, memory.slice(indices, count * keys)?, lengths)
    };
    let indices = ArrayView2::from_shape([count, keys], entries).expect("one element for each index");
    Ok(ListedCache { k, v, indices, lengths })
}
