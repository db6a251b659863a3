//! The threads that compute on the CPU.

use std::mem;
use std::process;
use std::sync::{Arc, LazyLock, Mutex};

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::error::Error;
use crate::kept::lock;

/// The number of a process, and its threads.
type Threads = (u32, Arc<ThreadPool>);

/// The threads of this process, or of the one that it was forked from. They are not rayon's own: a process that is
/// forked, such as a worker that loads data, has none of its parent's threads, and would wait for them without end.
static THREADS: LazyLock<Mutex<Option<Threads>>> = LazyLock::new(Mutex::default);

/// Lets threads of this process do some work, and waits for it.
///
/// # Errors
/// [`Error::Threads`] if the system has none left.
pub(crate) fn run<R: Send>(work: impl FnOnce() -> Result<R, Error> + Send) -> Result<R, Error> {
    threads()?.install(work)
}

fn threads() -> Result<Arc<ThreadPool>, Error> {
    let mut threads = lock(&THREADS);
    match &*threads {
        Some((process, threads)) if *process == process::id() => Ok(Arc::clone(threads)),
        _ => {
            let made = Arc::new(ThreadPoolBuilder::new().build()?);
            // Those of the parent cannot be told to end.
            mem::forget(threads.replace((process::id(), Arc::clone(&made))));
            Ok(made)
        }
    }
}
