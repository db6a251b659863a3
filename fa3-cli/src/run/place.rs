//! Where a call is computed.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, Instant};

use fa3::cuda::ForwardError;
use fa3::{Attention, Device, Error, Output, Scalar};
use fa3_types::Problem;
use ndarray::ArrayView4;

use super::gpu;
use crate::gpu::Which;
use crate::progress;

/// What the command line says about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// The GPU, where there is a Hopper GPU whose kernels take the problem; the CPU otherwise.
    Auto,
    /// The CPU.
    Cpu,
    /// A GPU, or nothing.
    Gpu(Which),
}

/// No name of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected auto, cpu, gpu or the number of a gpu")]
pub(crate) struct NoDeviceName;

impl FromStr for Wanted {
    type Err = NoDeviceName;

    fn from_str(text: &str) -> Result<Wanted, NoDeviceName> {
        match text {
            "auto" => Ok(Wanted::Auto),
            "cpu" => Ok(Wanted::Cpu),
            gpu => gpu.parse().map(Wanted::Gpu).map_err(|_| NoDeviceName),
        }
    }
}

/// Where it was computed.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) device: Device,
    /// Why not on a GPU, if that was left open.
    pub(crate) why: Option<Error>,
}

/// How long it took.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    /// Compiling its kernel, on a GPU.
    pub(crate) compile: Option<Duration>,
    /// The call: on the CPU all of it, on a GPU a launch of its kernel.
    pub(crate) call: Duration,
    /// How many were timed.
    pub(crate) launches: u32,
}

impl Times {
    /// Two lines of a report, the first only of a GPU. A call does `work`, in thousands of millions a second of `unit`.
    pub(crate) fn write(&self, f: &mut fmt::Formatter<'_>, work: f64, unit: &str) -> fmt::Result {
        let speed = work / self.call.as_secs_f64() / 1e9;
        let digits = if speed < 1.0 { 3 } else { 1 };
        let milliseconds = 1e3 * self.call.as_secs_f64();
        let Some(compile) = self.compile else {
            return writeln!(f, "  time    {milliseconds:.2} ms, {speed:.digits$} {unit}");
        };
        let launches = self.launches;
        writeln!(f, "  compile {:.2} ms", 1e3 * compile.as_secs_f64())?;
        writeln!(
            f,
            "  time    {milliseconds:.4} ms, {speed:.digits$} {unit}, of {launches} launches back to back"
        )
    }
}

/// A computed call.
pub(super) struct Computed<T> {
    pub(super) output: Output<T>,
    pub(super) times: Times,
    pub(super) place: Place,
}

impl Wanted {
    /// The first device that may compute a call, and why none before it does.
    ///
    /// # Errors
    /// There is no GPU, and nothing else is wanted.
    pub(crate) fn place(self) -> Result<Place, Error> {
        match self {
            Wanted::Cpu => Ok(Place::cpu()),
            Wanted::Gpu(which) => Ok(Place { device: Device::Cuda(which.open()?), why: None }),
            Wanted::Auto => {
                let (device, why) = Device::best();
                Ok(Place { device, why })
            }
        }
    }

    /// Computes a call there; on the CPU if the GPU's kernels do not take it and that was left open. The arrays are
    /// the call's, with nothing between their elements.
    ///
    /// # Errors
    /// What is wrong with the call, or with the GPU.
    pub(super) fn forward<T: Scalar>(
        self,
        attention: &Attention<'_, T>,
        problem: &Problem,
        qkv: [ArrayView4<'_, T>; 3],
        place: Place,
    ) -> Result<Computed<T::Output>, Error> {
        let progress = progress::late_bar(1).with_message("computes o and lse");
        let computed = self.compute(attention, problem, qkv, place);
        progress.finish_and_clear();
        computed
    }

    fn compute<T: Scalar>(
        self,
        attention: &Attention<'_, T>,
        problem: &Problem,
        qkv: [ArrayView4<'_, T>; 3],
        mut place: Place,
    ) -> Result<Computed<T::Output>, Error> {
        if let Device::Cuda(device) = &place.device {
            match gpu::forward(device, problem, qkv) {
                Ok((output, times)) => return Ok(Computed { output, times, place }),
                Err(why @ ForwardError::Plan(_)) if self == Wanted::Auto => {
                    place = Place { device: Device::Cpu, why: Some(why.into()) };
                }
                Err(error) => return Err(error.into()),
            }
        }
        let start = Instant::now();
        let output = attention.forward(&place.device)?;
        let times = Times { compile: None, call: start.elapsed(), launches: 1 };
        Ok(Computed { output, times, place })
    }
}

impl Place {
    /// The CPU, as it was wanted.
    pub(super) fn cpu() -> Place {
        Place { device: Device::Cpu, why: None }
    }
}

impl fmt::Display for Place {
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
        let wanted = |text: &str| text.parse::<Wanted>();
        assert_eq!([wanted("auto"), wanted("cpu")], [Ok(Wanted::Auto), Ok(Wanted::Cpu)]);
        assert_eq!(["gpu", "1"].map(wanted), ["gpu", "1"].map(|gpu| Ok(Wanted::Gpu(gpu.parse().unwrap()))));
        assert!(["", "gpus", "-1", "gpu:1"].iter().all(|text| wanted(text) == Err(NoDeviceName)));
    }
}
