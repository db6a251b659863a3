//! Calls from XLA, by its foreign function interface: one handler computes every operation.
//!
//! An FFI call has the attributes `operation`, as in [`Operation`](crate::operation::Operation), and `tensors`, the
//! names of its arguments and results in their order, with a blank between two. All other attributes are options. On
//! the CPU the call is computed when the handler returns. On a GPU it is on XLA's stream.
#![allow(unsafe_code, reason = "XLA passes plain pointers")]

mod abi;
mod given;

use std::any::Any;
use std::error::Error as StdError;
use std::ffi::{CString, c_void};
use std::fmt;
use std::mem::offset_of;
use std::ptr;

use fa3_call::{Error, ErrorKind, Options, Place, caught, threads};
use fa3_cuda::host::{Device, Stream};

use crate::error::refused;
use crate::operation;
use crate::workspaces::{ALIGNMENT, Caller, Work, zeroed};
use abi::{Allocation, Api, DeviceOf, Failure, Frame, Freed, Function, NewError, StreamOf};
use given::Attributes;

/// A handler.
pub(crate) type Handler = unsafe extern "C" fn(*mut Frame) -> Failure;

/// XLA's codes of errors.
const INVALID_ARGUMENT: i32 = 3;
const FAILED_PRECONDITION: i32 = 9;
const UNIMPLEMENTED: i32 = 12;
const INTERNAL: i32 = 13;

/// The handler of calls on the CPU.
///
/// # Safety
/// The frame is one of XLA's, and so are its buffers.
pub(crate) unsafe extern "C" fn on_cpu(frame: *mut Frame) -> Failure {
    // SAFETY: the caller guarantees the frame.
    unsafe { handled(&*frame, |_| Ok(Place::Cpu)) }
}

/// The handler of calls on a GPU.
///
/// # Safety
/// The frame is one of XLA's, and so are its buffers.
pub(crate) unsafe extern "C" fn on_gpu(frame: *mut Frame) -> Failure {
    // SAFETY: the caller guarantees the frame.
    unsafe { handled(&*frame, |xla| xla.place()) }
}

/// The result of a call as XLA gets it: null, or an error.
///
/// # Safety
/// The conditions of [`on_cpu`].
unsafe fn handled(frame: &Frame, place: impl FnOnce(&Xla<'_>) -> Result<Place, Error>) -> Failure {
    // SAFETY: the caller guarantees the frame.
    let done = caught(|| unsafe { handle(frame, place) });
    let error = match done.unwrap_or_else(|message| Err(Error::Panic { message })) {
        Ok(()) => return ptr::null_mut(),
        Err(error) => error,
    };
    let code = match error.kind() {
        ErrorKind::Name | ErrorKind::Argument => INVALID_ARGUMENT,
        ErrorKind::Unsupported => UNIMPLEMENTED,
        ErrorKind::Machine => FAILED_PRECONDITION,
        ErrorKind::Bug => INTERNAL,
    };
    let message = CString::new(error.to_string().replace('\0', " ")).unwrap_or_default();
    if let Error::Caller(error) = error
        && let Some(XlasError(address)) = error.downcast_ref()
    {
        return ptr::with_exposed_provenance_mut(*address);
    }
    // SAFETY: as above, and the function copies the message.
    let new = unsafe { frame.api.as_ref() }.and_then(|api| api.new_error);
    // SAFETY: as above.
    new.map_or(ptr::null_mut(), |new| unsafe { new(&mut NewError::new(message.as_ptr(), code)) })
}

/// Answers XLA's question for the handler's metadata, or computes a call.
///
/// # Safety
/// The conditions of [`on_cpu`].
unsafe fn handle(frame: &Frame, place: impl FnOnce(&Xla<'_>) -> Result<Place, Error>) -> Result<(), Error> {
    abi::check("CallFrame", frame.size, size_of::<Frame>())?;
    // SAFETY: XLA's functions live as long as the process.
    let api = unsafe { frame.api.as_ref() };
    let (major, minor) = api.map_or(abi::FIRST, |api| (api.version.major, api.version.minor));
    if major != abi::MAJOR {
        let known = abi::MAJOR;
        return Err(refused(format!("XLA's FFI has version {major}.{minor}, expected {known}")));
    }
    // SAFETY: an extension lives as long as the frame, and one of this kind asks for metadata.
    if let Some(extension) = unsafe { frame.extension.as_ref() }
        && extension.kind == abi::METADATA
    {
        // SAFETY: as above.
        let metadata = unsafe { &mut *(*frame.extension.cast::<abi::MetadataExtension>()).metadata };
        abi::check("Metadata", metadata.size, offset_of!(abi::Metadata, traits) + size_of::<u32>())?;
        (metadata.version.major, metadata.version.minor, metadata.traits) = (major, minor.min(abi::MINOR), 0);
        metadata.version.size = size_of::<abi::Version>();
        return Ok(());
    }
    let api = api.ok_or_else(|| refused("a call has no functions of XLA's FFI"))?;
    abi::check("Api", api.size, offset_of!(Api, unused_3))?;
    let xla = Xla { api, context: frame.context };
    if frame.stage != abi::EXECUTE {
        return Err(refused(format!("there is nothing to do in stage {} of XLA's FFI", frame.stage)));
    }
    // SAFETY: the caller guarantees the attributes.
    let attributes = unsafe { Attributes::of(&frame.attributes) }?;
    let operation = attributes.string("operation")?;
    if operation == "append" {
        return Err(refused("append writes to its arguments, which XLA does not allow"));
    }
    let computes = operation::computation(operation, &Options::new(&attributes))?;
    // SAFETY: the caller guarantees the buffers.
    let mut buffers = unsafe { given::buffers(frame, attributes.string("tensors")?, place(&xla)?) }?;
    computes.compute_for(&xla, &mut buffers)
}

/// XLA, during a call.
struct Xla<'a> {
    api: &'a Api,
    context: *mut c_void,
}

/// An error that XLA made, by its address.
#[derive(Debug)]
struct XlasError(usize);

impl fmt::Display for XlasError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an error of XLA's")
    }
}

