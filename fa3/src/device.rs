//! Where attention is computed.

use std::fmt;

#[cfg(feature = "cuda")]
use crate::{Error, cuda};

/// Where [`Attention`](crate::Attention) computes: the CPU or a GPU. Clones are the same device.
///
/// Arrays are given and returned in host memory either way. For tensors that are on a GPU already, use
/// [`cuda::Device`](crate::cuda::Device), the GPU alone, which [`Device::Cuda`] holds.
///
#[cfg_attr(feature = "cuda", doc = "```")]
#[cfg_attr(not(feature = "cuda"), doc = "```ignore")]
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
    #[cfg(feature = "cuda")]
    Cuda(cuda::Device),
}

#[cfg(feature = "cuda")]
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
        let (mut ordinal, mut other) = (0, None);
        loop {
            match cuda::Device::open(ordinal) {
                Ok(device) => return Ok(Device::Cuda(device)),
                Err(not_hopper @ cuda::HostError::NotHopper { .. }) => other = other.or(Some(not_hopper)),
                // After the last GPU, what the first one is says more.
                Err(error) => return Err(other.unwrap_or(error).into()),
            }
            ordinal += 1;
        }
    }

    /// The first Hopper GPU, and `None`. Or the CPU, and the reason why [`Device::gpu`] has no GPU. Look at the reason:
    /// it may be a driver that is too old or broken, on a machine where you meant to use the GPU.
    pub fn best() -> (Device, Option<Error>) {
        match Device::gpu() {
            Ok(gpu) => (gpu, None),
            Err(why) => (Device::Cpu, Some(why)),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => match rayon::current_num_threads() {
                1 => write!(f, "cpu (1 thread)"),
                threads => write!(f, "cpu ({threads} threads)"),
            },
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => device.fmt(f),
        }
    }
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::*;

    #[test]
    fn where_there_is_no_gpu_there_is_a_reason_and_the_cpu() {
        let Err(why) = Device::gpu() else {
            println!("skipped: there is a gpu");
            return;
        };
        assert!(matches!(why, Error::Cuda(_)), "{why:?}");
        let (device, no_gpu) = Device::best();
        assert!(matches!(device, Device::Cpu));
        assert_eq!(no_gpu, Some(why));
        assert!(device.to_string().starts_with("cpu ("));
        assert!(matches!(Device::cuda(1000), Err(Error::Cuda(_))));
    }
}
