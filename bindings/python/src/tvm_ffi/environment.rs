//! The functions of tvm-ffi that a call needs. The process that calls has them: this library does not link tvm-ffi.

use std::any::Any as Dynamic;
use std::error::Error as StdError;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::mem;
use std::ptr;

use fa3_call::{Error, ErrorKind};
use fa3_cuda::host::{Device, OperationError, Stream};

use super::abi::{Any, ERROR, FUNCTION, List, TENSOR};
use crate::dlpack::{CUDA, DlTensor};
use crate::error::refused;
use crate::threads;
use crate::workspaces::{ALIGNMENT, Caller, Work, zeroed};

unsafe extern "C" {
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// DLPack's type of bytes: its kind and its bits.
const BYTE: (u8, u8) = (1, 8);

/// A function of this process.
///
/// # Safety
/// `F` is the type of the function's address.
///
/// # Errors
/// There is no such function.
unsafe fn function<F: Copy>(name: &CStr) -> Result<F, Error> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: a null library stands for all that the process has loaded for everyone.
    let address = unsafe { dlsym(ptr::null_mut(), name.as_ptr()) };
    if address.is_null() {
        let name = name.to_string_lossy();
        return Err(refused(format!("this process has no {name}: tvm-ffi is not loaded, or is older")));
    }
    // SAFETY: the caller guarantees the type.
    Ok(unsafe { mem::transmute_copy(&address) })
}

/// An error that a function of tvm-ffi has raised in this thread.
#[derive(Debug)]
struct Raised;

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an error of tvm-ffi's")
    }
}

impl StdError for Raised {}

/// The result of a function of tvm-ffi.
fn checked(code: c_int) -> Result<(), Error> {
    if code == 0 { Ok(()) } else { Err(Error::Caller(Box::new(Raised))) }
}

/// Raises an error in this thread, by the name of Python's exception, and returns the code of a call that has failed.
pub(super) fn raise(error: &Error) -> c_int {
    if matches!(error, Error::Caller(error) if error.is::<Raised>()) {
        return -1;
    }
    let kind = match error.kind() {
        ErrorKind::Name => "TypeError",
        ErrorKind::Argument | ErrorKind::Unsupported => "ValueError",
        ErrorKind::Machine | ErrorKind::Bug => "RuntimeError",
    };
    if let Err(missing) = raise_as(kind, &error.to_string()) {
        eprintln!("fa3: {error}; {missing}");
    }
    -1
}

/// Raises an error without a backtrace. To make the first one, tvm-ffi reads the symbols of all libraries for seconds.
fn raise_as(kind: &str, message: &str) -> Result<(), Error> {
    type Create =
        unsafe extern "C" fn(*const List<u8>, *const List<u8>, *const List<u8>, *mut *mut c_void) -> c_int;
    let mut made = ptr::null_mut();
    let [kind, message, backtrace] = [kind, message, ""].map(List::of);
    // SAFETY: the functions have these types, and copy the texts.
    unsafe {
        let create = function::<Create>(c"TVMFFIErrorCreate")?;
        let raise = function::<unsafe extern "C" fn(*mut c_void)>(c"TVMFFIErrorSetRaised")?;
        if create(&raw const kind, &raw const message, &raw const backtrace, &raw mut made) != 0 {
            return Err(refused("tvm-ffi has no memory for an error"));
        }
        let made = Owned(Any::object(ERROR, made));
        raise(made.0.address());
    }
    Ok(())
}

/// The current stream of a GPU in this thread.
///
/// # Errors
/// The process has no such function.
pub(super) fn stream(device: i32) -> Result<usize, Error> {
    // SAFETY: the function has this type.
    unsafe {
        let stream = function::<unsafe extern "C" fn(i32, i32) -> *mut c_void>(c"TVMFFIEnvGetStream")?;
        Ok(stream(CUDA, device).expose_provenance())
    }
}

/// Whether the environment of this thread has an allocator of tensors.
///
/// # Errors
/// The process has no such function.
pub(super) fn has_allocator() -> Result<bool, Error> {
    type Allocator = unsafe extern "C" fn() -> *const c_void;
    // SAFETY: the function has this type.
    unsafe { Ok(!function::<Allocator>(c"TVMFFIEnvGetDLPackManagedTensorAllocator")?().is_null()) }
}

