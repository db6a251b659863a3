//! Made plans of the forward pass. Whether results are right `attention` says; here they are equal bit by bit, however
//! they were launched, and as expected where that is obvious. The times of the first plan are those of a new machine
//! with `CUDA_CACHE_DISABLE=1`, and of a new process without.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use fa3_cuda::cudarc::driver::CudaContext;
use fa3_cuda::host::{
    Device, DeviceBuffer, Forward, Graph, HostError, OperationError, PlacementError, Stream, Tensors,
    Workspace,
};
use fa3_sched::Scheduler;
use fa3_sched::forward::PlanOptions;
use fa3_types::{Dtype, Problem, ProblemSpec, Shape};
use half::bf16;

use crate::host::kernels;
use crate::{Check, Fallible, ensure};

/// The times of making come first: nothing is compiled yet.
pub(crate) const CHECKS: [(&str, Check); 13] = [
    ("plans::making_one", time_of_making),
    ("plans::mean_of_ones", mean_of_ones),
    ("plans::all_schedulers", schedulers),
    ("plans::clusters", clusters),
    ("plans::graph", graph),
    ("plans::graph_beside_its_stream", graph_beside_its_stream),
    ("plans::strangers_between", strangers_between),
    ("plans::two_streams", two_streams),
    ("plans::two_threads", two_threads),
    ("plans::slices_of_cudarc", slices),
    ("plans::nothing_to_compute", nothing),
    ("plans::refusals", refusals),
    ("plans::launching", time_of_launching),
];

/// A plan with tensors of its own.
struct Case {
    forward: Forward,
    stream: Stream,
    q: DeviceBuffer,
    k: DeviceBuffer,
    v: DeviceBuffer,
    o: DeviceBuffer,
    lse: DeviceBuffer,
    workspace: Workspace,
}

/// O's bits and LSE's.
type Bits = (Vec<u16>, Vec<u32>);

impl Case {
    /// With a stream of its own and numbers between -1 and 1, the same for equal problems.
    fn new(device: &Device, problem: &Problem, options: &PlanOptions) -> Result<Case, OperationError> {
        let stream = device.stream()?;
        let mut state = 1_u32;
        let mut noise = |bytes: u64| -> Result<DeviceBuffer, HostError> {
            let mut next = || {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                bf16::from_f32((state >> 8) as f32 / (1 << 23) as f32 - 1.0).to_bits()
            };
            let bits: Vec<u16> = (0..bytes / 2).map(|_| next()).collect();
            device.upload(&stream, &bits)
        };
        let [q, k, v] = [problem.q(), problem.k(), problem.v()].map(|x| noise(x.extent_bytes().0));
        let (q, k, v) = (q?, k?, v?);
        let o = device.alloc(problem.o().extent_bytes().0 as usize)?;
        let lse = device.alloc(4 * problem.lse_shape().iter().product::<usize>())?;
        let forward = Forward::with(device, problem, options)?;
        let workspace = Workspace::new(device, &stream, forward.workspace_bytes())?;
        Ok(Case { forward, stream, q, k, v, o, lse, workspace })
    }

    /// Makes O and LSE NaN, in the stream's order.
    fn poison(&mut self) -> Result<(), HostError> {
        self.o.fill(&self.stream, 0xff)?;
        self.lse.fill(&self.stream, 0xff)
    }

    fn run(&mut self) -> Result<(), OperationError> {
        let Case { forward, stream, q, k, v, o, lse, workspace } = self;
        let tensors = Tensors::new([("q", &*q), ("k", &*k), ("v", &*v)], [("o", o), ("lse", lse)]);
        forward.run(stream, tensors, workspace)
    }

    fn bits(&self) -> Result<Bits, HostError> {
        Ok((self.o.download(&self.stream)?, self.lse.download(&self.stream)?))
    }

    /// The results of one launch.
    fn once(&mut self) -> Result<Bits, OperationError> {
        self.poison()?;
        self.run()?;
        Ok(self.bits()?)
    }

