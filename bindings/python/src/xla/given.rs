//! The buffers and attributes of a call from XLA.

use std::ffi::c_void;
use std::slice;
use std::str;

use fa3_call::{DIMS, Element, Error, Place};
use fa3_types::Dtype;

use super::abi::{self, check};
use crate::buffers::{Buffer, Buffers};
use crate::error::refused;

/// XLA's types of elements.
const PRED: i32 = 1;
const S8: i32 = 2;
const S32: i32 = 4;
const S64: i32 = 5;
const F16: i32 = 10;
const F32: i32 = 11;
const F64: i32 = 12;
const BF16: i32 = 16;
const F8E4M3FN: i32 = 20;

/// The kinds of attributes that are read.
const ARRAY: i32 = 1;
const SCALAR: i32 = 3;
const STRING: i32 = 4;

/// The attributes that are no options of the operation.
const OWN: [&str; 2] = ["operation", "tensors"];

/// A list that XLA passes as an address and a length.
///
/// # Safety
/// The address has this number of elements, which live as long as the list.
unsafe fn list<'a, T>(first: *const T, count: i64) -> &'a [T] {
    match usize::try_from(count) {
        // SAFETY: the caller guarantees the elements.
        Ok(count @ 1..) => unsafe { slice::from_raw_parts(first, count) },
        _ => &[],
    }
}

/// The arguments and results of a call in a place, under these names. All are contiguous.
///
/// # Safety
/// The frame is one of XLA's.
///
/// # Errors
/// There is another number of names, or a buffer is invalid.
pub(super) unsafe fn buffers<'a>(
    frame: &abi::Frame,
    names: &'a str,
    place: Place,
) -> Result<Buffers<'a>, Error> {
    let mut all = Vec::with_capacity(12);
    for values in [&frame.arguments, &frame.results] {
        check("Args", values.size, size_of::<abi::Values>())?;
        // SAFETY: each argument or result has a kind and an address.
        let lists = unsafe { (list(values.kinds, values.count), list(values.values, values.count)) };
        for (&kind, &buffer) in lists.0.iter().zip(lists.1) {
            if kind != abi::BUFFER {
                return Err(refused(format!("an argument or result has kind {kind}, expected a buffer")));
            }
            // SAFETY: a buffer lives as long as the call.
            all.push(unsafe { contiguous(&*buffer) }?);
        }
    }
    let names: Vec<_> = names.split(' ').collect();
    if names.len() != all.len() {
        return Err(refused(format!(
            "there are {} buffers, and {} names of tensors",
            all.len(),
            names.len()
        )));
    }
    Ok(Buffers { place, given: names.into_iter().zip(all).collect() })
}

/// A buffer of XLA's.
///
/// # Safety
/// It is one.
///
/// # Errors
/// It has more than [`DIMS`] dimensions.
unsafe fn contiguous(buffer: &abi::Buffer) -> Result<Buffer, Error> {
    check("Buffer", buffer.size, size_of::<abi::Buffer>())?;
    // SAFETY: there is an extent for each dimension.
    let extents = unsafe { list(buffer.dims, buffer.rank) };
    let (rank, mut shape) = (extents.len(), [0; DIMS]);
    if rank > DIMS {
        return Err(refused(format!("a buffer has {rank} dimensions, expected up to {DIMS}")));
    }
    shape.iter_mut().zip(extents).for_each(|(to, extent)| *to = *extent as usize);
    let element = match buffer.dtype {
        S8 => Element::Number(Dtype::Int8),
        S32 => Element::Integer,
        F16 => Element::Number(Dtype::F16),
        F32 => Element::Number(Dtype::F32),
        BF16 => Element::Number(Dtype::Bf16),
        F8E4M3FN => Element::Number(Dtype::E4m3),
        other => Element::Other(format!("XLA's type {other}")),
    };
    Ok(Buffer { element, address: buffer.data.expose_provenance() as u64, rank, shape, strides: None })
}

/// The attributes of a call, by their names: what is computed, the names of the buffers, and the options.
pub(super) struct Attributes<'a> {
    kinds: &'a [i32],
    names: Vec<&'a str>,
    values: &'a [*const c_void],
}