/// An object, which is released when it is dropped.
pub(super) struct Owned(pub(super) Any);

impl Owned {
    /// A new contiguous tensor of the environment's allocator, beside another one.
    ///
    /// # Errors
    /// Errors of the allocator, or that there is none.
    pub(super) fn tensor(
        beside: (i32, i32),
        (code, bits): (u8, u8),
        shape: &mut [i64],
    ) -> Result<Owned, Error> {
        let (device_type, device) = beside;
        let (rank, shape) = (shape.len() as i32, shape.as_mut_ptr());
        let mut like =
            DlTensor { device_type, device, rank, code, bits, lanes: 1, shape, ..DlTensor::default() };
        let mut made = ptr::null_mut();
        // SAFETY: the function has this type, and the tensor without memory lives during the call.
        unsafe {
            let allocate = function::<unsafe extern "C" fn(*mut DlTensor, *mut *mut c_void) -> c_int>(
                c"TVMFFIEnvTensorAlloc",
            )?;
            checked(allocate(&raw mut like, &raw mut made))?;
        }
        Ok(Owned(Any::object(TENSOR, made)))
    }

    /// Results of a call as one value: nothing, a tensor, or an array of tensors.
    ///
    /// # Errors
    /// The process lacks a function of tvm-ffi's.
    pub(super) fn result(mut all: Vec<Owned>) -> Result<Any, Error> {
        if all.len() < 2 {
            let only = all.pop();
            return Ok(only.map_or(Any::NOTHING, |only| mem::ManuallyDrop::new(only).0));
        }
        let values: Vec<_> = all.iter().map(|owned| owned.0).collect();
        let name = List::of("ffi.Array");
        let (mut array, mut result) = (ptr::null_mut(), Any::NOTHING);
        type Find = unsafe extern "C" fn(*const List<u8>, *mut *mut c_void) -> c_int;
        type Call = unsafe extern "C" fn(*mut c_void, *const Any, i32, *mut Any) -> c_int;
        // SAFETY: the functions have these types, and all that they get lives during the calls.
        unsafe {
            checked(function::<Find>(c"TVMFFIFunctionGetGlobal")?(&raw const name, &raw mut array))?;
            if array.is_null() {
                return Err(refused("tvm-ffi has no function ffi.Array"));
            }
            let array = Owned(Any::object(FUNCTION, array));
            let call = function::<Call>(c"TVMFFIFunctionCall")?;
            checked(call(array.0.address(), values.as_ptr(), values.len() as i32, &raw mut result))?;
        }
        Ok(result)
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: the function has this type, and the object is released once.
        unsafe {
            if let Ok(release) = function::<unsafe extern "C" fn(*mut c_void) -> c_int>(c"TVMFFIObjectDecRef")
            {
                release(self.0.address());
            }
        }
    }
}

/// The program that calls by tvm-ffi, whose tensors are on this device.
pub(super) struct Environment(pub(super) (i32, i32));

impl Caller for Environment {
    /// Later work of the stream may use the memory as soon as it is freed. A program without an allocator, which is one
    /// without a tensor of torch, gets memory of the driver's, which is freed when the device has nothing to do.
    fn allocate(
        &self,
        device: &Device,
        stream: &Stream,
        bytes: usize,
        zeros: usize,
    ) -> Result<(u64, Box<dyn Dynamic>), Error> {
        let bytes = bytes + ALIGNMENT;
        let (address, owner): (u64, Box<dyn Dynamic>) = if has_allocator()? {
            let memory = Owned::tensor(self.0, BYTE, &mut [bytes as i64])?;
            // SAFETY: it is a tensor, which lives as long as its owner.
            let address = unsafe { memory.0.as_tensor() }.map_or(0, DlTensor::address);
            (address, Box::new(memory))
        } else {
            let memory = device.alloc(bytes).map_err(OperationError::from)?;
            (memory.address(), Box::new(memory))
        };
        // SAFETY: the memory is the device's, and nothing else uses it until it is freed.
        let address = unsafe { zeroed(device, stream, address, zeros) }?;
        Ok((address, owner))
    }

    fn compute(&self, work: Work<'_>) -> Result<(), Error> {
        threads::run(work)
    }
}