    /// A graph of `launches` launches.
    fn capture(&mut self, launches: usize) -> Result<Graph, OperationError> {
        self.stream.begin_capture()?;
        let launched = (0..launches).try_for_each(|_| self.run());
        let graph = self.stream.end_capture();
        launched?;
        Ok(graph?)
    }

    #[allow(unsafe_code, reason = "a launch over addresses is unsafe")]
    fn launch(&self, at: &[(&'static str, Option<u64>)]) -> Result<(), OperationError> {
        // SAFETY: the callers place this case's tensors, and the case lives until its stream is synchronised.
        unsafe { self.forward.launch(&self.stream, at, Workspace::parts(self.workspace.address())) }
    }

    /// Replays a graph on `stream`.
    #[allow(unsafe_code, reason = "the launch of a graph is unsafe")]
    fn replay(&self, graph: &Graph, stream: &Stream) -> Result<(), HostError> {
        // SAFETY: it captured launches of this case, which lives until its results are there.
        unsafe { graph.launch(stream) }
    }
}

/// A causal problem of 144 uneven tiles, six query heads on two key/value heads.
fn problem() -> Result<Problem, OperationError> {
    let q = Shape { batch: 3, seqlen: 1000, heads: 6, head_dim: 128 };
    let kv = Shape { seqlen: 1111, heads: 2, ..q };
    Ok(ProblemSpec::dense(Dtype::Bf16, q, kv).causal().validate()?)
}

fn scheduled(scheduler: Scheduler) -> PlanOptions {
    PlanOptions::default().scheduler(scheduler)
}

/// Launches that need a ticket.
fn dynamic(device: &Device) -> Result<Case, OperationError> {
    Case::new(device, &problem()?, &scheduled(Scheduler::DynamicPersistent))
}

fn time_of_making(device: &Device) -> Fallible<String> {
    let timed = |problem: &Problem| -> Result<(Duration, bool), OperationError> {
        let start = Instant::now();
        let forward = Forward::new(device, problem)?;
        let compiled = forward.functions().any(|function| function.report().is_some());
        Ok((start.elapsed(), compiled))
    };
    let shape = Shape { batch: 2, seqlen: 4096, heads: 16, head_dim: 128 };
    let of_length = |seqlen| {
        let shape = Shape { seqlen, ..shape };
        ProblemSpec::dense(Dtype::Bf16, shape, shape).causal().validate()
    };
    let (first, compiled) = timed(&of_length(4096)?)?;
    let (second, _) = timed(&of_length(4096)?)?;
    let (other, _) = timed(&of_length(5000)?)?;
    let how = if compiled { "compiled" } else { "from the driver's cache" };
    ensure(first < Duration::from_millis(1500), &format!("the first plan took {first:?}"))?;
    Ok(format!("first {first:.1?} ({how}), again {second:.1?}, with another length {other:.1?}"))
}

/// O is 1, and LSE the logarithm of the number of keys plus the score.
fn mean_of_ones(device: &Device) -> Fallible<String> {
    let problem = problem()?;
    let mut case = Case::new(device, &problem, &PlanOptions::default())?;
    let ones = |buffer: &DeviceBuffer| vec![bf16::ONE.to_bits(); buffer.bytes() / 2];
    for buffer in [&mut case.q, &mut case.k, &mut case.v] {
        let ones = ones(buffer);
        buffer.upload(&case.stream, &ones)?;
    }
    let (o, lse) = case.once()?;
    ensure(o.iter().all(|bits| *bits == bf16::ONE.to_bits()), "an element of O is not 1")?;
    let worst = lse.iter().enumerate().map(|(index, bits)| {
        let keys = 1111 - 1000 + 1 + index % 1000;
        (f64::from(f32::from_bits(*bits)) - (keys as f64).ln() - 128_f64.sqrt()).abs()
    });
    let worst = worst.fold(0.0, |worst: f64, error| if error <= worst { worst } else { error });
    ensure(worst < 5e-5, &format!("LSE is off by {worst}"))?;
    Ok(format!(
        "{} tiles, LSE within {worst:.1e}",
        case.forward.plan().numbered().unwrap().schedule().num_tiles()
    ))
}

fn schedulers(device: &Device) -> Fallible<String> {
    let all = [Scheduler::OneTile, Scheduler::StaticPersistent, Scheduler::DynamicPersistent];
    let results = all.map(|scheduler| Case::new(device, &problem()?, &scheduled(scheduler))?.once());
    let [one, fixed, drawn] = results;
    let one = one?;
    ensure(one == fixed? && one == drawn?, "schedulers differ")?;
    let fewer = scheduled(Scheduler::DynamicPersistent).sms(NonZeroU32::new(7).ok_or("no sms")?);
    let mut case = dynamic(device)?;
    case.forward = Forward::with(device, &problem()?, &fewer)?;
    ensure(case.forward.plan().numbered().unwrap().schedule().grid() == 7, "there are not 7 CTAs")?;
    ensure(case.once()? == one, "7 SMs give another result")?;
    Ok("equal, also on 7 SMs".to_owned())
}

/// Results do not depend on who loaded K and V.
fn clusters(device: &Device) -> Fallible<String> {
    for head_dim in [64, 128, 256] {
        let q = Shape { batch: 5, seqlen: 1000, heads: 6, head_dim };
        let kv = Shape { seqlen: 1111, heads: 2, ..q };
        let problem = ProblemSpec::dense(Dtype::Bf16, q, kv).validate()?;
        let alone = Case::new(device, &problem, &PlanOptions::default().clusters(false))?.once()?;
        let mut pairs = Case::new(device, &problem, &PlanOptions::default())?;
        ensure(pairs.forward.plan().cluster() == 2, "the plan has no clusters")?;
        ensure(pairs.once()? == alone, &format!("clusters give another result of head_dim {head_dim}"))?;
        let graph = pairs.capture(2)?;
        pairs.poison()?;
        pairs.replay(&graph, &pairs.stream)?;
        ensure(pairs.bits()? == alone, &format!("their graph gives another result of head_dim {head_dim}"))?;
    }
    Ok("equal to CTAs alone, also from a graph".to_owned())
}

fn graph(device: &Device) -> Fallible<String> {
    let mut case = dynamic(device)?;
    let expected = case.once()?;
    let graph = case.capture(2)?;
    for _ in 0..3 {
        case.poison()?;
        case.replay(&graph, &case.stream)?;
        ensure(case.bits()? == expected, "the graph gives another result")?;
    }
    Ok("3 replays of 2 launches, equal".to_owned())
}

/// The graph on one stream while the stream that it was captured from launches the same plan into other memory.
fn graph_beside_its_stream(device: &Device) -> Fallible<String> {
    let (mut captured, mut other) = (dynamic(device)?, dynamic(device)?);
    let expected = captured.once()?;
    let graph = captured.capture(1)?;
    let second = device.stream()?;
    captured.poison()?;
    captured.stream.synchronize()?;
    for _ in 0..50 {
        captured.replay(&graph, &second)?;
        let Case { forward, stream, .. } = &captured;
        let Case { q, k, v, o, lse, workspace, .. } = &mut other;
        let tensors = Tensors::new([("q", &*q), ("k", &*k), ("v", &*v)], [("o", o), ("lse", lse)]);
        forward.run(stream, tensors, workspace)?;
    }
    second.synchronize()?;
    captured.stream.synchronize()?;
    ensure(captured.bits()? == expected && other.bits()? == expected, "results differ")?;
    Ok("50 launches of each, equal".to_owned())
}

/// Launches share a workspace, and each waits only for the grid before it. That may be a stranger's, launched early
/// itself, that waits for nobody and so ends while the launch before it still counts. NVIDIA documents nothing of what
/// the next wait covers then.
#[allow(unsafe_code, reason = "a launch is unsafe")]
fn strangers_between(device: &Device) -> Fallible<String> {
    let shape = Shape { batch: 2, seqlen: 4096, heads: 8, head_dim: 128 };
    let problem = ProblemSpec::dense(Dtype::Bf16, shape, shape).causal().validate()?;
    let mut case = Case::new(device, &problem, &scheduled(Scheduler::DynamicPersistent))?;
    let expected = case.once()?;
    for triggers in [false, true] {
        let stranger = kernels::compiled(device, &kernels::stranger(triggers))?;
        for round in 0..500 {
            case.poison()?;
            case.run()?;
            for _ in 0..=round % 3 {
                // SAFETY: it touches no memory.
                unsafe { stranger.launch_dependent(&case.stream, [1, 1, 1], &[]) }?;
            }
            case.run()?;
            case.run()?;
            let same = case.bits()? == expected;
            ensure(same, &format!("another result in round {round}, triggers: {triggers}"))?;
        }
    }
    Ok("one to three between launches, 1000 times, equal".to_owned())
}

fn two_streams(device: &Device) -> Fallible<String> {
    let (mut first, mut second) = (dynamic(device)?, dynamic(device)?);
    let expected = first.once()?;
    for _ in 0..100 {
        first.run()?;
        second.run()?;
    }
    ensure(first.bits()? == expected && second.bits()? == expected, "results differ")?;
    Ok("100 launches on each, equal".to_owned())
}

/// One plan is launched from two threads at once.
fn two_threads(device: &Device) -> Fallible<String> {
    let (mut first, mut second) = (dynamic(device)?, dynamic(device)?);
    let expected = first.once()?;
    let shared = Forward::with(device, &problem()?, &scheduled(Scheduler::DynamicPersistent))?;
    let launches = |case: &mut Case| -> Result<(), OperationError> {
        let Case { stream, q, k, v, o, lse, workspace, .. } = case;
        (0..100).try_for_each(|_| {
            let tensors =
                Tensors::new([("q", &*q), ("k", &*k), ("v", &*v)], [("o", &mut *o), ("lse", &mut *lse)]);
            shared.run(stream, tensors, workspace)
        })
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| launches(&mut second));
        launches(&mut first)?;
        other.join().expect("launching does not panic")
    })?;
    ensure(first.bits()? == expected && second.bits()? == expected, "results differ")?;
    Ok("100 launches on each, equal".to_owned())
}

