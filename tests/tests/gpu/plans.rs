//! Compiled plans of the forward pass. The results of all plans must be equal bit by bit, and equal to the exact result
//! if it is known. `attention` judges other results. If `CUDA_CACHE_DISABLE=1` is set, the first plan takes the time
//! that it takes on a new machine; otherwise, the time that it takes in a new process.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use fa3_cuda::cudarc::driver::CudaContext;
use fa3_cuda::host::{Device, Forward, OperationError, Workspace};
use fa3_sched::Scheduler;
use fa3_sched::forward::PlanOptions;
use fa3_types::{Dtype, Problem, ProblemSpec, Shape};
use half::bf16;

use crate::bench::{Bench, Bits, noise};
use crate::host::kernels;
use crate::{Check, Fallible, ensure};

/// The times of making plans come first, before any kernel is compiled.
pub(crate) const CHECKS: [(&str, Check); 9] = [
    ("plans::making_one", time_of_making),
    ("plans::mean_of_ones", mean_of_ones),
    ("plans::all_schedulers", schedulers),
    ("plans::clusters", clusters),
    ("plans::strangers_between", strangers_between),
    ("plans::slices_of_cudarc", slices),
    ("plans::nothing_to_compute", nothing),
    ("plans::refusals", refusals),
    ("plans::launching", time_of_launching),
];

/// A bench with random inputs between -1 and 1, which are equal for equal problems.
fn bench(device: &Device, problem: &Problem, options: &PlanOptions) -> Fallible<Bench> {
    bench_of(device, Forward::with(device, problem, options)?)
}

fn bench_of(device: &Device, forward: Forward) -> Fallible<Bench> {
    let mut bench = Bench::new(device, forward)?;
    bench.memory.give(&bench.stream, noise(1.0))?;
    Ok(bench)
}

/// A causal problem of 144 tiles of uneven cost, with six query heads on two KV heads.
fn problem() -> Result<Problem, OperationError> {
    let q = Shape { batch: 3, seqlen: 1000, heads: 6, head_dim: 128 };
    let kv = Shape { seqlen: 1111, heads: 2, ..q };
    Ok(ProblemSpec::dense(Dtype::Bf16, q, kv).causal().validate()?)
}

fn scheduled(scheduler: Scheduler) -> PlanOptions {
    PlanOptions::default().scheduler(scheduler)
}

