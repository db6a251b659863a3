//! GPUs, where there are any.

use fa3_cuda::host::{Device, HostError};

/// A GPU that the kernels run on, or why there is none.
///
/// # Errors
/// A driver that does not work.
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
