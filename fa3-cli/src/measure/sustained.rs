//! The forward pass alone on a GPU for seconds, until the board's clock is what it can keep.

use std::time::{Duration, Instant};

use fa3::cuda::{Device, Forward};
use fa3_types::Problem;
use indicatif::ProgressBar;
use serde::Serialize;

use super::meter::{self, Meter, Reading};
use super::outcome::Outcome;
use super::{Lane, Refusal, Stand};
use crate::data::Data;

/// How long it runs before it is timed.
pub(crate) const WARM_UP: Duration = Duration::from_secs(1);

/// Milliseconds of launches between two readings of power and clock.
const READING_MS: f64 = 25.0;

/// What the board took meanwhile.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Load {
    pub(crate) watts: f64,
    pub(crate) sm_mhz: f64,
    /// Of a launch.
    pub(crate) millijoules: f64,
}

/// Launches back to back.
struct Run {
    launches: u32,
    /// Of a launch.
    millis: f64,
    readings: Vec<Reading>,
}

/// Measures the planned way to compute `problem` on `data` for `time`, after [`WARM_UP`]. The outcome's times are one
/// mean. `progress` steps once.
pub(crate) fn sustain(
    device: &Device,
    problem: &Problem,
    data: Data,
    time: Duration,
    meter: Option<&Meter>,
    progress: &ProgressBar,
) -> Outcome {
    let measure = || -> Result<Lane, Refusal> {
        let mut stand = Stand::new(device, problem, data)?;
        let mut lane = stand.admit(Forward::new(device, problem)?, READING_MS)?;
        stand.run_for(&mut lane, WARM_UP, None, progress)?;
        let Run { launches, millis, readings } = stand.run_for(&mut lane, time, meter, progress)?;
        (lane.launches, lane.millis) = (launches, vec![millis]);
        lane.load = Load::of(&readings, millis);
        stand.check_again(&mut lane)?;
        Ok(lane)
    };
    let outcome = measure().map_or_else(Outcome::from, Outcome::from);
    progress.inc(1);
    outcome
}

impl Load {
    /// None without readings, or if the energy counter was updated less than twice.
    fn of(readings: &[Reading], millis: f64) -> Option<Load> {
        let watts = meter::watts(readings)?;
        Some(Load { watts, sm_mhz: meter::sm_mhz(readings), millijoules: watts * millis })
    }
}

impl Stand {
    /// Launches again and again for `time`.
    fn run_for(
        &mut self,
        lane: &mut Lane,
        time: Duration,
        meter: Option<&Meter>,
        progress: &ProgressBar,
    ) -> Result<Run, Refusal> {
        let (mut launches, mut readings) = (0, Vec::new());
        let began = Instant::now();
        let start = self.stream.record()?;
        let mut before = self.stream.record()?;
        loop {
            for _ in 0..lane.launches {
                self.launch(&mut lane.pass)?;
            }
            launches += lane.launches;
            let end = self.stream.record()?;
            // Waits for the launches before these, so that the GPU always has work, and not too much of it.
            before.synchronize()?;
            if let Some(meter) = meter {
                readings.push(meter.read()?);
            }
            progress.tick();
            if began.elapsed() >= time {
                let millis = f64::from(end.millis_since(&start)?) / f64::from(launches);
                return Ok(Run { launches, millis, readings });
            }
            before = end;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fa3_types::{Dtype, ProblemSpec, Shape};

    /// On a machine with a Hopper GPU.
    #[test]
    fn a_second_of_launches_has_a_time_and_a_load() {
        let Ok(device) = Device::open(0) else {
            println!("skipped: no gpu");
            return;
        };
        let shape = Shape { batch: 4, seqlen: 4096, heads: 16, head_dim: 128 };
        let problem = ProblemSpec::dense(Dtype::Bf16, shape, shape).validate().unwrap();
        let meter = Meter::open(&device);
        let (time, bar) = (Duration::from_secs(2), ProgressBar::hidden());
        let outcome = sustain(&device, &problem, Data::Normal, time, meter.as_ref().ok(), &bar);
        let Outcome::Checked(timing) = outcome else { panic!("{outcome:?}") };
        let seconds = timing.median * f64::from(timing.launches) / 1e3;
        assert!((1.9..2.3).contains(&seconds), "{timing:?}");
        assert_eq!(bar.position(), 1);
        match (meter, timing.load) {
            (Ok(_), Some(load)) => {
                assert!((100.0..1500.0).contains(&load.watts), "{load:?}");
                assert!((200.0..3000.0).contains(&load.sm_mhz), "{load:?}");
            }
            (Ok(_), None) => panic!("the counter stood still"),
            (Err(why), load) => {
                println!("skipped: no nvml: {why}");
                assert!(load.is_none());
            }
        }
    }
}
