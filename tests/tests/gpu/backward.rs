//! The backward kernels on a GPU.

pub(crate) mod form;
mod large;
mod periodic;
mod refusals;
mod repeated;

use std::borrow::Cow;

use fa3_cuda::host::{Device, Forward};
use fa3_tests::bwd::{self, BwdCase, Form};
use fa3_tests::fwd::dense;
use fa3_types::{BackwardProblem, BackwardSpec, Dtype, KnownProblem, Problem, ProblemSpec};

use crate::bench::{Bench, Call, noise, workspace_of_nan};
use crate::{Check, Fallible, ensure, random};

/// The checks that take seconds.
pub(crate) const SHORT: [(&str, Check); 2] =
    [("backward::nothing_to_compute", nothing), ("backward::refused_problems", refusals::problems)];

/// The checks that take minutes.
pub(crate) const CHECKS: [(&str, Check); 7] = [
    ("backward::random_problems", |device| random::problems(device, BwdCase::random)),
    ("backward::random_packed_problems", |device| random::problems(device, BwdCase::random_packed)),
    ("backward::random_listed_blocks", |device| random::problems(device, bwd::blocks::random)),
    ("backward::random_functions", |device| random::problems(device, BwdCase::random_function)),
    ("backward::large_rows", large::rows),
    ("backward::large_keys", large::keys),
    ("backward::bits_1000_times", repeated::repetitions),
];

pub(crate) fn valid(spec: ProblemSpec) -> BackwardProblem {
    BackwardSpec::contiguous(spec).validate().expect("the problems of these checks are valid")
}

/// A call with random inputs, which are equal for equal problems. O and LSE come from the forward pass. Packed
/// sequences have the lengths of `known`.
pub(crate) fn bench(
    device: &Device,
    call: Call,
    forward: &Problem,
    known: Option<&KnownProblem>,
) -> Fallible<Bench> {
    let (mut bench, mut noise) = (Bench::new(device, call)?, noise(2.0));
    bench.memory.give(&bench.stream, |tensor| match (tensor.name, known) {
        ("cu_seqlens_q", Some(known)) => Some(list(&known.rows_q().cu_seqlens())),
        ("cu_seqlens_k", Some(known)) => Some(list(&known.rows_k().cu_seqlens())),
        _ => noise(tensor),
    })?;
    let forward: Call = Forward::new(device, forward)?.into();
    let mut workspace = workspace_of_nan(device, &bench.stream, forward.workspace_bytes)?;
    bench.memory.run(&forward, &bench.stream, &mut workspace)?;
    Ok(bench)
}

fn list(numbers: &[i32]) -> Cow<'static, [u8]> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

fn nothing(device: &Device) -> Fallible<String> {
    // Numbers of sequences, rows and keys, and whether a kernel has an output to write.
    for (batch, rows, keys, has_work) in
        [(2, 0, 40, true), (2, 40, 0, true), (2, 0, 0, false), (0, 40, 40, false)]
    {
        let spec = dense(Dtype::Bf16, batch, (rows, keys), (4, 2), 64);
        let problem = valid(spec.clone());
        let sizes = [problem.dq(), problem.dk(), problem.dv()].map(|x| x.extent_bytes().0 as usize);
        for form in Form::ALL {
            let call = form::plan(form, device, &problem)?.into();
            let mut bench = bench(device, call, &spec.clone().validate()?, None)?;
            let kernels = bench.call.kernels;
            ensure((kernels > 0) == has_work, &format!("{kernels} kernels in {form:?} for {problem}"))?;
            let bits = bench.runs(2)?;
            let right_sizes = bits.iter().map(Vec::len).eq(sizes);
            ensure(right_sizes, &format!("gradients of {problem} have other sizes"))?;
            let mut halves = bits.iter().flat_map(|bits| bits.as_chunks().0);
            let is_zero = halves.all(|&half| u16::from_le_bytes(half) & 0x7FFF == 0);
            ensure(is_zero, &format!("{form:?} of {problem} is not 0"))?;
        }
    }
    Ok("no rows, no keys, neither, no sequences".to_owned())
}
