//! Calls that a function of Python makes again: with options of an earlier call, over other tensors.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use fa3_call::{Access, DIMS, Element, Place};
use fa3_types::Dtype;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyFloat, PyInt, PyString, PyTuple};

use crate::arguments::Argument;
use crate::dlpack::{self, Described};
use crate::operation::Operation;
use crate::torch::Torch;
use crate::workspaces::Allocate;

/// Number of calls that are kept, such as those of a model's different layers.
const KEPT: usize = 8;

/// Repeats(names, allocate)
///
/// Attention that a function computes again. The function gives its tensors in the order of `names`, the first three of
/// which are q, k and v, and all of its other arguments as options. After a call without gradients it keeps the options,
/// and the operation that they mean. A later call with equal options then converts and checks no option: `attend` does
/// everything that is left. `allocate(like, bytes, zeros)` makes a workspace as in `run`.
#[pyclass(frozen, module = "fa3._fa3")]
pub(crate) struct Repeats {
    names: Vec<String>,
    allocate: Py<PyAny>,
    kept: Mutex<VecDeque<Arc<Kept>>>,
}

/// A call that is kept.
struct Kept {
    options: Vec<Py<PyAny>>,
    /// The number of dimensions of each tensor, and `None` for a tensor that is not given.
    ranks: Vec<Option<usize>>,
    operation: Py<Operation>,
    with_lse: bool,
}

#[pymethods]
impl Repeats {
    #[new]
    fn new(names: Vec<String>, allocate: Py<PyAny>) -> Repeats {
        Repeats { names, allocate, kept: Mutex::default() }
    }

    /// keep(tensors, options, operation, with_lse)
    ///
    /// Keeps a valid call without gradients, which computes O of q's dtype, and LSE if `with_lse`. Options that may
    /// change, such as tensors and lists, are not kept, nor is such a call.
    fn keep(
        &self,
        tensors: &Bound<'_, PyTuple>,
        options: &Bound<'_, PyTuple>,
        operation: Py<Operation>,
        with_lse: bool,
    ) {
        if tensors.len() != self.names.len() || !options.iter().all(|option| is_constant(&option)) {
            return;
        }
        let mut ranks = Vec::with_capacity(tensors.len());
        for x in tensors.iter_borrowed() {
            let rank = Described::of(&x).map(|found| found.rank);
            if rank.is_none() && !x.is_none() {
                return;
            }
            ranks.push(rank);
        }
        if ranks.iter().take(3).any(Option::is_none) || self.find(tensors, options).is_some() {
            return;
        }
        let options: Vec<_> = options.iter().map(Bound::unbind).collect();
        let call = Arc::new(Kept { options, ranks, operation, with_lse });
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let oldest = if kept.len() == KEPT { kept.pop_back() } else { None };
        kept.push_front(call);
        drop(kept);
        // Python's objects are dropped without the lock.
        drop(oldest);
    }

    /// attend(tensors, options)
    ///
    /// O, or O and LSE, of a call whose options are kept. None if they are not, if the call is not plain (a tensor is a
    /// subclass or float32, or its memory does not have its values; a tracer, mode or transform is active; autograd
    /// records the call), or if it is invalid: then the function has to look at all of its arguments.
    fn attend<'py>(
        &self,
        tensors: &Bound<'py, PyTuple>,
        options: &Bound<'py, PyTuple>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let py = tensors.py();
        let (Some(kept), Some(torch)) = (self.find(tensors, options), Torch::find(py)) else {
            return Ok(None);
        };
        if !torch.is_plain(py)? {
            return Ok(None);
        }
        let with_grad = torch.is_grad_enabled(py)?;
        let mut given = Vec::with_capacity(self.names.len() + 2);
        for ((name, rank), tensor) in self.names.iter().zip(&kept.ranks).zip(tensors.iter()) {
            let Some(rank) = rank else { continue };
            let Some(described) = plain(&tensor, with_grad)?.filter(|found| found.rank == *rank) else {
                return Ok(None);
            };
            given.push(Argument { name, tensor, described: Some(described) });
        }
        let (Some(q), Some(v)) = (given[0].described.as_ref(), given[2].described.as_ref()) else {
            return Ok(None);
        };
        let Some(place) = place(py, q) else { return Ok(None) };
        let (of_q, rank) = (&given[0].tensor, q.rank);
        let mut shape = q.shape;
        shape[rank - 1] = v.shape[v.rank - 1];
        let is_like_q =
            shape == q.shape && q.named("q").is_ok_and(|q| q.is_readable(Access::Contiguous(1), Place::Cpu));
        let o =
            if is_like_q { torch.empty_like(of_q)? } else { torch.new_empty(of_q, &shape[..rank], false)? };
        let lse = kept.with_lse.then(|| torch.new_empty(of_q, &of_lse(shape, rank)[..rank - 1], true));
        let lse = lse.transpose()?;
        let allocate = Allocate { function: self.allocate.clone_ref(py), like: Some(of_q.clone().unbind()) };
        for (name, x) in [("o", Some(&o)), ("lse", lse.as_ref())] {
            let Some(x) = x else { continue };
            given.push(Argument { name, tensor: x.clone(), described: Described::of(x) });
        }
        match kept.operation.get().computes.compute(py, place, &given, &allocate) {
            Ok(_) => {}
            Err(error)
                if error.is_instance_of::<PyValueError>(py) || error.is_instance_of::<PyTypeError>(py) =>
            {
                return Ok(None);
            }
            Err(error) => return Err(error),
        }
        Ok(Some(match lse {
            None => o,
            Some(lse) => PyTuple::new(py, [o, lse])?.into_any(),
        }))
    }
}

