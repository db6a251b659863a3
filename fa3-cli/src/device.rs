//! The device that computes a call, and how long the call takes.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, Instant};

use fa3::cuda::{self, HostError, Stream};
use fa3::{Device, Error};
use serde_json::{Value, json};

use crate::gpu::Which;
use crate::launches::{self, SLICE_MS};
use crate::progress;

/// The device that the command line asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceChoice {
    /// The GPU, where there is a Hopper GPU whose kernels take the problem; the CPU otherwise.
    Auto,
    Cpu,
    /// A GPU; there is no fallback to the CPU.
    Gpu(Which),
}

/// A text that is not the name of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected auto, cpu, gpu or the number of a gpu")]
pub(crate) struct NoDeviceName;

impl FromStr for DeviceChoice {
    type Err = NoDeviceName;

    fn from_str(text: &str) -> Result<DeviceChoice, NoDeviceName> {
        match text {
            "auto" => Ok(DeviceChoice::Auto),
            "cpu" => Ok(DeviceChoice::Cpu),
            gpu => gpu.parse().map(DeviceChoice::Gpu).map_err(|_| NoDeviceName),
        }
    }
}

/// The device that computes a call, and why it is not a GPU.
#[derive(Debug)]
pub(crate) struct ChosenDevice {
    pub(crate) device: Device,
    /// Why the call does not run on a GPU, if the choice was left open.
    pub(crate) why: Option<Error>,
}

/// How long a call took.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    /// The time to compile the kernels, on a GPU.
    pub(crate) compile: Option<Duration>,
    /// The time of a call: on the CPU the whole call, on a GPU one launch of its kernels.
    pub(crate) call: Duration,
    /// The number of calls timed.
    pub(crate) launches: u32,
    /// Whether untimed calls preceded the timed calls.
    pub(crate) warm: bool,
}

/// The longest call on the CPU that is repeated. The first of longer calls is hardly slower than later ones.
const LONG: Duration = Duration::from_secs(2);
/// The time for which calls after the first are repeated and timed.
const SLICE: Duration = Duration::from_millis(100);

impl Times {
    /// Times the launches of a compiled call, back to back.
    pub(crate) fn of_launches<E: From<HostError>>(
        stream: &Stream,
        compile: Duration,
        mut launch: impl FnMut() -> Result<(), E>,
    ) -> Result<Times, E> {
        let launches = launches::fill(stream, SLICE_MS, &mut launch)?;
        let call = Duration::from_secs_f64(launches::time(stream, launches, launch)? / 1e3);
        Ok(Times { compile: Some(compile), call, launches, warm: true })
    }

    /// Writes two lines of a report; the first line only for a GPU. `work` is the work of a call, and is reported in
    /// billions of `unit` per second.
    pub(crate) fn write(&self, f: &mut fmt::Formatter<'_>, work: f64, unit: &str) -> fmt::Result {
        let &Times { compile, call, launches, warm } = self;
        let speed = self.speed(work);
        let digits = if speed < 1.0 { 3 } else { 1 };
        let milliseconds = 1e3 * call.as_secs_f64();
        let Some(compile) = compile else {
            write!(f, "  time    {milliseconds:.2} ms, {speed:.digits$} {unit}")?;
            return match launches {
                _ if !warm => writeln!(f, ", of the first call"),
                1 => writeln!(f, ", of a call after the first one"),
                calls => writeln!(f, ", of {calls} calls after the first one"),
            };
        };
        writeln!(f, "  compile {:.2} ms", 1e3 * compile.as_secs_f64())?;
        writeln!(
            f,
            "  time    {milliseconds:.4} ms, {speed:.digits$} {unit}, of {launches} launches back to back"
        )
    }

    pub(crate) fn json(&self, work: f64, unit: &str) -> Value {
        let Times { compile, call, launches, warm } = self;
        json!({
            "compile_seconds": compile.map(|compile| compile.as_secs_f64()),
            "seconds": call.as_secs_f64(), unit: self.speed(work), "calls": launches, "warm": warm,
        })
    }

    fn speed(&self, work: f64) -> f64 {
        work / self.call.as_secs_f64() / 1e9
    }
}

/// A result, the time that it took, and the device that computed it.
pub(crate) struct Computed<R> {
    pub(crate) result: R,
    pub(crate) times: Times,
    pub(crate) place: ChosenDevice,
}

