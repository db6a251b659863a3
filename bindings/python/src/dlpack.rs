//! DLPack's C exchange, by which torch 2.10 and newer describe a tensor in one call, and name their current stream.
//! Reading a tensor's attributes one by one takes three times as long.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::slice;

use fa3_call::{DIMS, Element, Error, Tensor};
use fa3_types::Dtype;
use pyo3::ffi::{self, PyObject};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

/// A tensor, as torch describes it by DLPack.
pub(crate) struct Described {
    /// The number of the GPU, or -1 for the CPU, as torch's `get_device` counts.
    pub(crate) device: i32,
    /// The type of elements.
    pub(crate) element: Element,
    /// The address of the first element.
    pub(crate) address: u64,
    /// Number of dimensions.
    pub(crate) rank: usize,
    /// The extents of the dimensions.
    pub(crate) shape: [usize; DIMS],
    /// The strides of the dimensions, in elements.
    pub(crate) strides: [i64; DIMS],
}

/// A tensor in DLPack's layout.
#[repr(C)]
pub(crate) struct DlTensor {
    pub(crate) data: *mut c_void,
    pub(crate) device_type: i32,
    pub(crate) device: i32,
    pub(crate) rank: i32,
    pub(crate) code: u8,
    pub(crate) bits: u8,
    pub(crate) lanes: u16,
    pub(crate) shape: *const i64,
    pub(crate) strides: *const i64,
    pub(crate) byte_offset: u64,
}

/// Torch's functions for DLPack. Later minor versions add fields behind these.
#[repr(C)]
struct Exchange {
    major: u32,
    minor: u32,
    previous: *const c_void,
    unused: [*const c_void; 3],
    describe: Option<Describe>,
    stream: Option<StreamOf>,
}

/// Describes a Python tensor without a copy and without waiting. If the result is not 0, there is a Python exception.
type Describe = unsafe extern "C" fn(*mut PyObject, *mut DlTensor) -> c_int;

/// Gives the current stream of a device of this kind and number. If the result is not 0, there is a Python exception.
type StreamOf = unsafe extern "C" fn(i32, i32, *mut *mut c_void) -> c_int;

/// The version of the structures here.
const MAJOR: u32 = 1;

/// Numbers by which DLPack names devices.
pub(crate) const CPU: i32 = 1;
pub(crate) const CUDA: i32 = 2;

/// DLPack's kinds of numbers, with their bits.
pub(crate) const NUMBERS: [(u8, u8, Dtype); 5] = [
    (0, 8, Dtype::Int8),
    (2, 16, Dtype::F16),
    (2, 32, Dtype::F32),
    (4, 16, Dtype::Bf16),
    (10, 8, Dtype::E4m3),
];

/// The type torch.Tensor, and torch's functions.
struct Torchs {
    tensor: Py<PyType>,
    describe: Describe,
    stream: Option<StreamOf>,
}

impl Torchs {
    /// Torch's functions. `None` if it has none.
    fn find(py: Python<'_>) -> Option<&'static Torchs> {
        static FOUND: PyOnceLock<Option<Torchs>> = PyOnceLock::new();
        FOUND.get_or_init(py, || torchs(py).ok().flatten()).as_ref()
    }
}

/// The driver's handle of torch's current stream of a GPU. `None` if DLPack does not tell it.
pub(crate) fn current_stream(py: Python<'_>, device: i32) -> Option<usize> {
    let stream = Torchs::find(py)?.stream?;
    let mut found = ptr::null_mut();
    // SAFETY: the function has this signature in DLPack's version, which was checked, and the interpreter is attached.
    #[allow(unsafe_code, reason = "it is a function of C")]
    let result = unsafe { stream(CUDA, device, &raw mut found) };
    if result != 0 {
        drop(PyErr::take(py));
        return None;
    }
    Some(found.expose_provenance())
}

impl Described {
    /// The description of a tensor of torch on the CPU or on a GPU, with at most [`DIMS`] dimensions and a type of
    /// elements that operations take. `None` for every other object, for subclasses, whose attributes may be their own,
    /// and for tensors without memory.
    pub(crate) fn of(x: &Bound<'_, PyAny>) -> Option<Described> {
        let py = x.py();
        let Torchs { tensor, describe, .. } = Torchs::find(py)?;
        if x.get_type_ptr() != tensor.as_ptr().cast() {
            return None;
        }
        let mut found = DlTensor::default();
        // SAFETY: x is a tensor of the type that has this function, the interpreter is attached, and the result has the
        // layout of DLPack's version, which was checked.
        #[allow(unsafe_code, reason = "it is a function of C")]
        let result = unsafe { describe(x.as_ptr(), &raw mut found) };
        if result != 0 {
            // The tensor's attributes, which are read instead, say what is wrong.
            drop(PyErr::take(py));
            return None;
        }
        let [extents, steps] = found.dims();
        let rank = extents.len();
        if rank > DIMS || steps.len() != rank {
            return None;
        }
        let (mut shape, mut strides) = ([0; DIMS], [0; DIMS]);
        shape.iter_mut().zip(extents).for_each(|(to, extent)| *to = *extent as usize);
        strides[..rank].copy_from_slice(steps);
        let (device, element, address) = (found.device()?, found.element()?, found.address());
        Some(Described { device, element, address, rank, shape, strides })
    }

