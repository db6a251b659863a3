//! Arguments that a call gets from Python.

use fa3_call::{Access, DIMS, Element, Error, Given, Place, Tensor, Values};
use fa3_types::Dtype;
use pyo3::exceptions::{PyOverflowError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyInt, PyString, PyTuple};

use crate::dlpack::Described;
use crate::error::caller;

/// A tensor of a call: torch's, or a tuple (dtype, address, shape, strides). `described` is torch's description, if
/// torch describes it.
pub(crate) struct Argument<'a, 'py> {
    pub(crate) name: &'a str,
    pub(crate) tensor: Bound<'py, PyAny>,
    pub(crate) described: Option<Described>,
}

/// The tensors of a call.
pub(crate) struct Arguments<'a, 'py> {
    place: Place,
    given: &'a [Argument<'a, 'py>],
    copies: Vec<Bound<'py, PyAny>>,
}

impl<'a, 'py> Arguments<'a, 'py> {
    /// Tensors for a call in this place.
    pub(crate) fn new(place: Place, given: &'a [Argument<'a, 'py>]) -> Arguments<'a, 'py> {
        Arguments { place, given, copies: Vec::new() }
    }

    /// The tensor of this name, if it is given.
    pub(crate) fn find(&self, name: &str) -> Option<&'a Argument<'a, 'py>> {
        self.given.iter().find(|given| given.name == name)
    }

    /// A tensor that an operation can use. If the operation cannot use torch's tensor as it is, it is copied.
    fn tensor(&mut self, name: &'static str, access: Access) -> Result<Option<Tensor>, Error> {
        let Some(Argument { tensor: x, described, .. }) = self.find(name) else { return Ok(None) };
        if described.is_none()
            && let Ok(numbers) = x.cast::<PyTuple>()
        {
            let tensor = of_numbers(name, numbers)?;
            let is_copied = match (access, self.place) {
                (Access::Rows, Place::CheckedForGpu) => !tensor.has_rows(),
                // It is not known where a tensor without memory will lie.
                (Access::Aligned { .. }, Place::CheckedForGpu | Place::CheckedForCpu) => true,
                _ => false,
            };
            return Ok(Some(if is_copied { tensor.contiguous() } else { tensor }));
        }
        let tensor = match described.as_ref().filter(|found| self.is_at(Some(found.device))) {
            Some(found) => found.named(name)?,
            None => {
                // The tensor's attributes say what is wrong, if anything is.
                self.check_place(name, x).map_err(caller)?;
                of_torch(name, x)?
            }
        };
        let method = match tensor.is_readable(access, self.place) {
            true if tensor.is_aligned(access, self.place) => return Ok(Some(tensor)),
            true => "clone",
            false => "contiguous",
        };
        let copy = x.call_method0(method).map_err(caller)?;
        let tensor = of_torch(name, &copy)?;
        self.copies.push(copy);
        Ok(Some(tensor))
    }

    /// Whether a device, with -1 for the CPU, is where the call is computed.
    fn is_at(&self, device: Option<i32>) -> bool {
        match self.place {
            Place::Stream { device: wanted, .. } => {
                device.is_some_and(|device| u32::try_from(device) == Ok(wanted))
            }
            Place::Cpu | Place::CheckedForGpu | Place::CheckedForCpu => device == Some(-1),
        }
    }

    /// Checks that a tensor is where the call is computed.
    fn check_place(&self, name: &str, x: &Bound<'py, PyAny>) -> PyResult<()> {
        let py = x.py();
        let device = match self.place {
            Place::Stream { .. } => Some(x.call_method0(intern!(py, "get_device"))?.extract()?),
            // Tensors without memory have the number of the CPU as well.
            Place::Cpu | Place::CheckedForGpu | Place::CheckedForCpu => {
                x.getattr(intern!(py, "is_cpu"))?.is_truthy()?.then_some(-1)
            }
        };
        if self.is_at(device) {
            return Ok(());
        }
        let Argument { name: first_name, tensor: first, .. } = &self.given[0];
        let also = if first.is(x) {
            String::new()
        } else {
            format!(" and {first_name} on {}", first.getattr("device")?)
        };
        let sentence =
            format!("{name} is on {}{also}, expected one CUDA device or the CPU", x.getattr("device")?);
        Err(PyValueError::new_err(sentence))
    }
}

impl Given for Arguments<'_, '_> {
    fn read(&mut self, name: &'static str, access: Access) -> Result<Option<Tensor>, Error> {
        self.tensor(name, access)
    }

    /// The Python sources make such an output, so it has the dtype.
    fn output(&mut self, name: &'static str, _dtype: Dtype) -> Result<Option<u64>, Error> {
        let address = |given: &Argument<'_, '_>| match (&given.described, given.tensor.cast::<PyTuple>()) {
            (Some(found), _) => Ok(found.address),
            (None, Ok(numbers)) => numbers.get_item(1)?.extract(),
            (None, Err(_)) => given.tensor.call_method0(intern!(given.tensor.py(), "data_ptr"))?.extract(),
        };
        self.find(name).map(address).transpose().map_err(caller)
    }

    fn bare(&self, name: &'static str) -> Result<Option<u64>, Error> {
        let address = self.find(name).and_then(|given| given.tensor.cast::<PyInt>().ok());
        address.map(|address| address.extract()).transpose().map_err(caller)
    }

