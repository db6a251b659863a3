//! Times of the forward pass on a GPU, of results that were checked.

mod truth;

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};

use fa3::cuda::{Device, DeviceBuffer, Forward, ForwardError, HostError, Stream};
use fa3::reference::rows::SatisfiedRows;
use fa3::sched::{Choices, Plan};
use fa3::types::Problem;
use indicatif::ProgressBar;
use serde::Serialize;

use truth::{Truth, Wrong};

/// How long to measure.
#[derive(Clone, Copy, Debug, Serialize, clap::Args)]
pub(crate) struct Pace {
    /// Rounds, of which the median counts
    #[arg(long, value_name = "N", default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) rounds: u32,
    /// Milliseconds of launches back to back that a round times
    #[arg(long, value_name = "MS", default_value_t = 25.0, value_parser = slice_ms)]
    pub(crate) slice_ms: f64,
}

/// Where it was measured.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Machine {
    gpu: String,
    sms: u32,
    /// The newest CUDA that the driver supports.
    cuda: String,
    /// The version of this program.
    fa3: &'static str,
}

impl Machine {
    /// The machine of a GPU.
    pub(crate) fn of(device: &Device) -> Machine {
        let (major, minor) = device.driver_version();
        Machine {
            gpu: device.name().to_owned(),
            sms: device.sm_count(),
            cuda: format!("{major}.{minor}"),
            fa3: env!("CARGO_PKG_VERSION"),
        }
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Machine { gpu, sms, cuda, fa3 } = self;
        write!(f, "{gpu}, {sms} SMs, driver for CUDA {cuda}, fa3 {fa3}")
    }
}

impl fmt::Display for Pace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "medians of {} rounds of {} ms", self.rounds, self.slice_ms)
    }
}

fn slice_ms(text: &str) -> Result<f64, &'static str> {
    text.parse().ok().filter(|ms| (0.0..=1e5).contains(ms)).ok_or("expected milliseconds from 0 to 100000")
}

/// What came of a way to compute a problem.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Outcome {
    /// The result is right, and took so long.
    Checked(Timing),
    /// The result is wrong, and why.
    Wrong(String),
    /// There is no result, and why.
    Failed(String),
}

/// Times of a result that was checked.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Timing {
    /// The kernel's tile, the order of tiles and their scheduler.
    pub(crate) plan: String,
    /// Launches that a round timed.
    pub(crate) launches: u32,
    /// Milliseconds of a launch in each round.
    pub(crate) millis: Vec<f64>,
    /// The median of them.
    pub(crate) median: f64,
    /// Rows of O and LSE that were compared with the oracle.
    pub(crate) rows: usize,
    /// Their largest error, as a part of what is allowed.
    pub(crate) error: f64,
}

impl Outcome {
    /// The times, if there is a result and it is right.
    pub(crate) fn timing(&self) -> Option<&Timing> {
        match self {
            Outcome::Checked(timing) => Some(timing),
            Outcome::Wrong(_) | Outcome::Failed(_) => None,
        }
    }

    /// TFLOP/s by the median, likewise.
    pub(crate) fn tflops(&self, flops: f64) -> Option<f64> {
        self.timing().map(|timing| flops / timing.median / 1e9)
    }

    /// Why there is no time.
    pub(crate) fn fault(&self) -> Option<String> {
        match self {
            Outcome::Checked(_) => None,
            Outcome::Wrong(why) => Some(format!("WRONG: {why}")),
            Outcome::Failed(why) => Some(format!("failed: {why}")),
        }
    }

    /// TFLOP/s, or that there are none.
    pub(crate) fn cell(&self, flops: f64) -> String {
        match self {
            Outcome::Checked(timing) => format!("{:.0}", flops / timing.median / 1e9),
            Outcome::Wrong(_) => "WRONG".to_owned(),
            Outcome::Failed(_) => "failed".to_owned(),
        }
    }
}

/// A problem on a GPU, with what its result must be.
pub(crate) struct Stand {
    device: Device,
    stream: Stream,
    problem: Problem,
    truth: Truth,
    q: DeviceBuffer,
    k: DeviceBuffer,
    v: DeviceBuffer,
    o: DeviceBuffer,
    lse: DeviceBuffer,
}

/// A way to compute the problem whose result is right.
struct Lane {
    forward: Forward,
    satisfied: SatisfiedRows,
    /// The hash of the result.
    result: u64,
    launches: u32,
    millis: Vec<f64>,
}

