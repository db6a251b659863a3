//! The threads that compute on the CPU.

use std::env;
use std::mem;
use std::process;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use pyo3::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::error::Error;

/// The threads of a process.
struct Threads {
    process: u32,
    /// So many were asked for; 0 is as many as there are cores.
    count: usize,
    pool: Arc<ThreadPool>,
}

/// The threads of this process, or of the one that it was forked from. They are not rayon's own: a process that is
/// forked, such as a worker that loads data, has none of its parent's threads, and would wait for them without end.
static THREADS: LazyLock<Mutex<Option<Threads>>> = LazyLock::new(Mutex::default);

/// Lets threads of this process do some work, and waits for it. They are as many as `RAYON_NUM_THREADS` says, or else
/// as torch's.
///
/// # Errors
/// [`Error::Threads`] if the system has none left.
pub(crate) fn run<R: Send>(work: impl FnOnce() -> Result<R, Error> + Send) -> Result<R, Error> {
    // Python forks as the one thread that is attached, so that no lock is held then.
    Python::attach(threads)?.install(work)
}

fn threads(py: Python<'_>) -> Result<Arc<ThreadPool>, Error> {
    let (process, count) = (process::id(), wanted(py));
    // What a panic left behind is the threads of before.
    let mut threads = THREADS.lock().unwrap_or_else(PoisonError::into_inner);
    match &*threads {
        Some(made) if (made.process, made.count) == (process, count) => Ok(Arc::clone(&made.pool)),
        _ => {
            let pool = Arc::new(ThreadPoolBuilder::new().num_threads(count).build()?);
            let made = Threads { process, count, pool: Arc::clone(&pool) };
            if let Some(of_parent) = threads.replace(made).filter(|old| old.process != process) {
                // They cannot be told to end.
                mem::forget(of_parent);
            }
            Ok(pool)
        }
    }
}

/// So many threads as torch computes with, unless the environment says how many.
fn wanted(py: Python<'_>) -> usize {
    if env::var_os("RAYON_NUM_THREADS").is_some() {
        return 0;
    }
    let count = py.import("torch").and_then(|torch| torch.call_method0("get_num_threads")?.extract());
    count.unwrap_or(0)
}
