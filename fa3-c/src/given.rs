//! Tensors and options as C passes them.

use std::ffi::c_char;

use fa3_call::{Access, DIMS, Element, Error, Given, Place, Tensor, Values};
use fa3_types::Dtype;

use crate::{elements, text};

/// `fa3_tensor` of the header.
#[repr(C)]
#[derive(Debug)]
pub struct CTensor {
    name: *const c_char,
    dtype: i32,
    rank: i32,
    shape: *const i64,
    strides: *const i64,
}

/// `fa3_option` of the header.
#[repr(C)]
#[derive(Debug)]
pub struct COption {
    name: *const c_char,
    values: [f64; 3],
}

/// A tensor with its name.
pub(crate) struct Named {
    name: String,
    element: Element,
    shape: (usize, [usize; DIMS]),
    strides: Option<(usize, [i64; DIMS])>,
}

/// The tensors of a call in a place. A tensor's address is its index, because a plan needs no address.
pub(crate) struct Tensors {
    pub(crate) place: Place,
    pub(crate) given: Vec<Named>,
    /// The tensors that the operation took, with their indices and their sizes in bytes.
    pub(crate) taken: Vec<(&'static str, usize, u64)>,
}

/// An error of the caller's, in words.
pub(crate) fn refused(sentence: impl Into<String>) -> Error {
    Error::Caller(sentence.into().into())
}

/// The tensors that C passes.
///
/// # Safety
/// Their pointers are as the header says.
///
/// # Errors
/// A name, a type, a number of dimensions or an extent is invalid.
pub(crate) unsafe fn tensors(given: &[CTensor]) -> Result<Vec<Named>, Error> {
    let named = |x: &CTensor| {
        // SAFETY: the caller guarantees the pointers.
        let name = unsafe { text(x.name) }?;
        let rank = usize::try_from(x.rank).ok().filter(|rank| *rank <= DIMS);
        let Some(rank) = rank.filter(|rank| *rank == 0 || !x.shape.is_null()) else {
            return Err(refused(format!("{name} has rank {}, expected 0 to {DIMS}, and a shape", x.rank)));
        };
        let element = match x.dtype {
            0 => Element::Number(Dtype::F32),
            1 => Element::Number(Dtype::F16),
            2 => Element::Number(Dtype::Bf16),
            3 => Element::Number(Dtype::E4m3),
            4 => Element::Integer,
            5 => Element::Number(Dtype::Int8),
            other => return Err(refused(format!("{name} has dtype {other}, expected 0 to 5"))),
        };
        let (mut shape, mut strides) = ([0; DIMS], [0; DIMS]);
        // SAFETY: the caller guarantees the pointers.
        for (to, &extent) in shape.iter_mut().zip(unsafe { elements(x.shape, rank) }) {
            let wrong = |_| refused(format!("{name} has extent {extent}"));
            *to = usize::try_from(extent).map_err(wrong)?;
        }
        let steps = if x.strides.is_null() { 0 } else { rank };
        // SAFETY: as above.
        strides[..steps].copy_from_slice(unsafe { elements(x.strides, steps) });
        let strides = (!x.strides.is_null()).then_some((rank, strides));
        Ok(Named { name: name.to_owned(), element, shape: (rank, shape), strides })
    };
    given.iter().map(named).collect()
}

impl Tensors {
    fn find(&self, name: &'static str) -> Result<Option<(usize, Tensor)>, Error> {
        let mut all = self.given.iter().enumerate().filter(|(_, tensor)| tensor.name == name);
        let Some((index, Named { element, shape, strides, .. })) = all.next() else { return Ok(None) };
        if all.next().is_some() {
            return Err(refused(format!("there are two tensors {name}")));
        }
        let (address, any) = (index as u64, (shape.0, [0; DIMS]));
        let tensor = Tensor::new(name, element.clone(), address, *shape, strides.unwrap_or(any))?;
        Ok(Some((index, if strides.is_none() { tensor.contiguous() } else { tensor })))
    }