#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error(transparent)]
    Wrong(#[from] Wrong),
    #[error(transparent)]
    Failed(#[from] ForwardError),
}

impl From<HostError> for Refusal {
    fn from(error: HostError) -> Refusal {
        Refusal::Failed(error.into())
    }
}

/// Measures the ways that `choices` leave to compute `problem`, in turns, so that whatever slows the GPU down hits all alike.
/// `progress` steps [`steps`] times.
pub(crate) fn race(
    device: &Device,
    problem: &Problem,
    choices: &[Choices],
    pace: Pace,
    progress: &ProgressBar,
) -> Vec<Outcome> {
    let end = progress.position() + steps(choices.len(), pace) as u64;
    let outcomes = match Stand::new(device, problem) {
        Ok(mut stand) => stand.race(choices, pace, progress),
        Err(error) => vec![Outcome::Failed(error.to_string()); choices.len()],
    };
    progress.set_position(end);
    outcomes
}

/// How long a race of so many is.
pub(crate) fn steps(lanes: usize, pace: Pace) -> usize {
    lanes * (1 + pace.rounds as usize)
}

impl Stand {
    fn new(device: &Device, problem: &Problem) -> Result<Stand, ForwardError> {
        let mut truth = Truth::new(problem, 1)?;
        let stream = device.stream()?;
        let upload = |bits: Vec<u16>| {
            let mut buffer = device.alloc(size_of_val(bits.as_slice()))?;
            buffer.upload(&stream, &bits).map(|()| buffer)
        };
        let [q, k, v] = std::mem::take(&mut truth.qkv).map(upload);
        let (q, k, v) = (q?, k?, v?);
        let o = device.alloc(problem.o().extent_bytes().0 as usize)?;
        let lse = device.alloc(size_of::<f32>() * problem.lse_shape().iter().product::<usize>())?;
        Ok(Stand { device: device.clone(), stream, problem: problem.clone(), truth, q, k, v, o, lse })
    }

    fn race(&mut self, choices: &[Choices], pace: Pace, progress: &ProgressBar) -> Vec<Outcome> {
        let mut lanes: Vec<Result<Lane, Refusal>> = Vec::new();
        for choices in choices {
            lanes.push(self.admit(choices, pace));
            progress.inc(1);
        }
        for round in 0..pace.rounds as usize {
            // Each round begins with another one.
            for turn in 0..lanes.len() {
                let index = (round + turn) % lanes.len();
                self.advance(&mut lanes[index], Stand::time);
                progress.inc(1);
            }
        }
        lanes.iter_mut().for_each(|lane| self.advance(lane, Stand::check_again));
        lanes.into_iter().map(|lane| lane.map_or_else(Outcome::from, Outcome::from)).collect()
    }

    /// Takes a step with a lane that is right so far.
    fn advance(
        &mut self,
        lane: &mut Result<Lane, Refusal>,
        step: fn(&mut Stand, &mut Lane) -> Result<(), Refusal>,
    ) {
        if let Ok(right) = lane
            && let Err(refusal) = step(self, right)
        {
            *lane = Err(refusal);
        }
    }

    /// Plans, compiles, computes once and checks; then finds out how many launches fill a slice, and warms up.
    fn admit(&mut self, choices: &Choices, pace: Pace) -> Result<Lane, Refusal> {
        let forward = Forward::with(&self.device, &self.problem, choices)?;
        let (o, lse) = self.compute(&forward)?;
        let satisfied = (self.truth.check)(&o, &lse)?;
        const FEW: u32 = 3;
        self.slice(&forward, FEW)?;
        let launches = (pace.slice_ms / self.slice(&forward, FEW)?.max(1e-3)) as u32;
        let lane = Lane {
            forward,
            satisfied,
            result: hash(&o, &lse),
            launches: launches.max(FEW),
            millis: Vec::new(),
        };
        self.slice(&lane.forward, lane.launches)?;
        Ok(lane)
    }

    fn time(&mut self, lane: &mut Lane) -> Result<(), Refusal> {
        let millis = self.slice(&lane.forward, lane.launches)?;
        lane.millis.push(millis);
        Ok(())
    }

    /// After all the launches that were timed, one more gives the same.
    fn check_again(&mut self, lane: &mut Lane) -> Result<(), Refusal> {
        let (o, lse) = self.compute(&lane.forward)?;
        if hash(&o, &lse) == lane.result { Ok(()) } else { Err(Wrong::Changed.into()) }
    }

    /// Milliseconds of a launch, of `launches` back to back.
    fn slice(&mut self, forward: &Forward, launches: u32) -> Result<f64, ForwardError> {
        let start = self.stream.record()?;
        for _ in 0..launches {
            self.launch(forward)?;
        }
        let end = self.stream.record()?;
        Ok(f64::from(end.millis_since(&start)?) / f64::from(launches))
    }

    fn launch(&mut self, forward: &Forward) -> Result<(), ForwardError> {
        let Stand { stream, q, k, v, o, lse, .. } = self;
        forward.run(stream, q, k, v, o, lse)
    }

    /// The bits of O, and LSE, computed into memory that holds NaN.
    fn compute(&mut self, forward: &Forward) -> Result<(Vec<u16>, Vec<f32>), ForwardError> {
        self.o.fill(&self.stream, 0xFF)?;
        self.lse.fill(&self.stream, 0xFF)?;
        self.launch(forward)?;
        Ok((self.o.download(&self.stream)?, self.lse.download(&self.stream)?))
    }
}

impl From<Lane> for Outcome {
    fn from(lane: Lane) -> Outcome {
        let Lane { forward, satisfied: SatisfiedRows { rows, ratio: error }, launches, millis, .. } = lane;
        let Plan { row, order, scheduler, .. } = forward.plan();
        let plan = format!("{}; {order}; {scheduler}", row.shape);
        let median = median(&millis);
        Outcome::Checked(Timing { plan, launches, millis, median, rows, error })
    }
}

impl From<Refusal> for Outcome {
    fn from(refusal: Refusal) -> Outcome {
        match refusal {
            Refusal::Wrong(why) => Outcome::Wrong(why.to_string()),
            Refusal::Failed(why) => Outcome::Failed(why.to_string()),
        }
    }
}

fn hash(o: &[u16], lse: &[f32]) -> u64 {
    let mut hasher = DefaultHasher::new();
    o.hash(&mut hasher);
    lse.iter().for_each(|x| x.to_bits().hash(&mut hasher));
    hasher.finish()
}

/// The middle one, or the mean of the two in the middle; 0 of none.
fn median(numbers: &[f64]) -> f64 {
    let mut sorted = numbers.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    f64::midpoint(sorted[last / 2], sorted[sorted.len() / 2])
}

#[cfg(test)]
impl Machine {
    /// Some GPU.
    pub(crate) fn example() -> Machine {
        Machine { gpu: "NVIDIA H100 80GB HBM3".to_owned(), sms: 132, cuda: "13.0".to_owned(), fa3: "0.1.0" }
    }
}

#[cfg(test)]
impl Outcome {
    /// A right result after these times.
    pub(crate) fn checked(millis: &[f64]) -> Outcome {
        let plan = "128 x 128; linear; static persistent".to_owned();
        let (millis, median) = (millis.to_vec(), median(millis));
        Outcome::Checked(Timing { plan, launches: 9, millis, median, rows: 60, error: 0.5 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fa3::types::{Dtype, ProblemSpec, Shape};

    #[test]
    fn medians() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 8.0]), 3.0);
        assert_eq!(median(&[7.0]), 7.0);
    }

    /// §4.2: 3.538, 4.021 and 4.105 ms at {4, 8448, 16, 128} are 661, 582 and 570 TFLOP/s.
    #[test]
    fn flops_are_the_papers() {
        let shape = Shape { batch: 4, seqlen: 8448, heads: 16, head_dim: 128 };
        let flops = ProblemSpec::dense(Dtype::F16, shape, shape).validate().unwrap().forward_flops();
        for (millis, tflops) in [(3.538, "661"), (4.021, "582"), (4.105, "570")] {
            assert_eq!(Outcome::checked(&[millis]).cell(flops), tflops);
        }
        assert_eq!(Outcome::Wrong("because".to_owned()).tflops(flops), None);
        assert_eq!(Outcome::Wrong("because".to_owned()).fault().as_deref(), Some("WRONG: because"));
        assert_eq!(Outcome::Failed("because".to_owned()).cell(flops), "failed");
    }

    #[test]
    fn slices_are_positive_and_finite() {
        assert_eq!(slice_ms("2.5"), Ok(2.5));
        for text in ["-1", "nan", "inf", "", "1e9"] {
            assert!(slice_ms(text).is_err(), "{text}");
        }
    }

    /// On a machine with a Hopper GPU.
    #[test]
    fn right_results_are_timed_and_impossible_ones_fail() {
        let Ok(device) = Device::open(0) else {
            println!("skipped: no gpu");
            return;
        };
        let shape = Shape { batch: 2, seqlen: 500, heads: 3, head_dim: 64 };
        let problem = ProblemSpec::dense(Dtype::F16, shape, shape).causal().validate().unwrap();
        let (pace, bar) = (Pace { rounds: 3, slice_ms: 1.0 }, ProgressBar::hidden());
        let wide = Choices { row: fa3::sched::TileRow::table().last().copied(), ..Choices::default() };
        let outcomes = race(&device, &problem, &[Choices::default(), wide], pace, &bar);
        let [Outcome::Checked(timing), Outcome::Failed(_)] = outcomes.as_slice() else {
            panic!("{outcomes:?}")
        };
        assert_eq!(timing.millis.len(), 3);
        assert!(timing.millis.iter().all(|ms| (1e-4..10.0).contains(ms)) && timing.error < 1.0, "{timing:?}");
        assert_eq!(bar.position(), 8);
    }
}
