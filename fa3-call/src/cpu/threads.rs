//! The threads that compute on the CPU.

use std::mem;
use std::process;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

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

/// This process's threads, `count` of them. If `count` is 0, their number is `RAYON_NUM_THREADS`, otherwise one for
/// each core. No other thread of the process may fork meanwhile.
///
/// # Errors
/// [`Error::Threads`] if the system cannot create them.
pub fn threads(count: usize) -> Result<Arc<ThreadPool>, Error> {
    let process = process::id();
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
