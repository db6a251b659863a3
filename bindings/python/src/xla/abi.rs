//! The C interface of XLA's FFI: the layouts of versions 0.1 to 0.4 that a handler needs (`xla/ffi/api/c_api.h`).
//!
//! A minor version adds fields behind the others, or renames some, so that these layouts hold in all of them. Each
//! structure begins with its size, which [`check`] compares. A field of functions that are not called has their number.

use std::ffi::{c_char, c_void};
use std::mem::offset_of;
use std::ptr;

use fa3_call::Error;

use crate::error::refused;

/// The major version of these layouts.
pub(super) const MAJOR: i32 = 0;
/// The last minor version that is known.
pub(super) const MINOR: i32 = 4;
/// The version whose question for metadata comes without functions.
pub(super) const FIRST: (i32, i32) = (0, 1);

/// The kind of an extension that asks for a handler's metadata.
pub(super) const METADATA: i32 = 1;
/// The stage in which a handler computes.
pub(super) const EXECUTE: i32 = 3;
/// The kind of an argument or result that is a buffer.
pub(super) const BUFFER: i32 = 1;

/// An error of XLA's.
pub(super) type Failure = *mut c_void;
/// A function of XLA's, which gets its arguments in a structure.
pub(super) type Function<A> = Option<unsafe extern "C" fn(*mut A) -> Failure>;

/// A call of a handler.
#[repr(C)]
pub(crate) struct Frame {
    pub(super) size: usize,
    pub(super) extension: *const Extension,
    pub(super) api: *const Api,
    pub(super) context: *mut c_void,
    pub(super) stage: i32,
    pub(super) arguments: Values,
    pub(super) results: Values,
    pub(super) attributes: Attributes,
}

/// Arguments or results.
#[repr(C)]
pub(super) struct Values {
    pub(super) size: usize,
    extension: *const Extension,
    pub(super) count: i64,
    pub(super) kinds: *const i32,
    pub(super) values: *const *const Buffer,
}

/// An array, contiguous.
#[repr(C)]
pub(super) struct Buffer {
    pub(super) size: usize,
    extension: *const Extension,
    pub(super) dtype: i32,
    pub(super) data: *mut c_void,
    pub(super) rank: i64,
    pub(super) dims: *const i64,
}

/// Attributes, by name.
#[repr(C)]
pub(super) struct Attributes {
    pub(super) size: usize,
    extension: *const Extension,
    pub(super) count: i64,
    pub(super) kinds: *const i32,
    pub(super) names: *const *const Text,
    pub(super) values: *const *const c_void,
}

/// A text, which does not end with a zero.
#[repr(C)]
pub(super) struct Text {
    pub(super) first: *const u8,
    pub(super) bytes: usize,
}

/// An attribute that is a number.
#[repr(C)]
pub(super) struct Scalar {
    pub(super) dtype: i32,
    pub(super) value: *const c_void,
}

/// An attribute that is a list of numbers.
#[repr(C)]
pub(super) struct Array {
    pub(super) dtype: i32,
    pub(super) count: usize,
    pub(super) first: *const c_void,
}

/// An extension of a structure.
#[repr(C)]
pub(super) struct Extension {
    size: usize,
    pub(super) kind: i32,
    next: *const Extension,
}

/// The extension that asks for a handler's metadata.
#[repr(C)]
pub(super) struct MetadataExtension {
    base: Extension,
    pub(super) metadata: *mut Metadata,
}

/// The metadata of a handler. Later versions add a field, which XLA has set to 0.
#[repr(C)]
pub(super) struct Metadata {
    pub(super) size: usize,
    pub(super) version: Version,
    pub(super) traits: u32,
}

/// A version of the interface.
#[repr(C)]
pub(super) struct Version {
    pub(super) size: usize,
    pub(super) extension: *const Extension,
    pub(super) major: i32,
    pub(super) minor: i32,
}

/// XLA's functions.
#[repr(C)]
pub(super) struct Api {
    pub(super) size: usize,
    extension: *const Extension,
    pub(super) version: Version,
    internal: *const c_void,
    pub(super) new_error: Function<NewError>,
    pub(super) unused_3: [*const c_void; 3],
    pub(super) stream: Function<StreamOf>,
    unused_4: [*const c_void; 4],
    pub(super) allocate: Function<Allocation>,
    pub(super) free: Function<Freed>,
    unused_6: [*const c_void; 6],
    pub(super) device: Function<DeviceOf>,
}

/// Arguments of [`Api::new_error`].
#[repr(C)]
pub(super) struct NewError {
    size: usize,
    extension: *const Extension,
    message: *const c_char,
    code: i32,
}

impl NewError {
    pub(super) fn new(message: *const c_char, code: i32) -> NewError {
        NewError {
            size: offset_of!(NewError, code) + size_of::<i32>(),
            extension: ptr::null(),
            message,
            code,
        }
    }
}

/// Arguments of [`Api::stream`].
#[repr(C)]
pub(super) struct StreamOf {
    size: usize,
    extension: *const Extension,
    context: *mut c_void,
    pub(super) stream: *mut c_void,
}

impl StreamOf {
    pub(super) fn new(context: *mut c_void) -> StreamOf {
        StreamOf { size: size_of::<StreamOf>(), extension: ptr::null(), context, stream: ptr::null_mut() }
    }
}

/// Arguments of [`Api::device`].
#[repr(C)]
pub(super) struct DeviceOf {
    size: usize,
    extension: *const Extension,
    context: *mut c_void,
    pub(super) ordinal: i32,
}

impl DeviceOf {
    pub(super) fn new(context: *mut c_void) -> DeviceOf {
        let size = offset_of!(DeviceOf, ordinal) + size_of::<i32>();
        DeviceOf { size, extension: ptr::null(), context, ordinal: 0 }
    }
}

/// Arguments of [`Api::allocate`].
#[repr(C)]
pub(super) struct Allocation {
    size: usize,
    extension: *const Extension,
    context: *mut c_void,
    bytes: usize,
    alignment: usize,
    pub(super) data: *mut c_void,
}

impl Allocation {
    /// Memory of any alignment.
    pub(super) fn new(context: *mut c_void, bytes: usize) -> Allocation {
        let (size, data) = (size_of::<Allocation>(), ptr::null_mut());
        Allocation { size, extension: ptr::null(), context, bytes, alignment: 1, data }
    }
}

/// Arguments of [`Api::free`].
#[repr(C)]
pub(super) struct Freed {
    size: usize,
    extension: *const Extension,
    context: *mut c_void,
    bytes: usize,
    data: *mut c_void,
}

impl Freed {
    pub(super) fn new(context: *mut c_void, bytes: usize, data: *mut c_void) -> Freed {
        Freed { size: size_of::<Freed>(), extension: ptr::null(), context, bytes, data }
    }
}

/// Checks the size that a structure of XLA's states.
///
/// # Errors
/// It is too small.
pub(super) fn check(structure: &str, given: usize, needed: usize) -> Result<(), Error> {
    if given >= needed {
        return Ok(());
    }
    Err(refused(format!("{structure} of XLA's FFI has {given} bytes, expected {needed} or more")))
}
