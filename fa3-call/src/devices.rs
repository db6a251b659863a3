//! Devices, opened once.

use std::num::NonZeroU32;
use std::sync::LazyLock;

use fa3_cuda::host::{Device, HostError, KeyedMutex};

use crate::error::Error;

/// Open devices by their numbers, with all kernels compiled for them. They stay open until the process ends.
static DEVICES: LazyLock<KeyedMutex<u32, Device>> = LazyLock::new(KeyedMutex::default);

/// The device, opened once.
///
/// # Errors
/// The driver's errors.
pub(crate) fn open(ordinal: u32) -> Result<Device, HostError> {
    Ok(DEVICES.find(ordinal, || Device::open(ordinal))?.with(|device| device.clone()))
}

/// The number of SMs of a device without the `margin` SMs that are left to other kernels.
///
/// # Errors
/// [`Error::SmMargin`] if the margin is negative or leaves no SM.
pub(crate) fn without(sms: NonZeroU32, margin: i64) -> Result<NonZeroU32, Error> {
    let left =
        u32::try_from(margin).ok().and_then(|margin| sms.get().checked_sub(margin)).and_then(NonZeroU32::new);
    left.ok_or(Error::SmMargin { margin, sms: sms.get() })
}