fn slices(device: &Device) -> Fallible<String> {
    let problem = problem()?;
    let mut case = Case::new(device, &problem, &PlanOptions::default())?;
    let (o, lse) = case.once()?;
    let stream = CudaContext::new(0)?.new_stream()?;
    let upload = |buffer: &DeviceBuffer| -> Fallible<_> {
        let bits: Vec<u16> = buffer.download(&case.stream)?;
        let values: Vec<bf16> = bits.into_iter().map(bf16::from_bits).collect();
        Ok(stream.clone_htod(&values)?)
    };
    let (q, k, v) = (upload(&case.q)?, upload(&case.k)?, upload(&case.v)?);
    let mut both = stream.alloc_zeros::<bf16>(2 * o.len())?;
    let mut lse_slice = stream.alloc_zeros::<f32>(lse.len())?;
    let mut second_half = both.slice_mut(o.len()..);
    case.forward.run_slices(&stream, &q, &k, &v, &mut second_half, &mut lse_slice, &mut case.workspace)?;
    let bits: Vec<u16> = stream.clone_dtoh(&both)?.into_iter().map(bf16::to_bits).collect();
    ensure(bits[o.len()..] == o, "O is another one")?;
    ensure(bits[..o.len()].iter().all(|bits| *bits == 0), "something before O was written")?;
    let lse_bits: Vec<u32> = stream.clone_dtoh(&lse_slice)?.into_iter().map(f32::to_bits).collect();
    ensure(lse_bits == lse, "LSE is another one")?;
    Ok("equal, O in a view".to_owned())
}

