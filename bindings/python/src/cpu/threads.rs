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
    /// The requested number of threads; 0 means one for each core.
    count: usize,
    pool: Arc<ThreadPool>,
}

/// The threads of this process, or of its parent. Rayon's own pool cannot be used: a forked process, such as a data
/// loader's worker, does not have its parent's threads, and would wait for them forever.
static THREADS: LazyLock<Mutex<Option<Threads>>> = LazyLock::new(Mutex::default);

/// Runs `work` on this process's threads, and waits for it. The number of threads is `RAYON_NUM_THREADS`, otherwise
/// torch's number.
///
/// # Errors
/// [`Error::Threads`] if the system cannot create them.
pub(crate) fn run<R: Send>(work: impl FnOnce() -> Result<R, Error> + Send) -> Result<R, Error> {
    // Python forks only in a thread that is attached to the interpreter. So at a fork no other thread holds the lock.
    Python::attach(threads)?.install(work)
}

fn threads(py: Python<'_>) -> Result<Arc<ThreadPool>, Error> {
    let (process, count) = (process::id(), wanted(py));
    // If another thread panicked, the old threads are still there.
    let mut threads = THREADS.lock().unwrap_or_else(PoisonError::into_inner);
    match &*threads {
        Some(made) if (made.process, made.count) == (process, count) => Ok(Arc::clone(&made.pool)),
        _ => {
            let pool = Arc::new(ThreadPoolBuilder::new().num_threads(count).build()?);
            let made = Threads { process, count, pool: Arc::clone(&pool) };
            if let Some(of_parent) = threads.replace(made).filter(|old| old.process != process) {
                // The parent's threads do not exist here, and cannot be joined.
                mem::forget(of_parent);
            }
            Ok(pool)
        }
    }
}

/// The number of threads: torch's number, unless the environment sets it.
fn wanted(py: Python<'_>) -> usize {
    if env::var_os("RAYON_NUM_THREADS").is_some() {
        return 0;
    }
    let count = py.import("torch").and_then(|torch| torch.call_method0("get_num_threads")?.extract());
    count.unwrap_or(0)
}
