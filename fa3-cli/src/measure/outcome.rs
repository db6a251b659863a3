//! Settings of measurements, and their outcomes.

use std::fmt;

use fa3::cuda::Device;
use serde::Serialize;

use crate::launches::SLICE_MS;

/// How long to measure.
#[derive(Clone, Copy, Debug, Serialize, clap::Args)]
pub(crate) struct Pace {
    /// Number of rounds; their median is reported
    #[arg(long, value_name = "N", default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) rounds: u32,
    /// Milliseconds of back-to-back launches that each round times
    #[arg(long, value_name = "MS", default_value_t = SLICE_MS, value_parser = slice_ms)]
    pub(crate) slice_ms: f64,
}

/// The machine that was measured.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Machine {
    gpu: String,
    sms: u32,
    /// The newest CUDA version that the driver supports.
    cuda: String,
    /// The version of this program.
    fa3: &'static str,
}

impl Machine {
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

/// The outcome of one candidate.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Outcome {
    /// The result is right, with its times.
    Checked(Timing),
    /// The result is wrong; the text says why.
    Wrong(String),
    /// There is no result; the text says why.
    Failed(String),
}

/// The times of a candidate whose result was checked.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Timing {
    /// The kernel's tile, the tile order and the scheduler.
    pub(crate) plan: String,
    /// Launches per round.
    pub(crate) launches: u32,
    /// Milliseconds per launch, for each round.
    pub(crate) millis: Vec<f64>,
    pub(crate) median: f64,
    /// Number of rows of O and LSE that were compared with the oracle.
    pub(crate) rows: usize,
    /// The largest error in these rows, as a fraction of the allowed error.
    pub(crate) error: f64,
}

impl Timing {
    pub(super) fn new(plan: String, launches: u32, millis: Vec<f64>, rows: usize, error: f64) -> Timing {
        let median = median(&millis);
        Timing { plan, launches, millis, median, rows, error }
    }
}

impl Outcome {
    /// The times, if there is a result and it is right.
    pub(crate) fn timing(&self) -> Option<&Timing> {
        match self {
            Outcome::Checked(timing) => Some(timing),
            Outcome::Wrong(_) | Outcome::Failed(_) => None,
        }
    }

    /// TFLOP/s of the median time, if the result is right.
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

    /// TFLOP/s of the median time, or the word for its absence.
    pub(crate) fn cell(&self, flops: f64) -> String {
        match self {
            Outcome::Checked(timing) => format!("{:.0}", flops / timing.median / 1e9),
            Outcome::Wrong(_) => "WRONG".to_owned(),
            Outcome::Failed(_) => "failed".to_owned(),
        }
    }
}

/// The median; 0 if there are no numbers.
pub(crate) fn median(numbers: &[f64]) -> f64 {
    let mut sorted = numbers.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    f64::midpoint(sorted[last / 2], sorted[sorted.len() / 2])
}

#[cfg(test)]
impl Machine {
    pub(crate) fn example() -> Machine {
        Machine { gpu: "NVIDIA H100 80GB HBM3".to_owned(), sms: 132, cuda: "13.0".to_owned(), fa3: "0.1.0" }
    }
}

#[cfg(test)]
impl Outcome {
    /// A right result with these times.
    pub(crate) fn checked(millis: &[f64]) -> Outcome {
        let plan = "128 x 128; linear; static persistent".to_owned();
        Outcome::Checked(Timing::new(plan, 9, millis.to_vec(), 60, 0.5))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fa3_types::{Dtype, ProblemSpec, Shape};

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
        let flops = ProblemSpec::dense(Dtype::F16, shape, shape).known().unwrap().forward_flops();
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
}
