//! Devices, opened once.

use std::num::NonZeroU32;
use std::path::Path;
use std::sync::LazyLock;

use fa3_cuda::Archive;
use fa3_cuda::host::{Device, HostError, KeyedMutex};
use pyo3::prelude::*;

use crate::error::Error;

/// Open devices by their numbers, with all kernels compiled for them. They stay open until the process ends.
static DEVICES: LazyLock<KeyedMutex<u32, Device>> = LazyLock::new(KeyedMutex::default);

/// The file of compiled kernels in the package's folder, which a wheel has and a build from source may lack.
const ARCHIVE: &str = "kernels.sm_90a";

/// The device, opened once, with the package's archive of compiled kernels. Must be called without the GIL.
///
/// # Errors
/// The driver's errors.
pub(crate) fn open(ordinal: u32) -> Result<Device, HostError> {
    let open = || {
        let device = Device::open(ordinal)?;
        Ok(match archive() {
            Some(archive) => device.with_archive(archive),
            None => device,
        })
    };
    Ok(DEVICES.find(ordinal, open)?.with(|device| device.clone()))
}

/// The archive beside the extension module. A damaged one counts as none, since the driver compiles what is missing;
/// `fa3 doctor --archive` says what is wrong with it.
fn archive() -> Option<Archive> {
    let file = |py: Python<'_>| py.import("fa3._fa3")?.getattr("__file__")?.extract();
    let module: String = Python::attach(file).ok()?;
    Archive::open(&Path::new(&module).with_file_name(ARCHIVE)).ok()
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
