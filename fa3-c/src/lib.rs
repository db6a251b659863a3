//! The C library of fa3. `include/fa3.h` documents its functions.
#![allow(unsafe_code, reason = "C passes plain pointers")]

mod given;
mod plan;

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::slice;

use fa3_call::{Error, ErrorKind, caught};

pub use given::{COption, CTensor};
pub use plan::Plan;

thread_local! {
    /// The message of this thread's last error.
    static LAST: RefCell<CString> = RefCell::default();
}

/// The code of a result, whose message is kept. No panic gets through.
fn code(work: impl FnOnce() -> Result<(), Error>) -> c_int {
    let result = caught(work).unwrap_or_else(|message| Err(Error::Panic { message }));
    let Err(error) = result else { return 0 };
    let message = error.to_string().replace('\0', " ");
    LAST.set(CString::new(message).unwrap_or_default());
    match error.kind() {
        ErrorKind::Name | ErrorKind::Argument => 1,
        ErrorKind::Unsupported => 2,
        ErrorKind::Machine => 3,
        ErrorKind::Bug => 4,
    }
}

/// A slice that C passes as a pointer, which may be null if there are no elements, and a number of elements.
///
/// # Safety
/// The pointer has this number of elements, which live as long as the slice.
unsafe fn elements<'a, T>(first: *const T, count: usize) -> &'a [T] {
    // SAFETY: the caller guarantees the elements.
    if count == 0 { &[] } else { unsafe { slice::from_raw_parts(first, count) } }
}

/// The text of a string of C.
///
/// # Safety
/// The pointer is null, or has a string that ends with a zero and lives as long as the text.
///
/// # Errors
/// It is null, or not UTF-8.
unsafe fn text<'a>(string: *const c_char) -> Result<&'a str, Error> {
    let invalid = || given::refused("a name is NULL or not UTF-8");
    if string.is_null() {
        return Err(invalid());
    }
    // SAFETY: the caller guarantees the string.
    unsafe { CStr::from_ptr(string) }.to_str().map_err(|_| invalid())
}

/// The version of this library.
#[unsafe(no_mangle)]
pub extern "C" fn fa3_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// The message of the last function that failed in this thread.
#[unsafe(no_mangle)]
pub extern "C" fn fa3_last_error() -> *const c_char {
    LAST.with_borrow(|last| last.as_ptr())
}

/// Plans an operation.
///
/// # Safety
/// The pointers have strings, and this number of tensors and options, as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fa3_plan_new(
    operation: *const c_char,
    device: i32,
    tensors: *const CTensor,
    tensor_count: usize,
    options: *const COption,
    option_count: usize,
    plan: *mut *mut Plan,
) -> c_int {
    code(|| {
        if plan.is_null()
            || (tensors.is_null() && tensor_count > 0)
            || (options.is_null() && option_count > 0)
        {
            return Err(given::refused("plan, tensors or options are NULL"));
        }
        // SAFETY: the caller guarantees all pointers.
        unsafe {
            let tensors = given::tensors(elements(tensors, tensor_count))?;
            let options = given::options(elements(options, option_count))?;
            let made = Plan::new(text(operation)?, device, tensors, &options)?;
            plan.write(Box::into_raw(Box::new(made)));
        }
        Ok(())
    })
}

/// The bytes of the workspace that a launch needs.
///
/// # Safety
/// The pointer is null or has a plan.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fa3_workspace_bytes(plan: *const Plan) -> usize {
    // SAFETY: the caller guarantees the plan.
    unsafe { plan.as_ref() }.map_or(0, Plan::workspace_bytes)
}

/// Launches a plan.
///
/// # Safety
/// The plan lives, `data` has an address for each of its tensors, and all addresses are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fa3_launch(
    plan: *const Plan,
    stream: *mut c_void,
    data: *const *mut c_void,
    workspace: *mut c_void,
) -> c_int {
    code(|| {
        // SAFETY: the caller guarantees the plan.
        let Some(plan) = (unsafe { plan.as_ref() }).filter(|_| !data.is_null()) else {
            return Err(given::refused("plan or data is NULL"));
        };
        // SAFETY: the caller guarantees the addresses.
        unsafe {
            let data = elements(data, plan.tensor_count());
            plan.launch(stream.expose_provenance(), data, workspace.expose_provenance() as u64)
        }
    })
}

/// Frees a plan.
///
/// # Safety
/// The pointer is null, or has a plan that is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fa3_free(plan: *mut Plan) {
    if !plan.is_null() {
        // SAFETY: the plan was made by `fa3_plan_new`, and is freed once.
        let plan = unsafe { Box::from_raw(plan) };
        code(|| {
            drop(plan);
            Ok(())
        });
    }
}
