//! The C interface of tvm-ffi 0.1: the layouts that a function needs (`tvm/ffi/c_api.h`).

use std::ffi::{CStr, c_void};
use std::ptr;
use std::slice;

use fa3_call::Error;

use crate::dlpack::DlTensor;
use crate::error::refused;

/// Kinds of values.
pub(super) const NONE: i32 = 0;
pub(super) const INTEGER: i32 = 1;
pub(super) const FLAG: i32 = 2;
pub(super) const REAL: i32 = 3;
const DL_TENSOR: i32 = 7;
const RAW_TEXT: i32 = 8;
const SMALL_TEXT: i32 = 11;
const TEXT: i32 = 65;
pub(super) const ERROR: i32 = 67;
pub(super) const FUNCTION: i32 = 68;
const SHAPE: i32 = 69;
pub(super) const TENSOR: i32 = 70;
const ARRAY: i32 = 71;
const LIST: i32 = 75;

/// Number of bytes of a text that lies in the value itself.
const SMALL: usize = 7;

/// A value: a number, or the address of an object.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Any {
    pub(super) kind: i32,
    /// Number of bytes of a [`SMALL_TEXT`].
    length: u32,
    pub(super) bits: u64,
}

/// An object of tvm-ffi: its reference counts, its kind and its destructor, and then its content.
#[repr(C)]
struct Object<T> {
    counts: u64,
    kind: i32,
    unused: u32,
    destroy: *const c_void,
    content: T,
}

/// A text, a shape or an array.
#[repr(C)]
pub(super) struct List<T> {
    pub(super) first: *const T,
    pub(super) count: i64,
}

const _: () = assert!(size_of::<Any>() == 16 && size_of::<Object<List<Any>>>() == 24 + 16);

impl Any {
    /// No value.
    pub(super) const NOTHING: Any = Any { kind: NONE, length: 0, bits: 0 };

    /// An object.
    pub(super) fn object(kind: i32, address: *mut c_void) -> Any {
        Any { kind, length: 0, bits: address.expose_provenance() as u64 }
    }

    pub(super) fn address<T>(&self) -> *mut T {
        ptr::with_exposed_provenance_mut(self.bits as usize)
    }

    /// The content of an object of this type.
    ///
    /// # Safety
    /// The value has the address of such an object, which lives as long as the value.
    unsafe fn content<T>(&self) -> &T {
        // SAFETY: the caller guarantees the object.
        unsafe { &(*self.address::<Object<T>>()).content }
    }

    /// The tensor, if the value is one.
    ///
    /// # Safety
    /// The value is one of tvm-ffi's.
    pub(super) unsafe fn as_tensor(&self) -> Option<&DlTensor> {
        // SAFETY: a value of this kind has the address of a tensor.
        unsafe {
            match self.kind {
                DL_TENSOR => Some(&*self.address()),
                TENSOR => Some(self.content()),
                _ => None,
            }
        }
    }

    /// The text, if the value is one.
    ///
    /// # Safety
    /// The value is one of tvm-ffi's.
    ///
    /// # Errors
    /// The text is not UTF-8.
    pub(super) unsafe fn as_text(&self) -> Result<Option<&str>, Error> {
        // SAFETY: a value of this kind has the address of a text, or is one.
        let bytes = unsafe {
            match self.kind {
                RAW_TEXT => CStr::from_ptr(self.address()).to_bytes(),
                SMALL_TEXT => {
                    let count = SMALL.min(self.length as usize);
                    slice::from_raw_parts((&raw const self.bits).cast(), count)
                }
                TEXT => self.content::<List<u8>>().elements(),
                _ => return Ok(None),
            }
        };
        str::from_utf8(bytes).map(Some).map_err(|_| refused("a text of tvm-ffi's is not UTF-8"))
    }

    /// The integers, if the value is a list of them.
    ///
    /// # Safety
    /// The value is one of tvm-ffi's.
    pub(super) unsafe fn as_integers(&self) -> Option<Vec<i64>> {
        // SAFETY: a value of this kind has the address of a list.
        unsafe {
            match self.kind {
                SHAPE => Some(self.content::<List<i64>>().elements().to_vec()),
                ARRAY | LIST => {
                    let all = self.content::<List<Any>>().elements();
                    all.iter().map(|x| (x.kind == INTEGER).then_some(x.bits as i64)).collect()
                }
                _ => None,
            }
        }
    }
}

impl List<u8> {
    /// A text, which must live as long as the result.
    pub(super) fn of(text: &str) -> List<u8> {
        List { first: text.as_ptr(), count: text.len() as i64 }
    }
}

impl<T> List<T> {
    /// The elements.
    ///
    /// # Safety
    /// The list is one of tvm-ffi's.
    pub(super) unsafe fn elements(&self) -> &[T] {
        match usize::try_from(self.count) {
            // SAFETY: the caller guarantees the elements.
            Ok(count @ 1..) => unsafe { slice::from_raw_parts(self.first, count) },
            _ => &[],
        }
    }
}