/// A bench whose launches use a tile counter (dynamic scheduler).
fn dynamic(device: &Device) -> Fallible<Bench> {
    bench(device, &problem()?, &scheduled(Scheduler::DynamicPersistent))
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

/// O is 1, and LSE is the logarithm of the number of keys plus the score.
fn mean_of_ones(device: &Device) -> Fallible<String> {
    let mut bench = bench(device, &problem()?, &PlanOptions::default())?;
    let one = bf16::ONE.to_le_bytes();
    bench.memory.give(&bench.stream, |tensor| Some(one.repeat(tensor.len()).into()))?;
    let bits = bench.runs(1)?;
    ensure(bits[0].chunks(2).all(|bits| *bits == one), "an element of O is not 1")?;
    let worst = bits[1].as_chunks().0.iter().enumerate().map(|(index, &lse)| {
        let keys = 1111 - 1000 + 1 + index % 1000;
        (f64::from(f32::from_le_bytes(lse)) - (keys as f64).ln() - 128_f64.sqrt()).abs()
    });
    let worst = worst.fold(0.0, |worst: f64, error| if error <= worst { worst } else { error });
    ensure(worst < 5e-5, &format!("LSE is off by {worst}"))?;
    Ok(format!("LSE within {worst:.1e}"))
}

fn schedulers(device: &Device) -> Fallible<String> {
    let all = [Scheduler::OneTile, Scheduler::StaticPersistent, Scheduler::DynamicPersistent];
    let bits =
        |options: &PlanOptions| -> Fallible<Bits> { Ok(bench(device, &problem()?, options)?.runs(1)?) };
    let [one, fixed, drawn] = all.map(|scheduler| bits(&scheduled(scheduler)));
    let one = one?;
    ensure(one == fixed? && one == drawn?, "schedulers differ")?;
    let fewer = scheduled(Scheduler::DynamicPersistent).sms(NonZeroU32::new(7).ok_or("no sms")?);
    let forward = Forward::with(device, &problem()?, &fewer)?;
    ensure(forward.plan().dense().unwrap().schedule().grid() == 7, "there are not 7 CTAs")?;
    ensure(bench_of(device, forward)?.runs(1)? == one, "7 SMs give another result")?;
    Ok("equal, also on 7 SMs".to_owned())
}

/// Results do not depend on which CTA of a cluster loaded K and V.
fn clusters(device: &Device) -> Fallible<String> {
    for head_dim in [64, 128, 256] {
        let q = Shape { batch: 5, seqlen: 1000, heads: 6, head_dim };
        let kv = Shape { seqlen: 1111, heads: 2, ..q };
        let problem = ProblemSpec::dense(Dtype::Bf16, q, kv).validate()?;
        let alone = bench(device, &problem, &PlanOptions::default().clusters(false))?.runs(1)?;
        let forward = Forward::new(device, &problem)?;
        ensure(forward.plan().cluster() == 2, "the plan has no clusters")?;
        let mut pairs = bench_of(device, forward)?;
        ensure(pairs.runs(1)? == alone, &format!("clusters give another result of head_dim {head_dim}"))?;
        let graph = pairs.capture(2)?;
        pairs.memory.poison(&pairs.stream)?;
        pairs.replay(&graph, &pairs.stream)?;
        ensure(pairs.bits()? == alone, &format!("their graph gives another result of head_dim {head_dim}"))?;
    }
    Ok("equal to CTAs alone, also from a graph".to_owned())
}

/// Launches share a workspace, and each launch waits only for the previous grid. If this grid is another library's
/// kernel that was launched early (PDL) and does not wait, it ends while the launch before it still runs. NVIDIA does
/// not document what the next wait covers in this case.
#[allow(unsafe_code, reason = "a launch is unsafe")]
fn strangers_between(device: &Device) -> Fallible<String> {
    let shape = Shape { batch: 2, seqlen: 4096, heads: 8, head_dim: 128 };
    let problem = ProblemSpec::dense(Dtype::Bf16, shape, shape).causal().validate()?;
    let mut case = bench(device, &problem, &scheduled(Scheduler::DynamicPersistent))?;
    let expected = case.runs(1)?;
    for triggers in [false, true] {
        let stranger = kernels::compiled(device, &kernels::stranger(triggers))?;
        for round in 0..500 {
            case.memory.poison(&case.stream)?;
            case.run()?;
            for _ in 0..=round % 3 {
                // SAFETY: the kernel accesses no memory.
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

fn slices(device: &Device) -> Fallible<String> {
    let forward = Forward::new(device, &problem()?)?;
    let mut bench = bench(device, &problem()?, &PlanOptions::default())?;
    let [o, lse]: [Vec<u8>; 2] = bench.runs(1)?.try_into().map_err(|_| "O and LSE are all outputs")?;
    let stream = CudaContext::new(0)?.new_stream()?;
    let upload = |name: &str| -> Fallible<_> {
        let bits: Vec<u16> = bench.memory.get(name).download(&bench.stream)?;
        let values: Vec<bf16> = bits.into_iter().map(bf16::from_bits).collect();
        Ok(stream.clone_htod(&values)?)
    };
    let (q, k, v) = (upload("q")?, upload("k")?, upload("v")?);
    let mut both = stream.alloc_zeros::<bf16>(o.len())?;
    let mut lse_slice = stream.alloc_zeros::<f32>(lse.len() / 4)?;
    let mut second_half = both.slice_mut(o.len() / 2..);
    forward.run_slices(&stream, &q, &k, &v, &mut second_half, &mut lse_slice, &mut bench.workspace)?;
    let given = stream.clone_dtoh(&both)?.into_iter().flat_map(bf16::to_le_bytes).collect::<Vec<u8>>();
    ensure(given[o.len()..] == o, "O is another one")?;
    ensure(given[..o.len()].iter().all(|byte| *byte == 0), "something before O was written")?;
    let given = stream.clone_dtoh(&lse_slice)?.into_iter().flat_map(f32::to_le_bytes);
    ensure(given.eq(lse), "LSE is another one")?;
    Ok("equal, O in a view".to_owned())
}

fn nothing(device: &Device) -> Fallible<String> {
    let rows = Shape { batch: 2, seqlen: 40, heads: 2, head_dim: 64 };
    let none = Shape { seqlen: 0, ..rows };
    let dense = |q, kv| ProblemSpec::dense(Dtype::Bf16, q, kv).validate();
    let mut no_rows = bench(device, &dense(none, rows)?, &PlanOptions::default())?;
    ensure(no_rows.call.kernels == 0, "a kernel for no rows")?;
    ensure(no_rows.runs(1)?.iter().all(Vec::is_empty), "results of no rows")?;
    let no_keys = bench(device, &dense(rows, none)?, &PlanOptions::default())?.runs(1)?;
    ensure(no_keys[0].iter().all(|byte| *byte == 0), "O without keys is not 0")?;
    let least = f32::NEG_INFINITY.to_le_bytes();
    ensure(no_keys[1].chunks(4).all(|lse| *lse == least), "LSE without keys is not -inf")?;
    Ok("no rows, no keys".to_owned())
}

fn refusals(device: &Device) -> Fallible<String> {
    let shape = Shape { batch: 1, seqlen: 64, heads: 1, head_dim: 64 };
    let f32 = Forward::new(device, &ProblemSpec::dense(Dtype::F32, shape, shape).validate()?).err();
    ensure(matches!(f32, Some(OperationError::Forward(_))), &format!("f32: {f32:?}"))?;
    // The default stream cannot be captured. A stream can be used after a failed capture.
    let mut case = dynamic(device)?;
    ensure(device.default_stream().begin_capture().is_err(), "the default stream is captured")?;
    ensure(case.stream.end_capture().is_err(), "a capture ends that did not begin")?;
    let expected = case.runs(1)?;
    case.stream.begin_capture()?;
    let waited = case.stream.synchronize();
    ensure(waited.is_err() && case.stream.end_capture().is_err(), "a captured stream was waited for")?;
    ensure(case.runs(1)? == expected, "another result after a broken capture")?;
    Ok("said what is wrong, and went on".to_owned())
}

/// Host time per launch. The GPU must keep up, so that no launch waits for room in the queue.
fn time_of_launching(device: &Device) -> Fallible<String> {
    let shape = Shape { batch: 1, seqlen: 512, heads: 8, head_dim: 128 };
    let problem = ProblemSpec::dense(Dtype::Bf16, shape, shape).causal().validate()?;
    let mut said = Vec::new();
    for scheduler in [Scheduler::OneTile, Scheduler::DynamicPersistent] {
        let forward = Forward::with(device, &problem, &scheduled(scheduler))?;
        let mut case = bench(device, &problem, &scheduled(scheduler))?;
        let run = micros(&mut case, |case, _| case.run())?;
        // Three tensor maps are encoded for each launch.
        let at = |names: [&'static str; 3]| {
            let place = |name, memory| (name, Some(case.memory.get(memory).address()));
            let [q, k, v] = names;
            [place("q", q), place("k", k), place("v", v), place("o", "o"), place("lse", "lse")]
        };
        let places = [at(["q", "k", "v"]), at(["k", "v", "q"])];
        let moved = micros(&mut case, |case, turn| launch(&forward, case, &places[turn % 2]))?;
        said.push(format!("{scheduler} {run:.2} us, with tensors elsewhere {moved:.2} us"));
        ensure(run < 10.0 && moved < 10.0, &format!("more than 10 us: {}", said.join("; ")))?;
    }
    Ok(said.join("; "))
}

#[allow(unsafe_code, reason = "a launch over addresses is unsafe")]
fn launch(forward: &Forward, case: &Bench, at: &[(&'static str, Option<u64>)]) -> Result<(), OperationError> {
    // SAFETY: the callers pass this case's tensors, and the case lives until its stream is synchronized.
    unsafe { forward.launch(&case.stream, at, Workspace::parts(case.workspace.address())) }
}

/// The median of 1000 calls, in microseconds.
fn micros(
    case: &mut Bench,
    mut put: impl FnMut(&mut Bench, usize) -> Result<(), OperationError>,
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
