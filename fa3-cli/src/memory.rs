//! The command's memory, and its end where there is no more.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::{self, Write};
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// The system's memory. Where it has no more, the command ends with a sentence and exit code 2, as it does where it
/// refuses its input. Rust's own end is a signal, and its hook for another one is unstable.
#[derive(Debug)]
pub(crate) struct Memory;

// SAFETY: all memory is the system's; instead of a null pointer nothing is returned.
#[allow(unsafe_code, reason = "there is no other way to an end with an exit code")]
unsafe impl GlobalAlloc for Memory {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises are those that the system asks for.
        some(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        some(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: as above.
        some(unsafe { System.realloc(memory, layout, size) }, size)
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(memory, layout) }
    }
}

fn some(memory: *mut u8, bytes: usize) -> *mut u8 {
    if memory.is_null() { end(bytes) } else { memory }
}

/// Says why, which takes no memory, and ends the process.
#[cold]
fn end(bytes: usize) -> ! {
    static ENDS: AtomicBool = AtomicBool::new(false);
    if ENDS.swap(true, Ordering::Relaxed) {
        // Another thread ends the process. If it is this one, the end needs memory itself.
        thread::sleep(Duration::from_secs(1));
        process::abort()
    }
    // If stderr is gone, there is nobody to tell.
    let _ = writeln!(io::stderr(), "error: out of memory: the system has no {bytes} bytes more");
    process::exit(2)
}