impl StdError for XlasError {}

impl Xla<'_> {
    /// Calls a function of XLA's.
    ///
    /// # Errors
    /// Its error, or that there is no such function.
    fn call<A>(function: Function<A>, name: &str, arguments: &mut A) -> Result<(), Error> {
        let function = function.ok_or_else(|| refused(format!("XLA's FFI has no {name}")))?;
        // SAFETY: the function takes these arguments, which have this call's context.
        let failure = unsafe { function(arguments) };
        if failure.is_null() {
            return Ok(());
        }
        Err(Error::Caller(Box::new(XlasError(failure.expose_provenance()))))
    }

    /// The stream of the call, and its GPU.
    fn place(&self) -> Result<Place, Error> {
        abi::check("Api", self.api.size, size_of::<Api>())?;
        let (mut stream, mut device) = (StreamOf::new(self.context), DeviceOf::new(self.context));
        Xla::call(self.api.stream, "stream", &mut stream)?;
        Xla::call(self.api.device, "device", &mut device)?;
        let ordinal = device.ordinal;
        let device =
            u32::try_from(ordinal).map_err(|_| refused(format!("the device has number {ordinal}")))?;
        Ok(Place::Stream { device, stream: stream.stream.expose_provenance() })
    }
}

/// Memory that XLA allocated.
struct Allocated {
    free: Function<Freed>,
    context: *mut c_void,
    bytes: usize,
    data: *mut c_void,
}

impl Drop for Allocated {
    fn drop(&mut self) {
        // An error has nowhere to go: the work that used the memory is on the stream.
        let _ = Xla::call(self.free, "free", &mut Freed::new(self.context, self.bytes, self.data));
    }
}

impl Caller for Xla<'_> {
    /// Later work of the stream may use the memory as soon as it is freed.
    fn allocate(
        &self,
        device: &Device,
        stream: &Stream,
        bytes: usize,
        zeros: usize,
    ) -> Result<(u64, Box<dyn Any>), Error> {
        // XLA promises no such alignment.
        let bytes = bytes + ALIGNMENT;
        let mut allocation = Allocation::new(self.context, bytes);
        Xla::call(self.api.allocate, "allocate", &mut allocation)?;
        let data = allocation.data;
        let owner = Allocated { free: self.api.free, context: self.context, bytes, data };
        // SAFETY: the memory is the device's, and nothing else uses it until it is freed.
        let address = unsafe { zeroed(device, stream, data.expose_provenance() as u64, zeros) }?;
        Ok((address, Box::new(owner)))
    }

    /// XLA's threads do not survive a fork either, so nothing is done for one.
    fn compute(&self, work: Work<'_>) -> Result<(), Error> {
        threads(0)?.install(work)
    }
}
