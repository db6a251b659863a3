//! The number of threads that compute on the CPU.

use std::env;

use fa3_call::{Error, threads};
use pyo3::prelude::*;

use crate::workspaces::Work;

/// Runs `work` on this process's threads, and waits for it. The number of threads is `RAYON_NUM_THREADS`, otherwise
/// torch's number.
///
/// # Errors
/// [`Error::Threads`] if the system cannot create them.
pub(crate) fn run(work: Work<'_>) -> Result<(), Error> {
    // Python forks only in a thread that is attached to the interpreter. So at a fork no other thread holds the lock.
    Python::attach(|py| threads(wanted(py)))?.install(work)
}

/// The number of threads: torch's number, unless the environment sets it.
fn wanted(py: Python<'_>) -> usize {
    if env::var_os("RAYON_NUM_THREADS").is_some() {
        return 0;
    }
    let count = py.import("torch").and_then(|torch| torch.call_method0("get_num_threads")?.extract());
    count.unwrap_or(0)
}