impl Repeats {
    /// The kept call with these options, and with tensors where these are.
    fn find(&self, tensors: &Bound<'_, PyTuple>, options: &Bound<'_, PyTuple>) -> Option<Arc<Kept>> {
        let py = options.py();
        let is_this = |kept: &&Arc<Kept>| {
            kept.options.len() == options.len()
                && kept.ranks.len() == tensors.len()
                && kept.options.iter().zip(options.iter_borrowed()).all(|(x, y)| is_same(x.bind(py), &y))
                && kept.ranks.iter().zip(tensors.iter_borrowed()).all(|(x, y)| x.is_none() == y.is_none())
        };
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.iter().find(is_this).map(Arc::clone)
    }
}

/// Whether a value never changes: None, a bool, an integer, a float, a string, or a tuple of them; no subclass of them.
fn is_constant(x: &Bound<'_, PyAny>) -> bool {
    x.is_none()
        || x.is_exact_instance_of::<PyBool>()
        || x.is_exact_instance_of::<PyInt>()
        || x.is_exact_instance_of::<PyFloat>()
        || x.is_exact_instance_of::<PyString>()
        || x.cast_exact::<PyTuple>().is_ok_and(|x| x.iter().all(|x| is_constant(&x)))
}

/// Whether a value has the type and the bits of a constant. No code of Python's programs runs.
fn is_same(constant: &Bound<'_, PyAny>, x: &Bound<'_, PyAny>) -> bool {
    if constant.is(x) {
        return true;
    }
    if let (Ok(x), Ok(y)) = (constant.cast_exact::<PyFloat>(), x.cast_exact::<PyFloat>()) {
        return x.value().to_bits() == y.value().to_bits();
    }
    if let (Ok(x), Ok(y)) = (constant.cast_exact::<PyTuple>(), x.cast_exact::<PyTuple>()) {
        return x.len() == y.len() && x.iter().zip(y.iter()).all(|(x, y)| is_same(&x, &y));
    }
    let are_both = |x: &Bound<'_, PyAny>, y: &Bound<'_, PyAny>| {
        (x.is_exact_instance_of::<PyInt>() && y.is_exact_instance_of::<PyInt>())
            || (x.is_exact_instance_of::<PyString>() && y.is_exact_instance_of::<PyString>())
    };
    are_both(constant, x) && constant.eq(x).unwrap_or(false)
}

/// A tensor whose memory has its values and that has no gradient. `None` if the tensor is no such one, or is one that
/// autocast may cast.
///
/// # Errors
/// Errors of torch.
fn plain(x: &Bound<'_, PyAny>, with_grad: bool) -> PyResult<Option<Described>> {
    let Some(found) = Described::of(x) else { return Ok(None) };
    // A tensor of zeros without memory, and one without elements, have no address.
    let is_other = found.address == 0 || matches!(found.element, Element::Number(Dtype::F32));
    let py = x.py();
    if is_other || x.call_method0(intern!(py, "is_neg"))?.is_truthy()? {
        return Ok(None);
    }
    let is_float = matches!(found.element, Element::Number(_));
    let has_grad = with_grad && is_float && x.getattr(intern!(py, "requires_grad"))?.is_truthy()?;
    Ok((!has_grad).then_some(found))
}

/// The place of a call whose first tensor is Q. `None` if Q has a type whose O has another one, or if torch's stream is
/// not known.
fn place(py: Python<'_>, q: &Described) -> Option<Place> {
    if !matches!(q.element, Element::Number(Dtype::F16 | Dtype::Bf16)) {
        return None;
    }
    match u32::try_from(q.device) {
        Ok(device) => Some(Place::Stream { device, stream: dlpack::current_stream(py, q.device)? }),
        Err(_) => Some(Place::Cpu),
    }
}

/// The shape of LSE: (batch, heads, rows), or (heads, rows) of packed sequences.
fn of_lse(mut shape: [usize; DIMS], rank: usize) -> [usize; DIMS] {
    shape.swap(rank - 2, rank - 3);
    shape
}
