//! The memory allocator, and the exit when memory runs out.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::{self, Write};
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// The system's allocator. When it has no more memory, the command prints an error and exits with code 2, as for
/// invalid input. By default Rust would end the process by a signal, and the hook that changes this is unstable.
#[derive(Debug)]
pub(crate) struct Memory;

// SAFETY: all memory comes from the system's allocator; this one exits instead of returning null.
#[allow(unsafe_code, reason = "there is no other way to an end with an exit code")]
unsafe impl GlobalAlloc for Memory {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps the obligations of the system's allocator.
        some(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps the obligations of the system's allocator.
        some(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller keeps the obligations of the system's allocator.
        some(unsafe { System.realloc(memory, layout, size) }, size)
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the obligations of the system's allocator.
        unsafe { System.dealloc(memory, layout) }
    }
}

fn some(memory: *mut u8, bytes: usize) -> *mut u8 {
    if memory.is_null() { end(bytes) } else { memory }
}

/// Prints the error without allocating memory, and ends the process.
#[cold]
fn end(bytes: usize) -> ! {
    static ENDS: AtomicBool = AtomicBool::new(false);
    if ENDS.swap(true, Ordering::Relaxed) {
        // Either another thread is already ending the process, or the exit itself ran out of memory.
        thread::sleep(Duration::from_secs(1));
        process::abort()
    }
    // If stderr is closed, the error cannot be shown.
    let _ = writeln!(io::stderr(), "error: out of memory: the system has no {bytes} bytes more");
    process::exit(2)
}
