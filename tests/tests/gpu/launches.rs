//! Plans of both passes, launched in every way. The results must be equal bit by bit. Other checks show that the
//! results are right.

use std::mem::replace;
use std::sync::Arc;

use fa3_cuda::host::{Device, DeviceBuffer, Forward, OperationError, PlacementError, Workspace};
use fa3_sched::Scheduler;
use fa3_sched::forward::PlanOptions;
use fa3_tests::bwd::Form;
use fa3_tests::fwd::dense;
use fa3_types::{Dtype, ProblemSpec};

use crate::backward::{self, form};
use crate::bench::{Bench, Bits, Call, noise, part, workspace_of_nan};
use crate::{Check, Fallible, ensure};

pub(crate) const CHECKS: [(&str, Check); 9] = [
    ("launches::again", again),
    ("launches::graph", graph),
    ("launches::graph_beside_its_stream", graph_beside_its_stream),
    ("launches::two_streams", two_streams),
    ("launches::two_threads", two_threads),
    ("launches::used_workspace", used_workspace),
    ("launches::sequences_alone", sequences_alone),
    ("launches::no_allocations", no_allocations),
    ("launches::refused_memories", refused_memories),
];

/// Number of sequences of the problems below.
const BATCH: usize = 3;

/// A pass with its head_dim.
#[derive(Clone, Copy, Debug)]
enum Pass {
    /// A forward pass with the dynamic scheduler, which needs a tile counter.
    Forward(usize),
    Backward(usize, Form),
}

impl Pass {
    /// With dQ additions, blocks of the backward pass have 128 rows at head_dim 64, and 64 rows at head_dim 128.
    const DETERMINISTIC: [Pass; 5] = [
        Pass::Forward(128),
        Pass::Backward(64, Form::OrderOfKeys),
        Pass::Backward(64, Form::DqKernel),
        Pass::Backward(128, Form::OrderOfKeys),
        Pass::Backward(128, Form::DqKernel),
    ];

    fn all() -> impl Iterator<Item = Pass> {
        let others = [64, 128].map(|head_dim| Pass::Backward(head_dim, Form::AnyOrder));
        Pass::DETERMINISTIC.into_iter().chain(others)
    }

    /// A causal problem, in which three query heads share a KV head. With three sequences it has 144 row tiles of
    /// uneven cost, or 54 KV tiles, which may have to wait for each other.
    fn problem(self, batch: usize) -> ProblemSpec {
        let (Pass::Forward(head_dim) | Pass::Backward(head_dim, _)) = self;
        dense(Dtype::Bf16, batch, (1000, 1111), (6, 2), head_dim).causal()
    }

    fn call(self, device: &Device, batch: usize) -> Fallible<Call> {
        let spec = self.problem(batch);
        match self {
            Pass::Forward(_) => {
                let options = PlanOptions::default().scheduler(Scheduler::DynamicPersistent);
                Ok(Forward::with(device, &spec.validate()?, &options)?.into())
            }
            Pass::Backward(_, form) => Ok(form::plan(form, device, &backward::valid(spec))?.into()),
        }
    }

    /// A bench with random inputs, which are equal for equal passes.
    fn bench(self, device: &Device) -> Fallible<Bench> {
        let call = self.call(device, BATCH)?;
        match self {
            Pass::Forward(_) => {
                let mut bench = Bench::new(device, call)?;
                bench.memory.give(&bench.stream, noise(1.0))?;
                Ok(bench)
            }
            Pass::Backward(..) => backward::bench(device, call, &self.problem(BATCH).validate()?, None),
        }
    }

    fn are_same(self, x: &Bits, y: &Bits) -> bool {
        match self {
            Pass::Forward(_) => x == y,
            Pass::Backward(_, form) => form::are_same(form, x, y),
        }
    }
}

/// Runs a pass several times, with and without a pause.
fn again(device: &Device) -> Fallible<String> {
    for pass in Pass::all() {
        let mut bench = pass.bench(device)?;
        let expected = bench.runs(1)?;
        for round in 0..50 {
            let same = pass.are_same(&bench.runs(1 + round % 4)?, &expected);
            ensure(same, &format!("{pass:?} differs in round {round}"))?;
        }
    }
    Ok("50 times one to four runs of each pass, equal".to_owned())
}

