//! The place where attention is computed.

use std::fmt;

#[cfg(feature = "cuda")]
use crate::{Error, cuda};

/// The device of [`Attention`](crate::Attention): the CPU or a GPU. Clones are the same device.
///
/// A call takes and returns arrays in host memory on either device. For tensors that are in a GPU's memory already, use
/// [`cuda::Device`](crate::cuda::Device), which is always a GPU; [`Device::Cuda`] holds one. A file names both types
/// after `use fa3::{Device, cuda}`.
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
    /// A Hopper GPU. It keeps its compiled kernels: open it once.
    #[cfg(feature = "cuda")]
    Cuda(cuda::Device),
}

#[cfg(feature = "cuda")]
impl Device {
    /// The GPU with this number, in the driver's order.
    ///
    /// # Errors
    /// [`Error::Cuda`] if there is no driver, no such GPU, or if it is not a Hopper GPU.
    pub fn cuda(ordinal: u32) -> Result<Device, Error> {
        Ok(Device::Cuda(cuda::Device::open(ordinal)?))
    }

    /// The first usable Hopper GPU. A GPU is not usable if its memory is full, or if another process has it
    /// exclusively.
    ///
    /// # Errors
    /// [`Error::Cuda`] with the reason why no GPU is usable.
    pub fn gpu() -> Result<Device, Error> {
        let count = cuda::Device::count()?;
        Ok(Device::Cuda(open_first((0..count).map(cuda::Device::open))?))
    }

    /// The first usable Hopper GPU, and `None`; or the CPU, and the error of [`Device::gpu`]. Look at the error: the
    /// machine may have a GPU, but a driver that is too old or broken.
    pub fn best() -> (Device, Option<Error>) {
        match Device::gpu() {
            Ok(gpu) => (gpu, None),
            Err(why) => (Device::Cpu, Some(why)),
        }
    }
}

/// The first GPU that could be opened; otherwise the error of the first Hopper GPU, or, without a Hopper GPU, of the
/// first GPU.
#[cfg(feature = "cuda")]
fn open_first<D>(opened: impl Iterator<Item = Result<D, cuda::HostError>>) -> Result<D, cuda::HostError> {
    let mut reasons = Vec::new();
    for opened in opened {
        match opened {
            Ok(device) => return Ok(device),
            Err(reason) => reasons.push(reason),
        }
    }
    let of_hopper = reasons.iter().position(|reason| !matches!(reason, cuda::HostError::NotHopper { .. }));
    let reason = reasons.into_iter().nth(of_hopper.unwrap_or(0));
    Err(reason.unwrap_or(cuda::HostError::NoDevice { ordinal: 0, count: 0 }))
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
    fn a_gpu_that_cannot_be_used_hides_no_other() {
        use cuda::HostError::{NoDevice, NotHopper, OutOfMemory};
        let old = || Err(NotHopper { name: "old".to_owned(), major: 7, minor: 5 });
        let full = |bytes| Err(OutOfMemory { bytes, free: 0, total: bytes });
        let first = |opened: Vec<Result<u32, cuda::HostError>>| open_first(opened.into_iter());
        for before in [vec![], vec![old()], vec![full(1)], vec![full(1), old(), full(2)]] {
            assert_eq!(first(before.into_iter().chain([Ok(1), full(3), Ok(2)]).collect()), Ok(1));
        }
        assert_eq!(first(vec![old(), full(1), full(2)]), full(1));
        assert_eq!(first(vec![old(), old()]), old());
        assert_eq!(first(vec![]), Err(NoDevice { ordinal: 0, count: 0 }));
    }

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
