//! Where attention is computed.

use std::fmt;

use crate::Error;
use crate::cuda::{self, HostError};

/// A device that can run attention. Clones are the same device.
///
/// ```
/// use fa3::Device;
///
/// match Device::gpu() {
///     Ok(gpu) => println!("on {gpu}"),
///     Err(why) => println!("on {}: {why}", Device::Cpu),
/// }
/// ```
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub enum Device {
    /// The CPU, on all threads of the current rayon pool.
    #[default]
    Cpu,
    /// A Hopper GPU. It keeps the kernels that were compiled for it: open it once.
    Cuda(cuda::Device),
}

impl Device {
    /// The GPU with this number, in the driver's order.
    ///
    /// # Errors
    /// [`Error::Cuda`]: no driver, no such GPU, or one that is not a Hopper.
    pub fn cuda(ordinal: u32) -> Result<Device, Error> {
        Ok(Device::Cuda(cuda::Device::open(ordinal)?))
    }

    /// The first Hopper GPU.
    ///
    /// # Errors
    /// [`Error::Cuda`]: why there is none.
    pub fn gpu() -> Result<Device, Error> {
        let mut other = None;
        for ordinal in 0.. {
            match cuda::Device::open(ordinal) {
                Ok(device) => return Ok(Device::Cuda(device)),
                Err(not_hopper @ HostError::NotHopper { .. }) => other = other.or(Some(not_hopper)),
                // After the last GPU, what the first one is says more.
                Err(error) => return Err(other.unwrap_or(error).into()),
            }
        }
        Ok(Device::Cpu)
    }

    /// The first Hopper GPU, or the CPU where [`Device::gpu`] has none, and says why.
    pub fn best() -> Device {
        Device::gpu().unwrap_or_default()
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => match rayon::current_num_threads() {
                1 => write!(f, "cpu (1 thread)"),
                threads => write!(f, "cpu ({threads} threads)"),
            },
            Device::Cuda(device) => device.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_there_is_no_gpu_there_is_a_reason_and_the_cpu() {
        let Err(why) = Device::gpu() else {
            println!("skipped: there is a gpu");
            return;
        };
        assert!(matches!(why, Error::Cuda(_)), "{why:?}");
        assert!(matches!(Device::best(), Device::Cpu));
        assert!(Device::best().to_string().starts_with("cpu ("));
        assert!(matches!(Device::cuda(1000), Err(Error::Cuda(_))));
    }
}
