//! Devices, opened once.

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::{LazyLock, OnceLock};

use fa3_cuda::Archive;
use fa3_cuda::host::{Device, HostError, KeyedMutex};

use crate::error::Error;

/// Open devices by their numbers, with all kernels compiled for them. They stay open until the process ends.
static DEVICES: LazyLock<KeyedMutex<u32, Device>> = LazyLock::new(KeyedMutex::default);

/// The archive of compiled kernels, if a binding has one.
static ARCHIVE: OnceLock<PathBuf> = OnceLock::new();

/// Names the file of compiled kernels for devices that are opened later. The first name counts. A file that is missing
/// or damaged counts as none, since the driver compiles what is missing; `fa3 doctor --archive` says what is wrong.
pub fn use_archive(path: PathBuf) {
    ARCHIVE.get_or_init(|| path);
}

/// The device, opened once, with the archive of compiled kernels.
///
/// # Errors
/// The driver's errors.
pub fn open_device(ordinal: u32) -> Result<Device, HostError> {
    let open = || {
        let device = Device::open(ordinal)?;
        Ok(match ARCHIVE.get().and_then(|path| Archive::open(path).ok()) {
            Some(archive) => device.with_archive(archive),
            None => device,
        })
    };
    Ok(DEVICES.find(ordinal, open)?.with(|device| device.clone()))
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