impl<'a> Attributes<'a> {
    /// The attributes of a call.
    ///
    /// # Safety
    /// They are XLA's, and live as long as the result.
    ///
    /// # Errors
    /// A name is no valid text.
    pub(super) unsafe fn of(given: &'a abi::Attributes) -> Result<Attributes<'a>, Error> {
        check("Attrs", given.size, size_of::<abi::Attributes>())?;
        // SAFETY: each attribute has a kind, a name and an address.
        let (kinds, names, values) = unsafe {
            (list(given.kinds, given.count), list(given.names, given.count), list(given.values, given.count))
        };
        // SAFETY: a name lives as long as the call.
        let names = names.iter().map(|&name| unsafe { text(&*name) }).collect::<Result<_, _>>()?;
        Ok(Attributes { kinds, names, values })
    }

    /// The kind and the address of an attribute.
    fn find(&self, name: &str) -> Option<(i32, *const c_void)> {
        let index = self.names.iter().position(|given| *given == name)?;
        Some((self.kinds[index], self.values[index]))
    }

    /// A text.
    ///
    /// # Errors
    /// The attribute is missing or no text.
    pub(super) fn string(&self, name: &str) -> Result<&'a str, Error> {
        match self.find(name) {
            // SAFETY: an attribute of this kind is a text.
            Some((STRING, value)) => unsafe { text(&*value.cast::<abi::Text>()) },
            _ => Err(refused(format!("there is no text {name}"))),
        }
    }

    /// A number, if it is given.
    fn scalar<T: Copy>(&self, name: &str, dtype: i32) -> Result<Option<T>, Error> {
        let Some((kind, value)) = self.find(name) else { return Ok(None) };
        // SAFETY: an attribute of this kind is a number.
        match (kind == SCALAR).then(|| unsafe { &*value.cast::<abi::Scalar>() }) {
            // SAFETY: at the address is a number of this type.
            Some(scalar) if scalar.dtype == dtype => Ok(Some(unsafe { *scalar.value.cast::<T>() })),
            Some(scalar) => Err(refused(format!("{name} has XLA's type {}, expected {dtype}", scalar.dtype))),
            None => Err(refused(format!("{name} is no number"))),
        }
    }
}

impl fa3_call::Values for Attributes<'_> {
    fn flag(&self, name: &str) -> Result<Option<bool>, Error> {
        Ok(self.scalar::<u8>(name, PRED)?.map(|value| value != 0))
    }

    fn integer(&self, name: &str) -> Result<Option<i128>, Error> {
        Ok(self.scalar::<i64>(name, S64)?.map(i128::from))
    }

    fn real(&self, name: &str) -> Result<Option<f64>, Error> {
        self.scalar(name, F64)
    }

    fn integers(&self, name: &str) -> Result<Option<[i64; 3]>, Error> {
        let Some((kind, value)) = self.find(name) else { return Ok(None) };
        // SAFETY: an attribute of this kind is a list of numbers.
        match (kind == ARRAY).then(|| unsafe { &*value.cast::<abi::Array>() }) {
            Some(abi::Array { dtype: S64, count: 3, first }) => {
                // SAFETY: the list has three numbers of this type.
                Ok(Some(unsafe { *first.cast::<[i64; 3]>() }))
            }
            _ => Err(refused(format!("{name} is no list of three 64-bit integers"))),
        }
    }

    fn text(&self, name: &str) -> Result<Option<String>, Error> {
        self.find(name).map(|_| self.string(name).map(Into::into)).transpose()
    }

    fn names(&self) -> Vec<String> {
        self.names.iter().filter(|name| !OWN.contains(name)).map(|name| (*name).to_owned()).collect()
    }
}

/// A text of XLA's.
///
/// # Safety
/// It lives as long as the result.
///
/// # Errors
/// It is not UTF-8.
unsafe fn text(text: &abi::Text) -> Result<&str, Error> {
    // SAFETY: the caller guarantees the text.
    let bytes = unsafe { list(text.first, text.bytes as i64) };
    str::from_utf8(bytes).map_err(|_| refused("a text of XLA's is not UTF-8"))
}