fn nothing(device: &Device) -> Fallible<String> {
    let rows = Shape { batch: 2, seqlen: 40, heads: 2, head_dim: 64 };
    let none = Shape { seqlen: 0, ..rows };
    let mut no_rows =
        Case::new(device, &ProblemSpec::dense(Dtype::Bf16, none, rows).validate()?, &PlanOptions::default())?;
    ensure(no_rows.forward.functions().next().is_none(), "a kernel for no rows")?;
    ensure(no_rows.once()? == (vec![], vec![]), "results of no rows")?;
    let no_keys = ProblemSpec::dense(Dtype::Bf16, rows, none).validate()?;
    let (o, lse) = Case::new(device, &no_keys, &PlanOptions::default())?.once()?;
    ensure(o.iter().all(|bits| *bits == 0), "O without keys is not 0")?;
    ensure(
        lse.iter().all(|bits| f32::from_bits(*bits) == f32::NEG_INFINITY),
        "LSE without keys is not -inf",
    )?;
    Ok("no rows, no keys".to_owned())
}

fn refusals(device: &Device) -> Fallible<String> {
    let mut case = dynamic(device)?;
    case.o = device.alloc(16)?;
    let small = case.run().err();
    ensure(
        matches!(small, Some(OperationError::Placement(PlacementError::BufferSize { .. }))),
        &format!("a small buffer: {small:?}"),
    )?;
    let shape = Shape { batch: 1, seqlen: 64, heads: 1, head_dim: 64 };
    let f32 = Forward::new(device, &ProblemSpec::dense(Dtype::F32, shape, shape).validate()?).err();
    ensure(matches!(f32, Some(OperationError::Forward(_))), &format!("f32: {f32:?}"))?;
    // The default stream cannot be captured, and a stream can be used after a capture that failed.
    ensure(device.default_stream().begin_capture().is_err(), "the default stream is captured")?;
    ensure(case.stream.end_capture().is_err(), "a capture ends that did not begin")?;
    let mut case = dynamic(device)?;
    let expected = case.once()?;
    case.stream.begin_capture()?;
    let waited = case.stream.synchronize();
    ensure(waited.is_err() && case.stream.end_capture().is_err(), "a captured stream was waited for")?;
    ensure(case.once()? == expected, "another result after a broken capture")?;
    Ok("said what is wrong, and went on".to_owned())
}

