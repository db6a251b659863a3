//! Times of attention on a GPU, whose results were checked.

mod backward;
mod oracle;
mod outcome;

use std::hash::{DefaultHasher, Hash, Hasher};

use fa3::cuda::{
    Device, DeviceBuffer, Forward, HostError, Lengths, OperationError, Stream, Tensors, Workspace,
};
use fa3_ref::rows::SatisfiedRows;
use fa3_sched::forward::PlanOptions;
use fa3_types::{KnownProblem, TensorDesc};
use indicatif::ProgressBar;
use rayon::prelude::*;

use crate::launches;
use oracle::{Oracle, UnmeasuredDtype, Wrong};
use outcome::Timing;

pub(crate) use backward::backward;
pub(crate) use outcome::{Machine, Outcome, Pace, median};

/// The device memory of a problem, and the reference for its result.
struct Fixture {
    device: Device,
    stream: Stream,
    oracle: Oracle,
    lengths: Lengths,
    q: DeviceBuffer,
    k: DeviceBuffer,
    v: DeviceBuffer,
    o: DeviceBuffer,
    lse: DeviceBuffer,
}

/// A candidate whose result has passed the checks so far.
struct Contender {
    pass: Pass,
    satisfied: SatisfiedRows,
    /// Hash of the result.
    result: u64,
    launches: u32,
    millis: Vec<f64>,
}

/// A forward pass and its workspace.
struct Pass {
    forward: Forward,
    workspace: Workspace,
}

