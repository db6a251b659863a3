//! Values that are kept between calls.

use std::sync::{Mutex, MutexGuard, PoisonError};

pub(crate) use fa3_cuda::host::Kept;

/// The value that a mutex protects.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What a panic left behind is a map of what was put there before.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