/// Host time while the GPU keeps up, so that no launch waits for room in its queue.
fn time_of_launching(device: &Device) -> Fallible<String> {
    let shape = Shape { batch: 1, seqlen: 512, heads: 8, head_dim: 128 };
    let problem = ProblemSpec::dense(Dtype::Bf16, shape, shape).causal().validate()?;
    let mut said = Vec::new();
    for scheduler in [Scheduler::OneTile, Scheduler::DynamicPersistent] {
        let mut case = Case::new(device, &problem, &scheduled(scheduler))?;
        let run = micros(&mut case, |case, _| case.run())?;
        // Three tensor maps are encoded for each launch.
        let at = |q: u64, k: u64, v: u64| {
            let [q, k, v, o, lse] = [q, k, v, case.o.address(), case.lse.address()].map(Some);
            [("q", q), ("k", k), ("v", v), ("o", o), ("lse", lse)]
        };
        let [q, k, v] = [&case.q, &case.k, &case.v].map(DeviceBuffer::address);
        let places = [at(q, k, v), at(k, v, q)];
        let moved = micros(&mut case, |case, turn| case.launch(&places[turn % 2]))?;
        said.push(format!("{scheduler} {run:.2} us, with tensors elsewhere {moved:.2} us"));
        ensure(run < 10.0 && moved < 10.0, &format!("more than 10 us: {}", said.join("; ")))?;
    }
    Ok(said.join("; "))
}

/// The median of 1000 calls, in microseconds.
fn micros(
    case: &mut Case,
    mut put: impl FnMut(&mut Case, usize) -> Result<(), OperationError>,
) -> Result<f64, OperationError> {
    let mut times = Vec::new();
    for turn in 0..1000 {
        let start = Instant::now();
        put(case, turn)?;
        times.push(start.elapsed());
        if turn % 50 == 0 {
            case.stream.synchronize()?;
        }
    }
    times.sort_unstable();
    Ok(times[times.len() / 2].as_secs_f64() * 1e6)
}
