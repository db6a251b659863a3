//! The thread pool for long computations.

use rayon::{ThreadPoolBuildError, ThreadPoolBuilder};

/// Why the threads cannot be started.
#[derive(Debug, thiserror::Error)]
#[error("cannot start threads: {0}")]
pub(crate) struct ThreadsError(#[from] ThreadPoolBuildError);

/// Starts the thread pool. Otherwise the first use would start it, and panic if that fails.
pub(crate) fn start() -> Result<(), ThreadsError> {
    Ok(ThreadPoolBuilder::new().build_global()?)
}