/// A graph is replayed on another stream than the captured stream.
fn graph(device: &Device) -> Fallible<String> {
    for pass in Pass::DETERMINISTIC {
        let mut bench = pass.bench(device)?;
        let expected = bench.runs(1)?;
        let (graph, other) = (bench.capture(2)?, device.stream()?);
        for _ in 0..10 {
            bench.memory.poison(&bench.stream)?;
            bench.stream.synchronize()?;
            bench.replay(&graph, &other)?;
            ensure(bench.memory.bits(&other)? == expected, &format!("the graph of {pass:?} differs"))?;
        }
        ensure(bench.runs(1)? == expected, "a run after the graph gives another result")?;
    }
    Ok("10 replays of 2 runs of each pass, equal".to_owned())
}

/// A graph runs on one stream while the captured stream runs the same plan on other memory.
fn graph_beside_its_stream(device: &Device) -> Fallible<String> {
    for pass in Pass::DETERMINISTIC {
        let (mut captured, mut beside) = (pass.bench(device)?, pass.bench(device)?);
        let expected = captured.runs(1)?;
        let (graph, other) = (captured.capture(1)?, device.stream()?);
        for bench in [&mut captured, &mut beside] {
            bench.memory.poison(&bench.stream)?;
            bench.stream.synchronize()?;
        }
        for _ in 0..50 {
            captured.replay(&graph, &other)?;
            beside.memory.run(&captured.call, &captured.stream, &mut beside.workspace)?;
        }
        let both = [captured.memory.bits(&other)?, beside.memory.bits(&captured.stream)?];
        ensure(both.iter().all(|bits| *bits == expected), &format!("{pass:?} gives other results"))?;
    }
    Ok("50 runs of each pass beside 50 replays, equal".to_owned())
}

fn two_streams(device: &Device) -> Fallible<String> {
    for pass in Pass::DETERMINISTIC {
        let (mut first, mut second) = (pass.bench(device)?, pass.bench(device)?);
        let expected = first.runs(1)?;
        for _ in 0..100 {
            first.run()?;
            second.run()?;
        }
        let same = first.bits()? == expected && second.bits()? == expected;
        ensure(same, &format!("{pass:?} differs on two streams"))?;
    }
    Ok("100 runs on each, equal".to_owned())
}

/// One plan is launched from two threads at once.
fn two_threads(device: &Device) -> Fallible<String> {
    for pass in Pass::DETERMINISTIC {
        let (mut first, mut second) = (pass.bench(device)?, pass.bench(device)?);
        let expected = first.runs(1)?;
        second.call = Arc::clone(&first.call);
        let runs = |bench: &mut Bench| (0..100).try_for_each(|_| bench.run());
        std::thread::scope(|scope| {
            let other = scope.spawn(|| runs(&mut second));
            runs(&mut first)?;
            other.join().expect("launching does not panic")
        })?;
        let same = first.bits()? == expected && second.bits()? == expected;
        ensure(same, &format!("{pass:?} differs from two threads"))?;
    }
    Ok("100 runs on each, equal".to_owned())
}

/// All problems, and the forward pass, use one workspace in turn: no call reads data that another call left there.
fn used_workspace(device: &Device) -> Fallible<String> {
    let others = [
        dense(Dtype::Bf16, 1, (300, 2000), (4, 4), 64),
        dense(Dtype::F16, 2, (1777, 130), (2, 1), 128).causal(),
    ];
    let others = others.iter().flat_map(|spec| Form::ALL.map(|form| (spec, form)));
    let others = others.map(|(spec, form)| {
        let call = form::plan(form, device, &backward::valid(spec.clone()))?;
        backward::bench(device, call.into(), &spec.clone().validate()?, None)
    });
    let mut others: Vec<Bench> = others.collect::<Fallible<_>>()?;
    for pass in Pass::DETERMINISTIC {
        let mut bench = pass.bench(device)?;
        let expected = bench.runs(1)?;
        let forward: Call = Forward::new(device, &pass.problem(BATCH).validate()?)?.into();
        let needed = others.iter().map(|other| other.call.workspace_bytes);
        let needed = [bench.call.workspace_bytes, forward.workspace_bytes].into_iter().chain(needed);
        bench.workspace = workspace_of_nan(device, &bench.stream, needed.max().unwrap_or_default())?;
        for other in &mut others {
            other.memory.run(&other.call, &bench.stream, &mut bench.workspace)?;
            let after_backward = bench.runs(1)?;
            bench.memory.run(&forward, &bench.stream, &mut bench.workspace)?;
            let same = after_backward == expected && bench.runs(1)? == expected;
            let plan = &other.call.plan;
            ensure(same, &format!("{pass:?} differs after this plan in the same workspace:\n{plan}"))?;
        }
    }
    Ok(format!("after each of {} others and the forward pass, equal", others.len()))
}