    fn other(&self, names: &[(&'static str, Option<u64>)]) -> Option<String> {
        let is_known = |name: &str| names.iter().any(|(known, _)| *known == name);
        self.given.iter().map(|given| given.name).find(|name| !is_known(name)).map(Into::into)
    }
}

fn of_torch(name: &'static str, x: &Bound<'_, PyAny>) -> Result<Tensor, Error> {
    let py = x.py();
    let read = || -> PyResult<_> {
        let address = x.call_method0(intern!(py, "data_ptr"))?.extract()?;
        let extents = x.getattr(intern!(py, "shape"))?.cast_into()?;
        let steps = x.call_method0(intern!(py, "stride"))?.cast_into()?;
        Ok((x.getattr(intern!(py, "dtype"))?, address, extents, steps))
    };
    tensor(name, read().map_err(caller)?)
}

fn of_numbers(name: &'static str, numbers: &Bound<'_, PyTuple>) -> Result<Tensor, Error> {
    tensor(name, numbers.extract().map_err(caller)?)
}

fn tensor(
    name: &'static str,
    (dtype, address, extents, steps): (Bound<'_, PyAny>, u64, Bound<'_, PyTuple>, Bound<'_, PyTuple>),
) -> Result<Tensor, Error> {
    let (mut shape, mut strides) = ([0; DIMS], [0; DIMS]);
    let mut read = || -> PyResult<_> {
        for (to, extent) in shape.iter_mut().zip(extents.iter_borrowed()) {
            *to = extent.extract()?;
        }
        for (to, stride) in strides.iter_mut().zip(steps.iter_borrowed()) {
            *to = stride.extract()?;
        }
        element(&dtype)
    };
    let element = read().map_err(caller)?;
    Tensor::new(name, element, address, (extents.len(), shape), (steps.len(), strides))
}

/// Torch's dtypes.
static DTYPES: PyOnceLock<Vec<(Py<PyAny>, Element)>> = PyOnceLock::new();

/// The element type of a dtype, which is torch's or a name.
///
/// # Errors
/// Torch cannot be imported.
fn element(dtype: &Bound<'_, PyAny>) -> PyResult<Element> {
    let py = dtype.py();
    if let Ok(name) = dtype.cast::<PyString>() {
        let name = name.to_str()?;
        let number = || name.parse().map_or_else(|_| Element::Other(name.to_owned()), Element::Number);
        return Ok(if name == "i32" { Element::Integer } else { number() });
    }
    let all = DTYPES.get_or_try_init(py, || {
        let torch = py.import("torch")?;
        let names = [
            ("bfloat16", Element::Number(Dtype::Bf16)),
            ("float16", Element::Number(Dtype::F16)),
            ("float32", Element::Number(Dtype::F32)),
            ("float8_e4m3fn", Element::Number(Dtype::E4m3)),
            ("int8", Element::Number(Dtype::Int8)),
            ("int32", Element::Integer),
        ];
        names
            .into_iter()
            .map(|(name, element)| Ok((torch.getattr(name)?.unbind(), element)))
            .collect::<PyResult<_>>()
    })?;
    let known = all.iter().find(|(other, _)| dtype.is(other)).map(|(_, element)| element.clone());
    Ok(known.unwrap_or_else(|| Element::Other(dtype.to_string())))
}

/// A call's options: a dict of values by their names. `None` is an option's default.
pub(crate) struct Choices<'a, 'py>(pub(crate) &'a Bound<'py, PyDict>);

impl<'py> Choices<'_, 'py> {
    fn get<T>(&self, name: &str) -> Result<Option<T>, Error>
    where
        T: for<'a> FromPyObject<'a, 'py, Error = PyErr>,
    {
        let value = self.0.get_item(name).map_err(caller)?.filter(|value| !value.is_none());
        value.map(|value| value.extract()).transpose().map_err(caller)
    }
}

impl Values for Choices<'_, '_> {
    fn flag(&self, name: &str) -> Result<Option<bool>, Error> {
        self.get(name)
    }

    fn integer(&self, name: &str) -> Result<Option<i128>, Error> {
        Ok(self.get::<Number<i128>>(name)?.map(|Number(number)| number))
    }

    fn real(&self, name: &str) -> Result<Option<f64>, Error> {
        Ok(self.get::<Number<f64>>(name)?.map(|Number(number)| number))
    }

    fn integers(&self, name: &str) -> Result<Option<[i64; 3]>, Error> {
        let given = self.get::<(Number<i64>, Number<i64>, Number<i64>)>(name)?;
        Ok(given.map(|(Number(first), Number(second), Number(third))| [first, second, third]))
    }

    fn text(&self, name: &str) -> Result<Option<String>, Error> {
        self.get(name)
    }

    fn names(&self) -> Vec<String> {
        self.0.keys().iter().map(|name| name.to_string()).collect()
    }
}

/// A Python number, which has no bounds. A number outside T's range is refused like any other invalid number.
struct Number<T>(T);

impl<'a, 'py, T: FromPyObject<'a, 'py>> FromPyObject<'a, 'py> for Number<T> {
    type Error = PyErr;

    fn extract(given: Borrowed<'a, 'py, PyAny>) -> PyResult<Number<T>> {
        given.extract().map(Number).map_err(|error: T::Error| {
            let error: PyErr = error.into();
            if error.is_instance_of::<PyOverflowError>(given.py()) {
                PyValueError::new_err(format!("{} is too large or too small a number", &*given))
            } else {
                error
            }
        })
    }
}