#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error(transparent)]
    Wrong(#[from] Wrong),
    #[error(transparent)]
    Unmeasured(#[from] UnmeasuredDtype),
    #[error(transparent)]
    Failed(#[from] OperationError),
}

impl From<HostError> for Refusal {
    fn from(error: HostError) -> Refusal {
        Refusal::Failed(error.into())
    }
}

/// Measures `problem` with each of `options`, on numbers from N(0, 1). The candidates take turns, so that whatever
/// slows the GPU down affects all of them. `progress` advances by [`steps`].
pub(crate) fn race(
    device: &Device,
    problem: &KnownProblem,
    options: &[PlanOptions],
    pace: Pace,
    progress: &ProgressBar,
) -> Vec<Outcome> {
    let end = progress.position() + steps(options.len(), pace) as u64;
    let outcomes = match Fixture::new(device, problem) {
        Ok(mut stand) => {
            // Compiled in parallel, because the driver needs half a second for each.
            let forwards: Vec<Result<Forward, OperationError>> =
                options.par_iter().map(|options| Forward::with(device, problem, options)).collect();
            stand.race(forwards, pace, progress)
        }
        Err(error) => vec![Outcome::Failed(error.to_string()); options.len()],
    };
    progress.set_position(end);
    outcomes
}

/// The number of progress steps of a race of `contenders` candidates.
pub(crate) fn steps(contenders: usize, pace: Pace) -> usize {
    contenders * (1 + pace.rounds as usize)
}

/// The order of the candidates within a round. Each round begins with another candidate, and each candidate follows
/// another one than in the previous round, because the heat left by one candidate slows the next.
fn turns(count: usize, round: usize) -> impl Iterator<Item = usize> {
    // With a step that has a common divisor with `count`, some candidates would have no turn.
    let steps: Vec<usize> = (1..=count).filter(|&step| gcd(step, count) == 1).collect();
    (0..count).map(move |turn| (round + turn * steps[round % steps.len()]) % count)
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

impl Fixture {
    fn new(device: &Device, problem: &KnownProblem) -> Result<Fixture, Refusal> {
        let stream = device.stream()?;
        // Memory is allocated first, so that a problem that is too large fails before its inputs are drawn.
        let alloc = |x: &TensorDesc| device.alloc(x.extent_bytes().0 as usize);
        let (mut q, mut k, mut v) = (alloc(problem.q())?, alloc(problem.k())?, alloc(problem.v())?);
        let o = alloc(problem.o())?;
        let lse = device.alloc(size_of::<f32>() * problem.lse_shape().iter().product::<usize>())?;
        let mut oracle = Oracle::new(problem)?;
        for (buffer, bytes) in [&mut q, &mut k, &mut v].into_iter().zip(std::mem::take(&mut oracle.qkv)) {
            buffer.upload(&stream, &bytes)?;
        }
        let lengths = Lengths::upload(device, &stream, problem)?;
        Ok(Fixture { device: device.clone(), stream, oracle, lengths, q, k, v, o, lse })
    }

    fn race(
        &mut self,
        forwards: Vec<Result<Forward, OperationError>>,
        pace: Pace,
        progress: &ProgressBar,
    ) -> Vec<Outcome> {
        let admit = |forward: Result<Forward, OperationError>| {
            progress.inc(1);
            self.admit(forward?, pace.slice_ms)
        };
        let mut contenders: Vec<Result<Contender, Refusal>> = forwards.into_iter().map(admit).collect();
        for round in 0..pace.rounds as usize {
            for index in turns(contenders.len(), round) {
                self.advance(&mut contenders[index], Fixture::time);
                progress.inc(1);
            }
        }
        contenders.iter_mut().for_each(|contender| self.advance(contender, Fixture::check_again));
        contenders.into_iter().map(|contender| contender.map_or_else(Outcome::from, Outcome::from)).collect()
    }

    /// Runs a step for a candidate that has not failed yet.
    fn advance(
        &mut self,
        contender: &mut Result<Contender, Refusal>,
        step: fn(&mut Fixture, &mut Contender) -> Result<(), Refusal>,
    ) {
        if let Ok(right) = contender
            && let Err(refusal) = step(self, right)
        {
            *contender = Err(refusal);
        }
    }

    /// Computes once and checks the result. Then determines how many launches fill a slice, and warms up.
    fn admit(&mut self, forward: Forward, slice_ms: f64) -> Result<Contender, Refusal> {
        let workspace = Workspace::new(&self.device, &self.stream, forward.workspace_bytes())?;
        let mut pass = Pass { forward, workspace };
        let (o, lse) = self.compute(&mut pass)?;
        let satisfied = (self.oracle.check)(&o, &lse)?;
        let (stream, mut launch) = self.launch(&mut pass);
        let launches = launches::fill(stream, slice_ms, &mut launch)?;
        launches::time(stream, launches, launch)?;
        Ok(Contender { pass, satisfied, result: hash(&o, &lse), launches, millis: Vec::new() })
    }

    fn time(&mut self, contender: &mut Contender) -> Result<(), Refusal> {
        let (stream, launch) = self.launch(&mut contender.pass);
        contender.millis.push(launches::time(stream, contender.launches, launch)?);
        Ok(())
    }

    /// Checks that one more launch gives the same result as the first.
    fn check_again(&mut self, contender: &mut Contender) -> Result<(), Refusal> {
        let (o, lse) = self.compute(&mut contender.pass)?;
        if hash(&o, &lse) == contender.result { Ok(()) } else { Err(Wrong::Changed.into()) }
    }

    /// The stream, and a function that launches `pass` on it.
    fn launch(&mut self, pass: &mut Pass) -> (&Stream, impl FnMut() -> Result<(), OperationError>) {
        let Fixture { stream, lengths, q, k, v, o, lse, .. } = self;
        let (stream, lengths) = (&*stream, &*lengths);
        (stream, move || {
            let tensors =
                Tensors::new([("q", &*q), ("k", &*k), ("v", &*v)], [("o", &mut *o), ("lse", &mut *lse)]);
            pass.forward.run(stream, lengths.beside(tensors), &mut pass.workspace)
        })
    }

    /// The bits of O, and LSE. Both buffers are filled with NaN before the launch.
    fn compute(&mut self, pass: &mut Pass) -> Result<(Vec<u16>, Vec<f32>), OperationError> {
        self.o.fill(&self.stream, 0xFF)?;
        self.lse.fill(&self.stream, 0xFF)?;
        self.launch(pass).1()?;
        Ok((self.o.download(&self.stream)?, self.lse.download(&self.stream)?))
    }
}

impl From<Contender> for Outcome {
    fn from(contender: Contender) -> Outcome {
        let Contender { pass, satisfied: SatisfiedRows { rows, ratio: error }, launches, millis, .. } =
            contender;
        let plan = pass.forward.plan();
        let clusters = in_clusters(plan.cluster());
        let plan_of = format!("{}; {}; {}{clusters}", plan.tile(), plan.order(), plan.scheduler());
        Outcome::Checked(Timing::new(plan_of, launches, millis, rows, error))
    }
}

impl From<Refusal> for Outcome {
    fn from(refusal: Refusal) -> Outcome {
        match refusal {
            Refusal::Wrong(why) => Outcome::Wrong(why.to_string()),
            refusal @ (Refusal::Unmeasured(_) | Refusal::Failed(_)) => Outcome::Failed(refusal.to_string()),
        }
    }
}

/// The end of a plan's description, if its CTAs are in clusters.
pub(crate) fn in_clusters(cluster: u32) -> String {
    if cluster > 1 { format!(", in clusters of {cluster}") } else { String::new() }
}

fn hash(o: &[u16], lse: &[f32]) -> u64 {
    let mut hasher = DefaultHasher::new();
    o.hash(&mut hasher);
    lse.iter().for_each(|x| x.to_bits().hash(&mut hasher));
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use fa3_types::{Dtype, ProblemSpec, Shape};

    #[test]
    fn turns_are_in_another_order_each_round() {
        for count in [0, 1, 2, 5, 12, 20] {
            let orders: Vec<Vec<usize>> = (0..3).map(|round| turns(count, round).collect()).collect();
            for (round, order) in orders.iter().enumerate() {
                let mut sorted = order.clone();
                sorted.sort_unstable();
                assert_eq!(sorted, (0..count).collect::<Vec<_>>());
                assert!(order.first().is_none_or(|&first| first == round % count));
            }
            // The successor of the first candidate in a round.
            let after = |order: &Vec<usize>| order[(order.iter().position(|&x| x == 0).unwrap() + 1) % count];
            if count > 2 {
                assert_ne!(after(&orders[0]), after(&orders[1]), "{count}");
                assert_ne!(after(&orders[1]), after(&orders[2]), "{count}");
            }
        }
    }

    /// Runs only on a machine with a Hopper GPU.
    #[test]
    fn right_results_are_timed_and_impossible_ones_fail() {
        let Ok(device) = Device::open(0) else {
            println!("skipped: no gpu");
            return;
        };
        let shape = Shape { batch: 2, seqlen: 500, heads: 3, head_dim: 64 };
        let problem = ProblemSpec::dense(Dtype::F16, shape, shape).causal().known().unwrap();
        let (pace, bar) = (Pace { rounds: 3, slice_ms: 1.0 }, ProgressBar::hidden());
        let tile = fa3_sched::forward::TileRow::table()[0].tile;
        let wide = PlanOptions::default().tile(fa3_sched::forward::CtaTile { tile_n: 4096, ..tile });
        let outcomes = race(&device, &problem, &[PlanOptions::default(), wide], pace, &bar);
        let [Outcome::Checked(timing), Outcome::Failed(_)] = outcomes.as_slice() else {
            panic!("{outcomes:?}")
        };
        assert_eq!(timing.millis.len(), 3);
        assert!(timing.millis.iter().all(|ms| (1e-4..10.0).contains(ms)) && timing.error < 1.0, "{timing:?}");
        assert_eq!(bar.position(), 8);
    }
}