/// A sequence's results do not depend on the other sequences of the batch.
fn sequences_alone(device: &Device) -> Fallible<String> {
    for pass in Pass::all() {
        let mut all = pass.bench(device)?;
        let together = all.runs(1)?;
        for index in 0..BATCH {
            let mut one = Bench::new(device, pass.call(device, 1)?)?;
            one.memory = all.memory.of_sequence(device, &one.stream, &one.call, (index, BATCH))?;
            let part: Bits = together
                .iter()
                .map(|bits| bits[index * bits.len() / BATCH..(index + 1) * bits.len() / BATCH].to_vec())
                .collect();
            ensure(pass.are_same(&one.runs(1)?, &part), &format!("sequence {index} of {pass:?} differs"))?;
        }
    }
    Ok(format!("each of {BATCH} sequences as alone"))
}

/// Launches allocate no device memory, as the driver's free memory shows. Capturing a graph shows it, too, because an
/// allocation would invalidate the capture.
fn no_allocations(device: &Device) -> Fallible<String> {
    for pass in Pass::all() {
        let mut bench = pass.bench(device)?;
        let mut free_after_runs = || -> Fallible<usize> {
            bench.runs(400)?;
            Ok(device.memory()?.free)
        };
        // The driver may allocate for its first copies and launches.
        let (before, after) = (free_after_runs()?, free_after_runs()?);
        ensure(before == after, &format!("{before} bytes are free, {after} after 400 runs of {pass:?}"))?;
        bench.capture(10)?;
    }
    Ok("as much memory is free after 400 runs of each pass as before".to_owned())
}

/// Memory that is too small, misaligned, or used for another tensor is refused. Nothing is launched, and the next run
/// is correct.
fn refused_memories(device: &Device) -> Fallible<String> {
    let mut said = Vec::new();
    for pass in Pass::DETERMINISTIC {
        let mut bench = pass.bench(device)?;
        let expected = bench.runs(1)?;
        let call = Arc::clone(&bench.call);
        for (tensor, needed) in call.tensors.iter().map(|tensor| (tensor.name, tensor.bytes())) {
            let given = needed - 1;
            let error = run_with(&mut bench, tensor, device.alloc(given)?);
            let (given, needed) = (given as u64, needed as u64);
            said.push(refused(error, PlacementError::BufferSize { tensor, given, needed })?);
        }
        let needed = call.workspace_bytes;
        let given = needed - 1;
        let whole = replace(&mut bench.workspace, Workspace::new(device, &bench.stream, given)?);
        let error = bench.run().err();
        bench.workspace = whole;
        said.push(refused(error, PlacementError::WorkspaceSize { given, needed })?);

        let output = if let Pass::Forward(_) = pass { "o" } else { "dk" };
        let (written, bytes) = (bench.memory.get(output), bench.memory.get("k").bytes());
        let at = written.address()..written.address() + written.bytes() as u64;
        let over = part(device, written, 0, bytes);
        let error = run_with(&mut bench, "k", over);
        let other_at = at.start..at.start + bytes as u64;
        said.push(refused(error, PlacementError::Overlap { output, at, other: "k", other_at })?);
        let longer = device.alloc(bytes + 8)?;
        let error = run_with(&mut bench, "k", part(device, &longer, 8, bytes));
        let address = longer.address() + 8;
        said.push(refused(error, PlacementError::Misaligned { tensor: "k", address, alignment: 16 })?);
        ensure(bench.runs(1)? == expected, &format!("{pass:?} differs after what was refused"))?;
    }
    Ok(said.join("; "))
}

/// The error of a run with this memory in place of a tensor.
fn run_with(bench: &mut Bench, tensor: &str, memory: DeviceBuffer) -> Option<OperationError> {
    let own = replace(bench.memory.get_mut(tensor), memory);
    let error = bench.run().err();
    *bench.memory.get_mut(tensor) = own;
    error
}

/// The message of the error, if it is the expected one.
pub(crate) fn refused(
    error: Option<OperationError>,
    expected: impl Into<OperationError>,
) -> Result<String, String> {
    let expected = expected.into();
    match error {
        Some(error) if error == expected => Ok(error.to_string()),
        Some(error) => Err(format!("refused otherwise than with {expected}: {error}")),
        None => Err(format!("not refused: {expected}")),
    }
}
