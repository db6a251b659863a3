//! Deterministic gradients: equal bits in a thousand runs, while another stream is always busy.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use fa3_cuda::host::{Device, Forward};
use fa3_tests::bwd::Form;
use fa3_tests::fwd::dense;
use fa3_types::{BackwardProblem, Dtype, KnownProblem, Mask, ProblemSpec, SequenceRows};
use rayon::prelude::*;

use super::{bench, form, valid};
use crate::bench::{Bench, Bits, Call};
use crate::{Fallible, ensure};

const REPETITIONS: usize = 1000;

/// In each problem three query heads share a KV head. Neither rows nor keys fill whole blocks.
fn problems() -> Vec<BackwardProblem> {
    let dims = [(64, 64), (128, 128), (256, 256), (64, 128), (192, 128)];
    let problem = |mask, (head_dim, head_dim_v)| {
        let spec = dense(Dtype::Bf16, 2, (700, 999), (6, 2), head_dim);
        valid(spec.head_dim_v(head_dim_v).mask(mask))
    };
    [Mask::None, Mask::Causal].into_iter().flat_map(|mask| dims.map(|dims| problem(mask, dims))).collect()
}

/// Packed sequences, some of them empty, and one of them long.
fn packed() -> Fallible<Vec<(BackwardProblem, KnownProblem)>> {
    let lengths = [0, 700, 33, 0, 1, 999, 130, 2100, 64];
    let rows = SequenceRows::packed_lengths(&lengths);
    let problem = |mask, head_dim| -> Fallible<(BackwardProblem, KnownProblem)> {
        let spec = ProblemSpec::packed(Dtype::Bf16, (6, 2), head_dim, &rows, &rows).mask(mask);
        Ok((valid(spec.clone()), spec.with_rows(rows.clone(), rows.clone())?))
    };
    let masks = [Mask::None, Mask::Causal];
    masks.into_iter().flat_map(|mask| [64, 128, 256].map(|dim| problem(mask, dim))).collect()
}

/// Runs each problem in each form that it can have, each on its own stream. The expected bits are computed before the
/// load starts.
pub(super) fn repetitions(device: &Device) -> Fallible<String> {
    let packed = packed()?;
    let packed = packed.iter().map(|(problem, known)| (problem, Some(known)));
    let unpacked = problems();
    let problems = unpacked.iter().map(|problem| (problem, None)).chain(packed);
    let cases = problems.flat_map(|problem| Form::DETERMINISTIC.map(|form| (problem, form)));
    let cases = cases.filter(|((problem, _), form)| form::options(*form, device, problem).is_some());
    let benches = cases.map(|((problem, known), form)| -> Fallible<(Bench, Bits)> {
        let call = form::plan(form, device, problem)?.into();
        let mut bench = bench(device, call, problem.forward(), known)?;
        let expected = bench.runs(1)?;
        Ok((bench, expected))
    });
    let mut benches: Vec<(Bench, Bits)> = benches.collect::<Fallible<_>>()?;
    let problem = valid(dense(Dtype::Bf16, 1, (3000, 3000), (8, 8), 128).causal());
    let call = form::plan(Form::AnyOrder, device, &problem)?.into();
    let mut other = bench(device, call, problem.forward(), None)?;
    let forward: Call = Forward::new(device, problem.forward())?.into();
    let done = AtomicBool::new(false);
    let (same, launches) = thread::scope(|scope| {
        let load = scope.spawn(|| load(&mut other, &forward, &done));
        let same = benches.par_iter_mut().try_for_each(|(bench, expected)| repeat(bench, expected));
        done.store(true, Ordering::Relaxed);
        (same, load.join().expect("the load does not panic"))
    });
    same?;
    let launches = launches?;
    ensure(launches > 100, &format!("there were only {launches} other launches"))?;
    Ok(format!("{} plans {REPETITIONS} times each, beside {launches} launches", benches.len()))
}

fn repeat(bench: &mut Bench, expected: &Bits) -> Fallible<()> {
    for repetition in 0..REPETITIONS {
        let same = bench.runs(1)? == *expected;
        ensure(same, &format!("repetition {repetition} differs:\n{}", bench.call.plan))?;
    }
    Ok(())
}

/// Runs forward and backward passes on a stream of its own until the other streams are `done`. Returns the number of
/// passes.
fn load(bench: &mut Bench, forward: &Call, done: &AtomicBool) -> Fallible<usize> {
    let (mut launches, mut before) = (0, bench.stream.record()?);
    while !done.load(Ordering::Relaxed) {
        // The proportion of forward and backward passes varies.
        for _ in 0..=launches % 5 {
            bench.memory.run(forward, &bench.stream, &mut bench.workspace)?;
            launches += 1;
        }
        for _ in 0..=launches % 3 {
            bench.run()?;
            launches += 1;
        }
        // The next launches are queued before this one has ended.
        let now = bench.stream.record()?;
        before.synchronize()?;
        before = now;
    }
    bench.stream.synchronize()?;
    Ok(launches)
}