    /// Whether another tensor differs only in its address.
    pub(crate) fn has_layout_of(&self, other: &Described) -> bool {
        let Described { device, element, address: _, rank, shape, strides } = self;
        (*device, element, *rank) == (other.device, &other.element, other.rank)
            && (shape, strides) == (&other.shape, &other.strides)
    }

    /// The tensor under a name.
    ///
    /// # Errors
    /// Never, since there are no more than [`DIMS`] dimensions.
    pub(crate) fn named(&self, name: &'static str) -> Result<Tensor, Error> {
        let Described { element, address, rank, shape, strides, .. } = self;
        Tensor::new(name, element.clone(), *address, (*rank, *shape), (*rank, *strides))
    }
}

impl Default for DlTensor {
    /// No tensor.
    fn default() -> DlTensor {
        DlTensor {
            data: ptr::null_mut(),
            device_type: 0,
            device: 0,
            rank: 0,
            code: 0,
            bits: 0,
            lanes: 0,
            shape: ptr::null(),
            strides: ptr::null(),
            byte_offset: 0,
        }
    }
}

impl DlTensor {
    /// The number of the GPU, or -1 for the CPU. `None` for other devices.
    fn device(&self) -> Option<i32> {
        match self.device_type {
            CPU => Some(-1),
            CUDA => Some(self.device),
            _ => None,
        }
    }

    /// The address of the first element.
    pub(crate) fn address(&self) -> u64 {
        (self.data.addr() as u64).wrapping_add(self.byte_offset)
    }

    /// The type of elements, if operations take it.
    pub(crate) fn element(&self) -> Option<Element> {
        let numbers = NUMBERS.iter().find(|(code, bits, _)| (*code, *bits) == (self.code, self.bits));
        match (self.lanes, numbers) {
            (1, Some((.., dtype))) => Some(Element::Number(*dtype)),
            (1, None) if (self.code, self.bits) == (0, 32) => Some(Element::Integer),
            _ => None,
        }
    }

    /// The extents and strides of the tensor, which must not have changed since.
    pub(crate) fn dims(&self) -> [&[i64]; 2] {
        let rank = usize::try_from(self.rank).unwrap_or(0);
        [self.shape, self.strides].map(|numbers| {
            if rank == 0 || numbers.is_null() {
                return &[][..];
            }
            // SAFETY: both arrays have an element for each dimension and belong to the tensor, which the caller holds.
            #[allow(unsafe_code, reason = "torch's arrays are plain addresses")]
            unsafe {
                slice::from_raw_parts(numbers, rank)
            }
        })
    }
}

/// Torch's type of tensors, and its functions.
fn torchs(py: Python<'_>) -> PyResult<Option<Torchs>> {
    let tensor = py.import("torch")?.getattr("Tensor")?.cast_into::<PyType>()?;
    let capsule = tensor.getattr("__dlpack_c_exchange_api__")?;
    // SAFETY: the capsule is an object, and the name ends with a zero.
    #[allow(unsafe_code, reason = "a capsule has a plain address")]
    let exchange = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), c"dlpack_exchange_api".as_ptr()) };
    if exchange.is_null() {
        return Err(PyErr::fetch(py));
    }
    // SAFETY: DLPack says that a capsule of this name has such a table, with an equal head in every version, which
    // lives as long as the process. Its other fields are read if the version is known.
    #[allow(unsafe_code, reason = "a capsule has a plain address")]
    let (describe, stream) = unsafe {
        let exchange = exchange.cast::<Exchange>();
        if (*exchange).major == MAJOR { ((*exchange).describe, (*exchange).stream) } else { (None, None) }
    };
    Ok(describe.map(|describe| Torchs { tensor: tensor.unbind(), describe, stream }))
}
