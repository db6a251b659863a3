//! Calls that a function of Python makes again: with options of an earlier call, over other tensors.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use fa3_call::{Access, Element, Place, Tensor};
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

/// Number of calls that are kept, such as the calls of a model's different layers.
const KEPT: usize = 8;

/// The names of scales of heads, and of scales of tokens.
const SCALES: [(&str, &str); 2] = [("k_descale", "k_scales"), ("v_descale", "v_scales")];

/// Alignment in bytes of tensors that kernels read under torch's operators.
const ALIGNMENT: u64 = 16;

/// Repeats(names, allocate)
///
/// Attention that a function computes again. The function gives its tensors in the order of `names`, the first three of
/// which are q, k and v, and all of its other arguments as options. After a call without gradients it keeps the
/// options, and the operation that they mean. A later call with equal options then converts and checks no option:
/// `attend` does everything that is left. `allocate(like, bytes, zeros)` makes a workspace as in `run`. Tensors
/// k_descale and v_descale are scales of heads, or of tokens and heads.
#[pyclass(frozen, module = "fa3._fa3")]
pub(crate) struct Repeats {
    names: Vec<String>,
    allocate: Py<PyAny>,
    kept: Mutex<VecDeque<Arc<Kept>>>,
}

/// A call that is kept.
struct Kept {
    options: Vec<Py<PyAny>>,
    /// The tensors; `None` for a tensor that is not given.
    tensors: Vec<Option<Described>>,
    operation: Py<Operation>,
    kind: Kind,
}