impl DeviceChoice {
    /// Opens the first device that can compute a call, and says why earlier ones cannot.
    pub(crate) fn open(self) -> Result<ChosenDevice, Error> {
        match self {
            DeviceChoice::Cpu => Ok(ChosenDevice::cpu()),
            DeviceChoice::Gpu(which) => Ok(ChosenDevice { device: Device::Cuda(which.open()?), why: None }),
            DeviceChoice::Auto => {
                let (device, why) = Device::best();
                Ok(ChosenDevice { device, why })
            }
        }
    }

    /// Computes on `place`, or on the CPU if no GPU kernel takes the call and the choice was left open. Long
    /// computations show `what` as a progress message.
    pub(crate) fn compute<R>(
        self,
        mut place: ChosenDevice,
        what: &'static str,
        on_gpu: impl FnOnce(&cuda::Device) -> Result<(R, Times), Error>,
        on_cpu: impl FnMut() -> Result<R, Error>,
    ) -> Result<Computed<R>, Error> {
        let progress = progress::late_bar(1).with_message(format!("computes {what}"));
        if let Device::Cuda(device) = &place.device {
            match on_gpu(device) {
                Err(why) if self == DeviceChoice::Auto && is_left_to_the_cpu(&why) => {
                    place = ChosenDevice { device: Device::Cpu, why: Some(why) };
                }
                computed => {
                    progress.finish_and_clear();
                    return computed.map(|(result, times)| Computed { result, times, place });
                }
            }
        }
        let settled = settled(on_cpu);
        progress.finish_and_clear();
        settled.map(|(result, times)| Computed { result, times, place })
    }
}

/// Whether the call is valid, but no kernel computes it.
fn is_left_to_the_cpu(error: &Error) -> bool {
    matches!(error, Error::Cuda(error) if error.is_of_plan())
}

/// The result of a call on the CPU and its time. A long first call is timed. After a short first call, later calls are
/// timed.
fn settled<R>(mut call: impl FnMut() -> Result<R, Error>) -> Result<(R, Times), Error> {
    let mut timed = || {
        let start = Instant::now();
        call().map(|result| (result, start.elapsed()))
    };
    let (mut result, first) = timed()?;
    let times = |call, launches, warm| Times { compile: None, call, launches, warm };
    if first >= LONG {
        return Ok((result, times(first, 1, false)));
    }
    let (mut sum, mut calls) = (Duration::ZERO, 0);
    while sum < SLICE && calls < 100 {
        drop(result);
        let time;
        (result, time) = timed()?;
        (sum, calls) = (sum + time, calls + 1);
    }
    Ok((result, times(sum / calls, calls, true)))
}

impl ChosenDevice {
    /// The CPU, chosen explicitly.
    pub(crate) fn cpu() -> ChosenDevice {
        ChosenDevice { device: Device::Cpu, why: None }
    }

    /// The same device for a further call. The reason why it is not a GPU is left out, because it was already reported.
    pub(crate) fn again(&self) -> ChosenDevice {
        ChosenDevice { device: self.device.clone(), why: None }
    }

    pub(crate) fn json(&self) -> Value {
        json!({ "name": self.device.to_string(), "not_on_a_gpu": self.why.as_ref().map(ToString::to_string) })
    }
}

impl fmt::Display for ChosenDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.device.fmt(f)?;
        self.why.as_ref().map_or(Ok(()), |why| write!(f, ", not on a gpu: {why}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_devices() {
        let wanted = |text: &str| text.parse::<DeviceChoice>();
        assert_eq!([wanted("auto"), wanted("cpu")], [Ok(DeviceChoice::Auto), Ok(DeviceChoice::Cpu)]);
        assert_eq!(
            ["gpu", "1"].map(wanted),
            ["gpu", "1"].map(|gpu| Ok(DeviceChoice::Gpu(gpu.parse().unwrap())))
        );
        assert!(["", "gpus", "-1", "gpu:1"].iter().all(|text| wanted(text) == Err(NoDeviceName)));
    }

    /// The first of three calls takes longer. Only the last two are timed.
    #[test]
    fn the_first_call_is_not_timed() {
        let mut calls = 0;
        let call = || {
            calls += 1;
            std::thread::sleep(Duration::from_millis(if calls == 1 { 600 } else { 60 }));
            Ok(calls)
        };
        let (last, times) = settled(call).unwrap();
        assert_eq!((last, times.launches, times.warm), (3, 2, true));
        assert!(times.call < Duration::from_millis(500), "{times:?}");
    }
}
