//! Opening GPUs.

use std::str::FromStr;

use fa3::Scalar;
use fa3_cuda::host::{Device, DeviceBuffer, HostError, Stream};
use ndarray::{ArrayView, Dimension};

/// Which GPU to use.
#[derive(Debug, clap::Args)]
pub(crate) struct GpuArgs {
    /// gpu for the first Hopper GPU, or the number of a GPU
    #[arg(long, value_name = "gpu|N", default_value = "gpu")]
    device: Which,
}

/// A GPU as named on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Which {
    /// The first Hopper GPU.
    First,
    /// A GPU by its driver number.
    Number(u32),
}

/// A text that is not the name of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected gpu or the number of one")]
pub(crate) struct NoGpuName;

impl FromStr for Which {
    type Err = NoGpuName;

    fn from_str(text: &str) -> Result<Which, NoGpuName> {
        match text {
            "gpu" | "cuda" => Ok(Which::First),
            text => {
                let number = text.strip_prefix("cuda:").unwrap_or(text);
                number.parse().map(Which::Number).map_err(|_| NoGpuName)
            }
        }
    }
}

impl GpuArgs {
    pub(crate) fn open(&self) -> Result<Device, fa3::Error> {
        self.device.open()
    }
}

impl Which {
    pub(crate) fn open(self) -> Result<Device, fa3::Error> {
        let device = match self {
            Which::First => fa3::Device::gpu()?,
            Which::Number(number) => fa3::Device::cuda(number)?,
        };
        let fa3::Device::Cuda(device) = device else { unreachable!("a gpu was asked for") };
        Ok(device)
    }
}

/// Opens a GPU. The inner error says why there is no GPU that the kernels run on. Any other error is the outer one.
pub(crate) fn open(ordinal: u32) -> Result<Result<Device, HostError>, HostError> {
    match Device::open(ordinal) {
        Ok(device) => Ok(Ok(device)),
        Err(
            absent @ (HostError::NoDriver
            | HostError::DriverTooOld { .. }
            | HostError::NoDevice { .. }
            | HostError::NotHopper { .. }),
        ) => Ok(Err(absent)),
        Err(error) => Err(error),
    }
}

/// Memory for f32 in this shape, if any.
pub(crate) fn floats(device: &Device, dims: Option<[usize; 3]>) -> Result<Option<DeviceBuffer>, HostError> {
    dims.map(|dims| device.alloc(size_of::<f32>() * dims.iter().product::<usize>())).transpose()
}

/// Uploads a contiguous array.
pub(crate) fn upload<T: Scalar, D: Dimension>(
    device: &Device,
    stream: &Stream,
    x: ArrayView<'_, T, D>,
) -> Result<DeviceBuffer, HostError> {
    device.upload(stream, x.as_slice().expect("a file's tensors and tables have no gaps"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_gpus() {
        assert_eq!("gpu".parse(), Ok(Which::First));
        assert_eq!("2".parse(), Ok(Which::Number(2)));
        assert!(["cpu", "", "-1", "gpu:1"].iter().all(|text| text.parse::<Which>() == Err(NoGpuName)));
    }
}
