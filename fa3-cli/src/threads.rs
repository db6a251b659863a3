//! The threads that long computations share.

use rayon::{ThreadPoolBuildError, ThreadPoolBuilder};

/// Why there are none.
#[derive(Debug, thiserror::Error)]
#[error("cannot start threads: {0}")]
pub(crate) struct ThreadsError(#[from] ThreadPoolBuildError);

/// Starts them. Whoever needs them first would start them otherwise, and panic where there can be none.
///
/// # Errors
/// If the system has no threads left.
pub(crate) fn start() -> Result<(), ThreadsError> {
    Ok(ThreadPoolBuilder::new().build_global()?)
}
