//! Made plans of the backward pass. Whether results are right, other checks say; here they are equal bit by bit,
//! however they were launched.

use fa3_cuda::host::{Device, Forward};
use fa3_tests::bwd::Form;
use fa3_tests::fwd::dense;
use fa3_types::{BackwardProblem, Dtype};

use super::bench::{Bench, workspace_of_nan};
use super::tensors::Bits;
use super::{form, refusals, valid};
use crate::{Check, Fallible, ensure};

pub(crate) const CHECKS: [(&str, Check); 9] = [
    ("backward::plans::again", again),
    ("backward::plans::graph", graph),
    ("backward::plans::graph_beside_its_stream", graph_beside_its_stream),
    ("backward::plans::used_workspace", used_workspace),
    ("backward::plans::sequences_alone", sequences_alone),
    ("backward::plans::nothing_to_compute", nothing),
    ("backward::plans::no_allocations", no_allocations),
    ("backward::plans::refused_memories", refusals::memories),
    ("backward::plans::refused_problems", refusals::problems),
];

/// Sequences of the problems below.
const BATCH: usize = 3;

/// Causal, with 54 tiles of keys, which may have to wait for each other; three query heads share a head of K and V.
/// Blocks have 128 rows if dQ is added at head_dim 64, and 64 rows at 128.
fn problems() -> [BackwardProblem; 2] {
    [64, 128].map(|head_dim| valid(dense(Dtype::Bf16, BATCH, (1000, 1111), (6, 2), head_dim).causal()))
}

/// Each of these problems in each of these forms.
fn cases(forms: &[Form]) -> impl Iterator<Item = (BackwardProblem, Form)> {
    problems().into_iter().flat_map(|problem| forms.iter().map(move |&form| (problem.clone(), form)))
}

/// Run after run, also without a pause.
fn again(device: &Device) -> Fallible<String> {
    for (problem, form) in cases(&Form::ALL) {
        let mut bench = Bench::new(device, &problem, form)?;
        let expected = bench.runs(1)?;
        for round in 0..50 {
            let same = form::are_same(form, &bench.runs(1 + round % 4)?, &expected);
            ensure(same, &format!("{form:?} of {problem} differs in round {round}"))?;
        }
    }
    Ok("50 times one to four runs of each form, equal".to_owned())
}

/// Replayed on another stream than the one that it was captured from.
fn graph(device: &Device) -> Fallible<String> {
    for (problem, form) in cases(&Form::DETERMINISTIC) {
        let mut bench = Bench::new(device, &problem, form)?;
        let expected = bench.runs(1)?;
        let (graph, other) = (bench.capture(2)?, device.stream()?);
        for _ in 0..10 {
            bench.tensors.poison(&bench.stream)?;
            bench.stream.synchronize()?;
            bench.replay(&graph, &other)?;
            let same = bench.tensors.bits(&other)? == expected;
            ensure(same, &format!("the graph of {form:?} of {problem} gives other gradients"))?;
        }
        ensure(bench.runs(1)? == expected, "a run after the graph gives other gradients")?;
    }
    Ok("10 replays of 2 runs of each form, equal".to_owned())
}

/// The graph on one stream while the stream that it was captured from runs the same plan over other memory.
fn graph_beside_its_stream(device: &Device) -> Fallible<String> {
    for (problem, form) in cases(&Form::DETERMINISTIC) {
        let mut captured = Bench::new(device, &problem, form)?;
        let mut beside = Bench::new(device, &problem, form)?;
        let expected = captured.runs(1)?;
        let (graph, other) = (captured.capture(1)?, device.stream()?);
        for bench in [&mut captured, &mut beside] {
            bench.tensors.poison(&bench.stream)?;
            bench.stream.synchronize()?;
        }
        for _ in 0..50 {
            captured.replay(&graph, &other)?;
            let Bench { backward, stream, .. } = &captured;
            beside.tensors.run(backward, stream, &mut beside.workspace)?;
        }
        let both = [captured.tensors.bits(&other)?, beside.tensors.bits(&captured.stream)?];
        let same = both.iter().all(|bits| *bits == expected);
        ensure(same, &format!("{form:?} of {problem} gives other gradients"))?;
    }
    Ok("50 runs of each form beside 50 replays, equal".to_owned())
}

