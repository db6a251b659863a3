//! The library libcuda.

use cudarc::driver::sys::{self, CUresult};
use libloading::Library;

use super::{CudaError, HostError};

/// The oldest CUDA with tensor maps and wgmma, as the driver numbers it.
const OLDEST: i32 = 12_000;

/// File names of the library, a part of cudarc's list.
const NAMES: [&str; 3] = ["libcuda.so.1", "libcuda.so", "nvcuda.dll"];

/// Whether libcuda can be loaded. No function of the driver may be called otherwise.
///
/// cudarc reports it only if cudarc loads libcuda itself. This function also works if another crate of the program
/// enables cudarc's feature `dynamic-linking`, which links libcuda for all crates.
pub fn is_driver_present() -> bool {
    // SAFETY: this loads libcuda, whose initialisers have no preconditions, and does nothing else.
    NAMES.into_iter().any(|name| unsafe { Library::new(name) }.is_ok())
}

/// Loads and initialises the driver, and returns the CUDA version that it supports. It may be called any number of
/// times.
///
/// # Errors
/// An error if there is no driver, if it is too old, or if it cannot start.
pub(super) fn init() -> Result<(u32, u32), HostError> {
    if !is_driver_present() {
        return Err(HostError::NoDriver);
    }
    let mut version = 0;
    // SAFETY: `version` is valid for the result; this may be called before cuInit.
    check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&raw mut version) })?;
    let (major, minor) = (version.unsigned_abs() / 1000, version.unsigned_abs() % 1000 / 10);
    // Symbols that an old driver lacks would panic at their first use.
    if version < OLDEST {
        return Err(HostError::DriverTooOld { major, minor });
    }
    // SAFETY: 0 is the only value that the flags may have.
    check("cuInit", unsafe { sys::cuInit(0) })?;
    Ok((major, minor))
}

/// Converts the result of a call that cannot report an earlier kernel's error.
pub(super) fn check(call: &'static str, result: CUresult) -> Result<(), HostError> {
    result.result().map_err(|error| HostError::Driver { call, error: CudaError::new(error.0) })
}

/// A handle of the driver: context, module, function, stream or event.
#[derive(Debug)]
pub(super) struct Handle<T>(pub(super) *mut T);

impl<T> Clone for Handle<T> {
    fn clone(&self) -> Handle<T> {
        *self
    }
}

impl<T> Copy for Handle<T> {}

// SAFETY: a handle is a name that the driver gave; the driver API may be called with it from any thread.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Handle<T> {}