    fn take(&mut self, name: &'static str, access: Access) -> Result<Option<Tensor>, Error> {
        let Some((index, tensor)) = self.find(name)? else { return Ok(None) };
        tensor.check_access(access, self.place)?;
        self.taken.push((name, index, tensor.bytes()));
        Ok(Some(tensor))
    }
}

impl Given for Tensors {
    fn read(&mut self, name: &'static str, access: Access) -> Result<Option<Tensor>, Error> {
        self.take(name, access)
    }

    fn output(&mut self, name: &'static str, dtype: Dtype) -> Result<Option<u64>, Error> {
        let Some(tensor) = self.take(name, Access::Contiguous(1))? else { return Ok(None) };
        tensor.check_dtype(dtype)?;
        Ok(Some(0))
    }

    fn other(&self, _names: &[(&'static str, Option<u64>)]) -> Option<String> {
        let is_taken = |index: usize| self.taken.iter().any(|(_, taken, _)| *taken == index);
        let mut others = self.given.iter().enumerate().filter(|(index, _)| !is_taken(*index));
        others.next().map(|(_, tensor)| tensor.name.clone())
    }
}

/// The options of a call, by their names.
pub(crate) struct Choices(Vec<(String, [f64; 3])>);

/// The options that C passes.
///
/// # Safety
/// Their pointers are as the header says.
///
/// # Errors
/// A name is invalid.
pub(crate) unsafe fn options(given: &[COption]) -> Result<Choices, Error> {
    // SAFETY: the caller guarantees the pointers.
    let named = |x: &COption| Ok((unsafe { text(x.name) }?.to_owned(), x.values));
    given.iter().map(named).collect::<Result<_, _>>().map(Choices)
}

/// A number of C as an integer.
///
/// # Errors
/// It has a fraction, or is too large for doubles to tell it from its neighbours.
fn integer(name: &str, value: f64) -> Result<i64, Error> {
    let is_exact = value.fract() == 0.0 && value.abs() <= (1_u64 << 53) as f64;
    if is_exact { Ok(value as i64) } else { Err(refused(format!("{name} is {value}, expected an integer"))) }
}

impl Choices {
    fn find(&self, name: &str) -> Option<[f64; 3]> {
        self.0.iter().find(|(given, _)| given == name).map(|(_, values)| *values)
    }
}

impl Values for Choices {
    fn flag(&self, name: &str) -> Result<Option<bool>, Error> {
        match self.real(name)? {
            None => Ok(None),
            Some(0.0) => Ok(Some(false)),
            Some(1.0) => Ok(Some(true)),
            Some(value) => Err(refused(format!("{name} is {value}, expected 0 or 1"))),
        }
    }

    fn text(&self, name: &str) -> Result<Option<String>, Error> {
        match self.find(name) {
            Some(_) => Err(refused(format!("{name} is a text, and options of C are numbers"))),
            None => Ok(None),
        }
    }

    fn integer(&self, name: &str) -> Result<Option<i128>, Error> {
        Ok(self.real(name)?.map(|value| integer(name, value)).transpose()?.map(i128::from))
    }

    fn real(&self, name: &str) -> Result<Option<f64>, Error> {
        match self.find(name) {
            Some([value, 0.0, 0.0]) => Ok(Some(value)),
            Some(_) => Err(refused(format!("{name} has three values, expected one"))),
            None => Ok(None),
        }
    }

    fn integers(&self, name: &str) -> Result<Option<[i64; 3]>, Error> {
        let Some([first, second, third]) = self.find(name) else { return Ok(None) };
        Ok(Some([integer(name, first)?, integer(name, second)?, integer(name, third)?]))
    }

    fn names(&self) -> Vec<String> {
        self.0.iter().map(|(name, _)| name.clone()).collect()
    }
}