/// One workspace for all problems, in turn, and for the forward pass: nobody reads what another one left there.
fn used_workspace(device: &Device) -> Fallible<String> {
    let strangers = [
        valid(dense(Dtype::Bf16, 1, (300, 2000), (4, 4), 64)),
        valid(dense(Dtype::F16, 2, (1777, 130), (2, 1), 128).causal()),
    ];
    let strangers = strangers.iter().flat_map(|problem| Form::ALL.map(|form| (problem, form)));
    let strangers = strangers.map(|(problem, form)| Bench::new(device, problem, form));
    let mut strangers: Vec<Bench> = strangers.collect::<Fallible<_>>()?;
    for (problem, form) in cases(&Form::DETERMINISTIC) {
        let mut bench = Bench::new(device, &problem, form)?;
        let expected = bench.runs(1)?;
        let forward = Forward::new(device, problem.forward())?;
        let needed = strangers.iter().map(|stranger| stranger.backward.workspace_bytes());
        let needed = [bench.backward.workspace_bytes(), forward.workspace_bytes()].into_iter().chain(needed);
        bench.workspace = workspace_of_nan(device, &bench.stream, needed.max().unwrap_or_default())?;
        for stranger in &mut strangers {
            stranger.tensors.run(&stranger.backward, &bench.stream, &mut bench.workspace)?;
            let after_backward = bench.runs(1)?;
            bench.tensors.attend(&forward, &bench.stream, &mut bench.workspace)?;
            let same = after_backward == expected && bench.runs(1)? == expected;
            let after = stranger.backward.plan().problem();
            ensure(same, &format!("{form:?} of {problem} differs after {after} in the same workspace"))?;
        }
    }
    Ok(format!("after each of {} others and the forward pass, equal", strangers.len()))
}

/// A sequence's results do not depend on the others in the batch.
fn sequences_alone(device: &Device) -> Fallible<String> {
    for (problem, form) in cases(&Form::ALL) {
        let mut all = Bench::new(device, &problem, form)?;
        let together = all.runs(1)?;
        let head_dim = problem.forward().head_dim();
        let one = valid(dense(Dtype::Bf16, 1, (1000, 1111), (6, 2), head_dim).causal());
        for index in 0..BATCH {
            let stream = device.stream()?;
            let tensors = all.tensors.of_sequence(device, &stream, (index, BATCH))?;
            let alone = Bench::with(device, form::plan(form, device, &one)?, stream, tensors)?.runs(1)?;
            let part: Bits = together.each_ref().map(|bits| {
                let each = bits.len() / BATCH;
                bits[index * each..][..each].to_vec()
            });
            ensure(
                form::are_same(form, &alone, &part),
                &format!("{form:?} of sequence {index} of {problem} differs"),
            )?;
        }
    }
    Ok(format!("each of {BATCH} sequences as alone"))
}

fn nothing(device: &Device) -> Fallible<String> {
    // Sequences, rows, keys, and whether a kernel has anything to write.
    for (batch, rows, keys, has_work) in
        [(2, 0, 40, true), (2, 40, 0, true), (2, 0, 0, false), (0, 40, 40, false)]
    {
        let problem = valid(dense(Dtype::Bf16, batch, (rows, keys), (4, 2), 64));
        let sizes = [problem.dq(), problem.dk(), problem.dv()].map(|x| x.extent().0 as usize);
        for form in Form::ALL {
            let mut bench = Bench::new(device, &problem, form)?;
            let kernels = bench.backward.functions().count();
            ensure((kernels > 0) == has_work, &format!("{kernels} kernels in {form:?} for {problem}"))?;
            let bits = bench.runs(2)?;
            let right_sizes = bits.each_ref().map(Vec::len) == sizes;
            ensure(right_sizes, &format!("gradients of {problem} have other sizes"))?;
            let is_zero = |bits: &u16| bits & 0x7FFF == 0;
            ensure(bits.iter().flatten().all(is_zero), &format!("{form:?} of {problem} is not 0"))?;
        }
    }
    Ok("no rows, no keys, neither, no sequences".to_owned())
}

/// Checks that launches allocate nothing, as far as the driver's free memory shows it. Capturing shows it, too: an
/// allocation would end it.
fn no_allocations(device: &Device) -> Fallible<String> {
    for (problem, form) in cases(&Form::ALL) {
        let mut bench = Bench::new(device, &problem, form)?;
        let mut free_after_runs = || -> Fallible<usize> {
            bench.runs(400)?;
            Ok(device.memory()?.free)
        };
        // The driver may allocate for its first copies and launches.
        let (before, after) = (free_after_runs()?, free_after_runs()?);
        ensure(before == after, &format!("{before} bytes are free, {after} after 400 runs of {form:?}"))?;
        bench.capture(10)?;
    }
    Ok("as much memory is free after 400 runs of each form as before".to_owned())
}