/// The kind of a call.
#[derive(Clone, Copy)]
enum Kind {
    /// A function of this package: later tensors have as many dimensions.
    Function {
        /// Whether LSE is a result.
        with_lse: bool,
    },
    /// An operator of torch, below its dispatcher: later tensors have the same layouts.
    OfTorch {
        /// Whether tensors are (batch, heads, seqlen, head_dim).
        is_heads_first: bool,
    },
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
        self.keep_kind(tensors, options, operation, Kind::Function { with_lse });
    }

    /// keep_of_torch(tensors, options, operation, is_heads_first)
    ///
    /// Keeps a valid call of an operator of torch, below its dispatcher. It computes O with q's strides, and LSE. The
    /// operation takes tensors (batch, seqlen, heads, head_dim); with is_heads_first, the call has (batch, heads,
    /// seqlen, head_dim).
    fn keep_of_torch(
        &self,
        tensors: &Bound<'_, PyTuple>,
        options: &Bound<'_, PyTuple>,
        operation: Py<Operation>,
        is_heads_first: bool,
    ) {
        self.keep_kind(tensors, options, operation, Kind::OfTorch { is_heads_first });
    }

    /// attend(tensors, options)
    ///
    /// O, or O and LSE, of a call whose options are kept. None if they are not, if the call is not plain (a tensor is a
    /// subclass or float32, or its memory does not have its values; a tracer, mode or transform is active; autograd
    /// records the call), or if it is invalid: then the function has to look at all of its arguments. Below torch's
    /// dispatcher calls are plain.
    fn attend<'py>(
        &self,
        tensors: &Bound<'py, PyTuple>,
        options: &Bound<'py, PyTuple>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let py = tensors.py();
        let (Some(described), Some(torch)) = (described(tensors), Torch::find(py)) else { return Ok(None) };
        let Some(kept) = self.find(&described, options) else { return Ok(None) };
        if !self.takes_scales(&described) {
            return Ok(None);
        }
        if let Kind::Function { .. } = kept.kind
            && !(torch.is_plain(py)? && are_plain(tensors, &described, torch.is_grad_enabled(py)?)?)
        {
            return Ok(None);
        }
        let mut given = Vec::with_capacity(self.names.len() + 2);
        for ((name, found), tensor) in self.names.iter().zip(described).zip(tensors.iter()) {
            if let Some(found) = found {
                let (name, found) = found.in_order(kept.kind).taken_as(name);
                given.push(Argument { name, tensor, described: Some(found) });
            }
        }
        let [Argument { tensor: of_q, described: Some(q), .. }, _, Argument { described: Some(v), .. }, ..] =
            &given[..]
        else {
            return Ok(None);
        };
        let Some(place) = place(py, q) else { return Ok(None) };
        let of_q = of_q.clone();
        let mut shape = q.shape;
        shape[q.rank - 1] = v.shape[v.rank - 1];
        let is_like_q = match kept.kind {
            Kind::OfTorch { .. } => true,
            Kind::Function { .. } => {
                let is_dense = |q: Tensor| q.is_readable(Access::Contiguous(1), Place::Cpu);
                shape == q.shape && q.named("q").is_ok_and(is_dense)
            }
        };
        let o = if is_like_q {
            torch.empty_like(&of_q)?
        } else {
            torch.new_empty(&of_q, &shape[..q.rank], false)?
        };
        let mut outputs = vec![o];
        if !matches!(kept.kind, Kind::Function { with_lse: false }) {
            // (batch, heads, seqlen), or (heads, total) of packed sequences.
            shape.swap(q.rank - 2, q.rank - 3);
            outputs.push(torch.new_empty(&of_q, &shape[..q.rank - 1], true)?);
        }
        for (name, x) in ["o", "lse"].into_iter().zip(&outputs) {
            let found = Described::of(x);
            let found = if name == "o" { found.map(|found| found.in_order(kept.kind)) } else { found };
            given.push(Argument { name, tensor: x.clone(), described: found });
        }
        let allocate = Allocate { function: self.allocate.clone_ref(py), like: Some(of_q.unbind()) };
        match kept.operation.get().computes.compute(py, place, &given, &allocate) {
            Ok(_) if outputs.len() == 1 => Ok(outputs.pop()),
            Ok(_) => Ok(Some(PyTuple::new(py, outputs)?.into_any())),
            Err(error)
                if error.is_instance_of::<PyValueError>(py) || error.is_instance_of::<PyTypeError>(py) =>
            {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}

impl Repeats {
    fn keep_kind(
        &self,
        tensors: &Bound<'_, PyTuple>,
        options: &Bound<'_, PyTuple>,
        operation: Py<Operation>,
        kind: Kind,
    ) {
        let Some(tensors) = described(tensors) else { return };
        let are_given = tensors.len() == self.names.len() && tensors.iter().take(3).all(Option::is_some);
        let are_constant = options.iter().all(|option| is_constant(&option));
        if !are_given
            || !are_constant
            || !self.takes_scales(&tensors)
            || self.find(&tensors, options).is_some()
        {
            return;
        }
        let options: Vec<_> = options.iter().map(Bound::unbind).collect();
        let call = Arc::new(Kept { options, tensors, operation, kind });
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let oldest = if kept.len() == KEPT { kept.pop_back() } else { None };
        kept.push_front(call);
        drop(kept);
        // Python's objects are dropped without the lock.
        drop(oldest);
    }

    /// Whether the operation takes the scales of a call as they are, if there are some. The operation checks scales of
    /// tokens, but of scales of heads only whether they are given. Scales of K and V of 16 bits are ignored.
    fn takes_scales(&self, tensors: &[Option<Described>]) -> bool {
        let find = |name: &str| {
            let number = self.names.iter().position(|known| known == name)?;
            tensors[number].as_ref()
        };
        let (k, ends) = (find("k"), find("cu_seqlens_q"));
        let sequences = ends.map(|ends| ends.shape[0].wrapping_sub(1)).or(find("q").map(|q| q.shape[0]));
        let heads = k.map(|k| k.shape[k.rank.saturating_sub(2)]);
        SCALES.iter().filter_map(|(name, _)| find(name)).all(|scales| {
            let are_of_heads =
                scales.rank == 2 && [sequences, heads] == [Some(scales.shape[0]), Some(scales.shape[1])];
            scales.element == Element::Number(Dtype::F32)
                && match k.map(|k| &k.element) {
                    Some(Element::Number(Dtype::E4m3)) => are_of_heads || scales.rank == 3,
                    Some(Element::Number(Dtype::Int8)) => scales.rank == 3,
                    _ => false,
                }
        })
    }

    /// The kept call with these options, for these tensors.
    fn find(&self, tensors: &[Option<Described>], options: &Bound<'_, PyTuple>) -> Option<Arc<Kept>> {
        let py = options.py();
        let is_this = |kept: &&Arc<Kept>| {
            kept.options.len() == options.len()
                && kept.fits(tensors)
                && kept.options.iter().zip(options.iter_borrowed()).all(|(x, y)| is_same(x.bind(py), &y))
        };
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.iter().find(is_this).map(Arc::clone)
    }
}

impl Kept {
    /// Whether the operation is also for these tensors. Their other properties are checked by the operation.
    fn fits(&self, tensors: &[Option<Described>]) -> bool {
        let is_alike = |(kept, given): (&Option<Described>, &Option<Described>)| match (kept, given) {
            (None, None) => true,
            (Some(kept), Some(given)) => match self.kind {
                Kind::Function { .. } => kept.rank == given.rank,
                Kind::OfTorch { .. } => kept.has_layout_of(given) && given.address.is_multiple_of(ALIGNMENT),
            },
            _ => false,
        };
        self.tensors.len() == tensors.len() && self.tensors.iter().zip(tensors).all(is_alike)
    }
}

impl Described {
    /// The tensor as the operation of a call takes it.
    fn in_order(mut self, kind: Kind) -> Described {
        if let Kind::OfTorch { is_heads_first: true } = kind {
            self.shape.swap(1, 2);
            self.strides.swap(1, 2);
        }
        self
    }

    /// The tensor with the name by which the operation takes it. Scales of tokens get a dimension for the columns.
    fn taken_as(mut self, name: &str) -> (&str, Described) {
        let Some((_, of_tokens)) = SCALES.iter().find(|(known, _)| *known == name) else {
            return (name, self);
        };
        if self.rank != 3 {
            return (name, self);
        }
        (self.shape[3], self.strides[3], self.rank) = (1, 1, 4);
        (of_tokens, self)
    }
}

/// The tensors as torch describes them, with `None` for a tensor that is not given. `None` if torch does not describe
/// one of them.
fn described(tensors: &Bound<'_, PyTuple>) -> Option<Vec<Option<Described>>> {
    let mut all = Vec::with_capacity(tensors.len());
    for x in tensors.iter_borrowed() {
        all.push(if x.is_none() { None } else { Some(Described::of(&x)?) });
    }
    Some(all)
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

/// Whether the memory of tensors has their values, none has a gradient, and none is one that autocast may cast, which
/// casts Q, K and V.
///
/// # Errors
/// Errors of torch.
fn are_plain(
    tensors: &Bound<'_, PyTuple>,
    described: &[Option<Described>],
    with_grad: bool,
) -> PyResult<bool> {
    let py = tensors.py();
    for (number, (x, found)) in tensors.iter_borrowed().zip(described).enumerate() {
        let Some(found) = found else { continue };
        // A tensor of zeros without memory, and one without elements, have no address.
        let is_other =
            found.address == 0 || number < 3 && matches!(found.element, Element::Number(Dtype::F32));
        if is_other || x.call_method0(intern!(py, "is_neg"))?.is_truthy()? {
            return Ok(false);
        }
        let is_float = matches!(found.element, Element::Number(_));
        if with_grad && is_float && x.getattr(intern!(py, "requires_grad"))?.is_truthy()? {
            return Ok(false);
        }
    }
    Ok(true)
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
