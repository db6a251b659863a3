//! Devices, opened once.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::{LazyLock, Mutex};

use fa3_cuda::host::{Device, HostError};

use crate::error::Error;
use crate::kept::lock;

/// Devices by their numbers, open until the process ends, with all kernels that were compiled for them.
static DEVICES: LazyLock<Mutex<HashMap<u32, Device>>> = LazyLock::new(Mutex::default);

/// The device, opened once.
///
/// # Errors
/// The driver's.
pub(crate) fn open(ordinal: u32) -> Result<Device, HostError> {
    let mut devices = lock(&DEVICES);
    if let Some(device) = devices.get(&ordinal) {
        return Ok(device.clone());
    }
    let device = Device::open(ordinal)?;
    devices.insert(ordinal, device.clone());
    Ok(device)
}

/// The SMs of a device of which `margin` are left to others.
///
/// # Errors
/// [`Error::SmMargin`] if it is not a number of SMs that leaves one.
pub(crate) fn without(sms: NonZeroU32, margin: i64) -> Result<NonZeroU32, Error> {
    let left =
        u32::try_from(margin).ok().and_then(|margin| sms.get().checked_sub(margin)).and_then(NonZeroU32::new);
    left.ok_or(Error::SmMargin { margin, sms: sms.get() })
}
