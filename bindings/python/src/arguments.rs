//! Arguments that a call gets from Python.

use std::cell::Cell;
use std::{fmt, mem};

use fa3::problem::hint;
use fa3_types::{
    AppendRotary, Dtype, ExtraCache, Partials, Positions, RopeStyle, Rotary, SequenceBase, Sequences, Shape,
    Strides, TensorDesc,
};
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyInt, PyString, PyTuple};

use crate::attention::Bounds;
use crate::dlpack::DlTensor;
use crate::error::{Error, in_torchs_words};
use crate::place::Place;

/// Largest number of dimensions of a tensor.
const DIMS: usize = 5;

/// How an operation uses a tensor. If it cannot read an input in this way, the input is copied. The copy lives until
/// the launch, and later work on the stream may reuse its memory.
#[derive(Clone, Copy)]
enum Access {
    /// Where it lies, with its own strides. It is never copied.
    InPlace,
    /// With any strides of its own.
    Strided,
    /// With its own strides, but on a GPU the last dimension has no gaps.
    Rows,
    /// As rows without gaps that begin at multiples of 16 bytes. If `is_apart`, no two rows share memory.
    Aligned { is_apart: bool },
    /// On a GPU as rows without gaps that may be parts of wider rows, and on the CPU contiguous.
    Slices,
    /// Contiguous. On a GPU it begins at a multiple of this many bytes.
    Contiguous(u64),
}

/// The access to a list of integers. Kernels read one integer at a time.
const LIST: Access = Access::Contiguous(4);
/// The access to a tensor of which kernels read 16 bytes at a time.
const DENSE: Access = Access::Contiguous(16);

/// A tensor argument from Python.
struct Given<'py> {
    name: &'static str,
    dtype: Bound<'py, PyAny>,
    address: u64,
    rank: usize,
    shape: [usize; DIMS],
    strides: [i64; DIMS],
}

/// The tensors of a call, by their names. A tensor is torch's, or a tuple (dtype, address, shape, strides).
pub(crate) struct Tensors<'a, 'py> {
    place: Place,
    given: Vec<(&'a str, &'a Bound<'py, PyAny>)>,
    at: Vec<(&'static str, Option<u64>)>,
    copies: Vec<Bound<'py, PyAny>>,
}

impl<'py> Given<'py> {
    fn of_torch(name: &'static str, x: &Bound<'py, PyAny>) -> PyResult<Given<'py>> {
        let py = x.py();
        let address = x.call_method0(intern!(py, "data_ptr"))?.extract()?;
        let extents = x.getattr(intern!(py, "shape"))?.cast_into()?;
        let steps = x.call_method0(intern!(py, "stride"))?.cast_into()?;
        Given::new(name, x.getattr(intern!(py, "dtype"))?, address, &extents, &steps)
    }

    /// A tensor of torch as DLPack describes it. `None` if its elements are of a type that no operation takes.
    fn described(name: &'static str, py: Python<'py>, x: &DlTensor) -> PyResult<Option<Given<'py>>> {
        let of = |element: Element| Some(element.of_dlpack()) == x.element();
        let Some((dtype, _)) = dtypes(py)?.iter().find(|(_, element)| of(*element)) else { return Ok(None) };
        let [extents, steps] = x.dims();
        let rank = extents.len();
        if rank > DIMS || steps.len() != rank {
            return Ok(None);
        }
        let (mut shape, mut strides) = ([0; DIMS], [0; DIMS]);
        shape.iter_mut().zip(extents).for_each(|(to, extent)| *to = *extent as usize);
        strides[..rank].copy_from_slice(steps);
        let dtype = dtype.bind(py).clone();
        Ok(Some(Given { name, dtype, address: x.address(), rank, shape, strides }))
    }

    fn of_numbers(name: &'static str, numbers: &Bound<'py, PyTuple>) -> PyResult<Given<'py>> {
        let (dtype, address, extents, steps) = numbers.extract()?;
        Given::new(name, dtype, address, &extents, &steps)
    }

    fn new(
        name: &'static str,
        dtype: Bound<'py, PyAny>,
        address: u64,
        extents: &Bound<'py, PyTuple>,
        steps: &Bound<'py, PyTuple>,
    ) -> PyResult<Given<'py>> {
        let rank = extents.len();
        if rank > DIMS || steps.len() != rank {
            let sentence = format!("{name} has {rank} dimensions and {} strides", steps.len());
            return Err(PyValueError::new_err(sentence));
        }
        let (mut shape, mut strides) = ([0; DIMS], [0; DIMS]);
        for (to, extent) in shape.iter_mut().zip(extents.iter_borrowed()) {
            *to = extent.extract()?;
        }
        for (to, stride) in strides.iter_mut().zip(steps.iter_borrowed()) {
            *to = stride.extract()?;
        }
        Ok(Given { name, dtype, address, rank, shape, strides })
    }

    fn shape(&self) -> &[usize] {
        &self.shape[..self.rank]
    }

    /// The tensor's extents, if it has N dimensions.
    fn extents<const N: usize>(&self) -> Result<[usize; N], Error> {
        let wrong = |_| Error::Rank { tensor: self.name, given: self.rank, expected: N };
        self.shape().try_into().map_err(wrong)
    }

    /// The strides that the tensor would have if it were contiguous.
    fn contiguous(&self) -> [i64; DIMS] {
        let (mut strides, mut step) = ([0; DIMS], 1_i64);
        for (to, extent) in strides[..self.rank].iter_mut().zip(self.shape()).rev() {
            *to = step;
            step = step.saturating_mul(*extent as i64);
        }
        strides
    }

    fn is_contiguous(&self) -> bool {
        let mut dims = self.shape().iter().zip(self.strides).zip(self.contiguous());
        self.shape().contains(&0) || dims.all(|((extent, given), wanted)| *extent == 1 || given == wanted)
    }

    /// Checks a list of integers. `fits` says whether its shape is as expected.
    fn check_list(&self, fits: bool, expected: fmt::Arguments<'_>) -> PyResult<()> {
        if fits && matches!(known(&self.dtype)?, Some(Element::Integer)) {
            return Ok(());
        }
        Err(self.refused(format_args!("i32 {expected}")))
    }

    /// Checks a tensor whose dtype and shape follow from other tensors. Tensors of packed sequences have no batch.
    /// `what` names the dimensions.
    fn check<const N: usize>(
        &self,
        dtype: Dtype,
        shape: [usize; N],
        is_packed: bool,
        what: &str,
    ) -> PyResult<()> {
        let fits = self.dims(0).is_ok_and(|(found, _)| found == shape);
        if fits && named(&self.dtype).is_ok_and(|found| found == dtype) {
            return Ok(());
        }
        let expected = PyTuple::new(self.dtype.py(), &shape[usize::from(is_packed)..])?;
        Err(self.refused(format_args!("{dtype} {expected}{what}")))
    }

    fn refused(&self, expected: fmt::Arguments<'_>) -> PyErr {
        let shape = PyTuple::new(self.dtype.py(), self.shape());
        let found = shape.map_or_else(|error| error.to_string(), |shape| shape.to_string());
        let sentence = format!("{} is {} {found}, expected {expected}", self.name, self.dtype);
        PyValueError::new_err(in_torchs_words(&sentence))
    }

    /// Whether rows have no gaps.
    fn has_rows(&self) -> bool {
        self.rank == 0 || self.strides[self.rank - 1] == 1
    }

    /// Whether the tensor has rows without gaps, at multiples of 8 elements (16 bytes of 16-bit types). If `is_apart`,
    /// they must not be expanded.
    fn has_aligned_rows(&self, is_apart: bool) -> bool {
        let outer = self.rank.saturating_sub(1);
        let are_apart = !is_apart || self.shape().contains(&0) || !self.strides[..self.rank].contains(&0);
        let mut outer = self.shape[..outer].iter().zip(&self.strides[..outer]);
        self.has_rows() && are_apart && outer.all(|(extent, stride)| *extent <= 1 || stride % 8 == 0)
    }

    /// Whether the tensor has rows without gaps, in order, that do not overlap.
    fn has_slices(&self) -> bool {
        self.rank == 2 && self.has_rows() && self.strides[0] >= self.shape[1] as i64
    }

    /// The torch method by which an operation copies the tensor, if it cannot use the tensor as it is.
    fn copied_by(
        &self,
        x: &Bound<'py, PyAny>,
        access: Access,
        place: Place,
    ) -> PyResult<Option<&'static str>> {
        let bytes = match place {
            Place::Cpu | Place::CheckedForCpu => Some(match known(&self.dtype)? {
                Some(element) => element.bytes(),
                None => x.getattr(intern!(x.py(), "itemsize"))?.extract()?,
            }),
            Place::Stream { .. } | Place::CheckedForGpu => None,
        };
        let (is_readable, multiple) = match (access, bytes) {
            (Access::InPlace, _) | (Access::Strided, None) => (true, 1),
            (Access::Strided | Access::Rows, Some(bytes)) => (true, bytes),
            (Access::Rows, None) => (self.has_rows(), 1),
            (Access::Aligned { is_apart }, _) => (self.has_aligned_rows(is_apart), 16),
            (Access::Slices, None) => (self.has_slices(), 1),
            (Access::Slices, Some(bytes)) | (Access::Contiguous(_), Some(bytes)) => {
                (self.is_contiguous(), bytes)
            }
            (Access::Contiguous(multiple), None) => (self.is_contiguous(), multiple),
        };
        let is_aligned = self.address.is_multiple_of(multiple);
        Ok(if is_readable { (!is_aligned).then_some("clone") } else { Some("contiguous") })
    }

    /// The tensor's extents and strides. If a dimension is missing, a dimension of 1 is inserted at index `at`.
    fn dims<const N: usize>(&self, at: usize) -> Result<([usize; N], [i64; N]), Error> {
        let (mut shape, mut strides) = ([1; N], [0; N]);
        let gap = match N.checked_sub(self.rank) {
            Some(0) => N,
            Some(1) => at,
            _ => return Err(Error::Rank { tensor: self.name, given: self.rank, expected: N }),
        };
        for i in 0..self.rank {
            let to = i + usize::from(i >= gap);
            (shape[to], strides[to]) = (self.shape[i], self.strides[i]);
        }
        Ok((shape, strides))
    }

    /// The tensor's description without meaningless strides. Calls that differ only in such strides share a plan.
    fn desc(&self) -> PyResult<TensorDesc> {
        let ([batch, seqlen, heads, head_dim], strides) = self.dims(0)?;
        let shape = Shape { batch, seqlen, heads, head_dim };
        Ok(TensorDesc { dtype: named(&self.dtype)?, shape, strides: in_order(strides) }.canonical())
    }
}

impl<'a, 'py> Tensors<'a, 'py> {
    /// Tensors for a call in this place.
    pub(crate) fn new(place: Place, given: Vec<(&'a str, &'a Bound<'py, PyAny>)>) -> Tensors<'a, 'py> {
        let count = given.len();
        Tensors { place, given, at: Vec::with_capacity(count), copies: Vec::new() }
    }

    /// Whether there is a tensor of this name.
    pub(crate) fn are_with(&self, name: &str) -> bool {
        self.given.iter().any(|(given, _)| *given == name)
    }

    /// Takes a tensor for an operation, if it is given. An operation takes each tensor once, by this or another method.
    /// All methods refuse a tensor that is in another place, has another type, or does not fit.
    ///
    /// # Errors
    /// The tensor is refused.
    fn take(&mut self, name: &'static str, access: Access) -> PyResult<Option<Given<'py>>> {
        let Some((_, x)) = self.given.iter().find(|(given, _)| *given == name) else { return Ok(None) };
        let given = if let Ok(numbers) = x.cast::<PyTuple>() {
            let mut given = Given::of_numbers(name, numbers)?;
            let is_copied = match (access, self.place) {
                (Access::Rows, Place::CheckedForGpu) => !given.has_rows(),
                // It is not known where a tensor without memory will lie.
                (Access::Aligned { .. }, Place::CheckedForGpu | Place::CheckedForCpu) => true,
                _ => false,
            };
            if is_copied {
                given.strides = given.contiguous();
            }
            given
        } else {
            let given = match DlTensor::of(x) {
                Some(found) if self.is_at(found.device()) => Given::described(name, x.py(), &found)?,
                _ => None,
            };
            let given = match given {
                Some(given) => given,
                None => {
                    self.check_place(name, x)?;
                    Given::of_torch(name, x)?
                }
            };
            match given.copied_by(x, access, self.place)? {
                None => given,
                Some(method) => {
                    let copy = x.call_method0(method)?;
                    let given = Given::of_torch(name, &copy)?;
                    self.copies.push(copy);
                    given
                }
            }
        };
        self.at.push((name, Some(given.address)));
        Ok(Some(given))
    }

    fn get(&mut self, name: &'static str, access: Access) -> PyResult<Given<'py>> {
        Ok(self.take(name, access)?.ok_or(Error::NoTensor { tensor: name })?)
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
        let (first_name, first) = self.given[0];
        let also = if first.is(x) {
            String::new()
        } else {
            format!(" and {first_name} on {}", first.getattr("device")?)
        };
        let sentence =
            format!("{name} is on {}{also}, expected one CUDA device or the CPU", x.getattr("device")?);
        Err(PyValueError::new_err(sentence))
    }

    /// Whether there is an output whose shape follows from other tensors. It is trusted to be new and contiguous.
    ///
    /// # Errors
    /// An entry has a wrong type.
    pub(crate) fn has_output(&mut self, name: &'static str) -> PyResult<bool> {
        let Some((_, x)) = self.given.iter().find(|(given, _)| *given == name) else { return Ok(false) };
        let address = match x.cast::<PyTuple>() {
            Ok(numbers) => numbers.get_item(1)?.extract()?,
            Err(_) => x.call_method0(intern!(x.py(), "data_ptr"))?.extract()?,
        };
        self.at.push((name, Some(address)));
        Ok(true)
    }

    /// Whether there is a contiguous input.
    pub(crate) fn has(&mut self, name: &'static str) -> PyResult<bool> {
        Ok(self.take(name, DENSE)?.is_some())
    }

    /// Whether there is a list with a number for each of `count` sequences.
    fn has_list(&mut self, name: &'static str, count: usize) -> PyResult<bool> {
        let Some(list) = self.take(name, LIST)? else { return Ok(false) };
        list.check_list(list.shape() == [count], format_args!("({count},): (sequences,)"))?;
        Ok(true)
    }

    /// An input (batch, seqlen, heads, head_dim), or packed sequences without a batch.
    ///
    /// # Errors
    /// The tensor is missing, its dtype is unknown, or it has another number of dimensions.
    pub(crate) fn input(&mut self, name: &'static str) -> PyResult<TensorDesc> {
        self.get(name, Access::Rows)?.desc()
    }

    /// As [`Tensors::input`], for an optional tensor.
    pub(crate) fn optional(&mut self, name: &'static str) -> PyResult<Option<TensorDesc>> {
        self.take(name, Access::Rows)?.map(|x| x.desc()).transpose()
    }

    /// O as an input of the backward pass, or dO, which may be expanded. Other tensors determine its dtype and shape.
    pub(crate) fn like_o(
        &mut self,
        name: &'static str,
        o: TensorDesc,
        is_packed: bool,
    ) -> PyResult<TensorDesc> {
        let given = self.get(name, Access::Aligned { is_apart: name == "o" })?;
        let what = if is_packed {
            ": (total_q, heads_q, head_dim_v)"
        } else {
            ": (batch, seqlen_q, heads_q, head_dim_v)"
        };
        given.check(o.dtype, o.shape.dims(), is_packed, what)?;
        given.desc()
    }

    /// Checks LSE of Q, or its gradient, if it is given.
    pub(crate) fn check_lse(&mut self, name: &'static str, q: Shape, is_packed: bool) -> PyResult<()> {
        let Some(given) = self.take(name, DENSE)? else { return Ok(()) };
        let what = if is_packed { ": (heads_q, total_q)" } else { ": (batch, heads_q, seqlen_q)" };
        given.check(Dtype::F32, [q.batch, q.heads, q.seqlen], is_packed, what)
    }

    /// A gradient of a tensor as an output.
    pub(crate) fn gradient(
        &mut self,
        name: &'static str,
        of: TensorDesc,
        is_packed: bool,
    ) -> PyResult<TensorDesc> {
        let given = self.get(name, Access::InPlace)?;
        given.check(of.dtype, of.shape.dims(), is_packed, "")?;
        given.desc()
    }

    /// A tensor that is written, as [`Tensors::input`] describes it.
    pub(crate) fn output(&mut self, name: &'static str) -> PyResult<TensorDesc> {
        self.get(name, Access::InPlace)?.desc()
    }

    /// As [`Tensors::output`], for an optional tensor. If only its address is given, it is a new tensor like `default`.
    pub(crate) fn output_like(&mut self, name: &'static str, default: TensorDesc) -> PyResult<TensorDesc> {
        let found = self.given.iter().find(|(given, _)| *given == name);
        if let Some(Ok(address)) = found.map(|(_, x)| x.cast::<PyInt>()) {
            self.at.push((name, Some(address.extract()?)));
            return Ok(default);
        }
        self.take(name, Access::InPlace)?.map_or(Ok(default), |x| x.desc())
    }

    /// A tensor (batch, heads, head_dim, keys), described as (batch, seqlen, heads, head_dim).
    pub(crate) fn transposed(&mut self, name: &'static str, seqlen: usize) -> PyResult<TensorDesc> {
        let given = self.get(name, Access::Rows)?;
        let ([batch, heads, head_dim, _], _) = given.dims(0)?;
        Ok(TensorDesc::contiguous(named(&given.dtype)?, Shape { batch, seqlen, heads, head_dim }))
    }

    /// LSE as an output (batch, seqlen, heads), or (seqlen, heads) for packed sequences, as a tensor with head_dim 1.
    pub(crate) fn rows_of_one(&mut self, name: &'static str) -> PyResult<TensorDesc> {
        let given = self.get(name, Access::InPlace)?;
        let ([batch, seqlen, heads], [of_batch, of_seqlen, of_heads]) = given.dims(0)?;
        let shape = Shape { batch, seqlen, heads, head_dim: 1 };
        let strides = in_order([of_batch, of_seqlen, of_heads, 1]);
        Ok(TensorDesc { dtype: named(&given.dtype)?, shape, strides }.canonical())
    }

    /// A tensor with the results of splits: (splits, batch, seqlen, heads, head_dim), without batch for packed
    /// sequences. LSE may have any strides. It has no dimension head_dim, and is described with head_dim 1.
    pub(crate) fn partials(&mut self, name: &'static str, is_lse: bool) -> PyResult<Partials> {
        let given = self.get(name, if is_lse { Access::Strided } else { Access::Rows })?;
        let ([splits, batch, seqlen, heads, head_dim], [stride, strides @ ..]) = if is_lse {
            let ([splits, batch, seqlen, heads], [stride, of_batch, of_seqlen, of_heads]) = given.dims(1)?;
            ([splits, batch, seqlen, heads, 1], [stride, of_batch, of_seqlen, of_heads, 1])
        } else {
            given.dims(1)?
        };
        let shape = Shape { batch, seqlen, heads, head_dim };
        let first = TensorDesc { dtype: named(&given.dtype)?, shape, strides: in_order(strides) };
        Ok(Partials { splits, stride, first }.canonical())
    }

    /// The extents of an optional contiguous input.
    ///
    /// # Errors
    /// The tensor has another number of dimensions.
    pub(crate) fn extents<const N: usize>(&mut self, name: &'static str) -> PyResult<Option<[usize; N]>> {
        Ok(self.take(name, DENSE)?.map(|given| given.extents()).transpose()?)
    }

    /// The number of sequences of a list `cu_seqlens`, if it is given.
    pub(crate) fn ends(&mut self, name: &'static str) -> PyResult<Option<usize>> {
        let Some(list) = self.take(name, LIST)? else { return Ok(None) };
        let count = match list.shape() {
            [numbers] => numbers.checked_sub(1),
            _ => None,
        };
        list.check_list(count.is_some(), format_args!("(sequences + 1,)"))?;
        Ok(count)
    }

    /// The sequences of Q, and of K and V, for tensors of these shapes, with hints of the longest sequences. `None` if
    /// all sequences are dense and all their rows are in use.
    ///
    /// # Errors
    /// A list does not fit.
    pub(crate) fn sequences(
        &mut self,
        [longest_q, longest_k]: [Option<usize>; 2],
        [q, k]: [Shape; 2],
    ) -> PyResult<Option<[Sequences; 2]>> {
        let (packed_q, packed_k) = (self.ends("cu_seqlens_q")?, self.ends("cu_seqlens_k")?);
        if let (Some(of_q), Some(of_k)) = (packed_q, packed_k)
            && of_q != of_k
        {
            let sentence = format!("q has {of_q} sequences and k {of_k}, expected as many");
            return Err(PyValueError::new_err(sentence));
        }
        let of_q = packed_q.map_or(Sequences::dense(q.batch, q.seqlen), Sequences::packed);
        let count = of_q.count();
        let of_k = match (packed_k, self.take("page_table", Access::Slices)?) {
            (Some(count), _) => Sequences::packed(count),
            (None, Some(table)) => {
                let is_indexed = self.has_list("cache_batch_idx", count)?;
                if is_indexed {
                    let expected = format_args!("(rows, pages), as there is cache_batch_idx");
                    table.check_list(table.rank == 2, expected)?;
                } else {
                    let fits = table.rank == 2 && table.shape[0] == count;
                    table.check_list(fits, format_args!("({count}, pages): (sequences, pages)"))?;
                }
                let ([rows, pages], [stride, _]) = table.dims(0)?;
                // The stride of a single row is meaningless.
                let stride = if rows > 1 { stride as usize } else { pages };
                let paged = if is_indexed {
                    Sequences::indexed(count, [rows, pages])
                } else {
                    Sequences::paged(count, pages)
                };
                paged.table_stride(stride)
            }
            (None, None) => {
                let listed = self.listed("indices", count)?;
                listed.unwrap_or(Sequences::dense(k.batch, k.seqlen))
            }
        };
        let of_q = longest_q.map_or(of_q, |rows| of_q.longest(rows));
        let of_k = longest_k.map_or(of_k, |rows| of_k.longest(rows));
        let of_q = if self.has_list("seqused_q", count)? { of_q.used() } else { of_q };
        let of_k = if self.has_list("leftpad_k", count)? { of_k.left_padded() } else { of_k };
        let of_k = if self.has_list("seqused_k", count)? { of_k.used() } else { of_k };
        let dense = Sequences::dense;
        let are_plain = [of_q, of_k] == [dense(q.batch, q.seqlen), dense(k.batch, k.seqlen)];
        Ok((!are_plain).then_some([of_q, of_k]))
    }

    /// Sequences that list their keys, if they do.
    fn listed(&mut self, name: &'static str, count: usize) -> PyResult<Option<Sequences>> {
        let Some(lists) = self.take(name, Access::Slices)? else { return Ok(None) };
        let fits = lists.rank == 2 && lists.shape[0] == count;
        lists.check_list(fits, format_args!("({count}, keys): (sequences, keys)"))?;
        let ([_, keys], [stride, _]) = lists.dims(0)?;
        // The stride of a single list is meaningless.
        Ok(Some(Sequences::listed(count, keys).table_stride(if count > 1 { stride as usize } else { keys })))
    }

    /// The second cache of `count` sequences that list their keys, if it is given.
    ///
    /// # Errors
    /// A tensor is missing, or a list does not fit.
    pub(crate) fn extra_cache(&mut self, count: usize) -> PyResult<Option<ExtraCache>> {
        let Some(sequences) = self.listed("extra_indices", count)? else { return Ok(None) };
        let is_used = self.has_list("extra_seqused_k", count)?;
        let sequences = if is_used { sequences.used() } else { sequences };
        Ok(Some(ExtraCache { k: self.input("extra_k")?, v: self.input("extra_v")?, sequences }))
    }

    /// The extents and the dtype of the tables of cosines and sines. `None` without tables.
    ///
    /// # Errors
    /// The tables have other dimensions.
    fn tables(&mut self, cos: &'static str, sin: &'static str) -> PyResult<Option<([usize; 2], Dtype)>> {
        let table = self.take(cos, DENSE)?;
        self.extents::<2>(sin)?;
        table.map(|table| Ok((table.extents()?, named(&table.dtype)?))).transpose()
    }

    /// The rotation of N tensors, given the name of each tensor's list of positions, and its first position for the
    /// case that there is no list.
    pub(crate) fn rotary<const N: usize>(
        &mut self,
        style: RopeStyle,
        places: [(&'static str, usize); N],
    ) -> PyResult<Option<[Rotary; N]>> {
        let mut positions = places.map(|(_, first)| Positions::From(first));
        for (positions, (listed, _)) in positions.iter_mut().zip(places) {
            if self.has(listed)? {
                *positions = Positions::Listed;
            }
        }
        let tables = self.tables("cos", "sin")?;
        Ok(tables.map(|([table_rows, pairs], _)| {
            positions.map(|positions| Rotary { style, rotary_dim: 2 * pairs, table_rows, positions })
        }))
    }

    /// The rotation of new keys and of queries, of `count` sequences.
    pub(crate) fn append_rotary(&mut self, style: RopeStyle, count: usize) -> PyResult<Option<AppendRotary>> {
        let base =
            if self.has_list("rotary_seqlens", count)? { SequenceBase::Listed } else { SequenceBase::Used };
        let tables = self.tables("rotary_cos", "rotary_sin")?;
        Ok(tables.map(|([table_rows, pairs], table)| AppendRotary {
            style,
            rotary_dim: 2 * pairs,
            table,
            table_rows,
            base,
        }))
    }

    /// The addresses of the tensors, by their names.
    ///
    /// # Errors
    /// The operation does not know a tensor.
    pub(crate) fn at(&mut self) -> PyResult<Vec<(&'static str, Option<u64>)>> {
        let is_taken = |name: &str| self.at.iter().any(|(taken, _)| *taken == name);
        if let Some((other, _)) = self.given.iter().find(|(name, _)| !is_taken(name)) {
            return Err(PyTypeError::new_err(format!("the operation has no tensor {other}")));
        }
        Ok(mem::take(&mut self.at))
    }
}

/// A call's options: a dict of values by their names. `None` is an option's default.
pub(crate) struct Options<'py>(Vec<(Bound<'py, PyString>, Bound<'py, PyAny>, Cell<bool>)>);

impl<'py> Options<'py> {
    /// The options of a dict.
    ///
    /// # Errors
    /// A name is not a string.
    pub(crate) fn new(given: &Bound<'py, PyDict>) -> PyResult<Options<'py>> {
        let option = |(name, value): (Bound<'py, PyAny>, Bound<'py, PyAny>)| {
            Ok((name.cast_into::<PyString>()?, value, Cell::new(false)))
        };
        given.iter().map(option).collect::<PyResult<_>>().map(Options)
    }

    /// An option, if given.
    ///
    /// # Errors
    /// The option has another type.
    pub(crate) fn get<T>(&self, name: &str) -> PyResult<Option<T>>
    where
        T: for<'a> FromPyObject<'a, 'py, Error = PyErr>,
    {
        for (other, value, is_asked) in &self.0 {
            if other.to_str()? == name {
                is_asked.set(true);
                return if value.is_none() { Ok(None) } else { value.extract().map(Some) };
            }
        }
        Ok(None)
    }

    /// A number, if given.
    ///
    /// # Errors
    /// The option is not such a number.
    pub(crate) fn number<T>(&self, name: &str) -> PyResult<Option<T>>
    where
        Number<T>: for<'a> FromPyObject<'a, 'py, Error = PyErr>,
    {
        Ok(self.get::<Number<T>>(name)?.map(|Number(number)| number))
    }

    /// A bool; false if it is not given.
    ///
    /// # Errors
    /// The option is not a bool.
    pub(crate) fn flag(&self, name: &str) -> PyResult<bool> {
        Ok(self.get::<bool>(name)?.unwrap_or(false))
    }

    /// Hints of the lengths of the longest sequences of Q, and of K and V, as plans need them. A hint only affects how
    /// a call is computed. A negative hint counts as none.
    ///
    /// # Errors
    /// A hint is not a number.
    pub(crate) fn hints(&self) -> PyResult<[Option<usize>; 2]> {
        let hint = |name| -> PyResult<Option<usize>> {
            Ok(self.number::<i64>(name)?.and_then(|rows| usize::try_from(rows).ok()))
        };
        let (longest_q, longest_k) = (hint("max_seqlen_q")?, hint("max_seqlen_k")?);
        Ok([longest_q.map(hint::rounded_up), longest_k.map(hint::rounded_down)])
    }

    /// The keys that a query sees; all keys if the option is missing.
    ///
    /// # Errors
    /// The option does not consist of numbers.
    pub(crate) fn window(&self) -> PyResult<Bounds> {
        let window = self.get::<(Number<i64>, Number<i64>, Number<i64>)>("window")?;
        Ok(window.map_or(
            Bounds { left: -1, right: -1, chunk: 0 },
            |(Number(left), Number(right), Number(chunk))| Bounds { left, right, chunk },
        ))
    }

    /// Which elements of a row rotate together.
    ///
    /// # Errors
    /// The option is not a bool.
    pub(crate) fn style(&self) -> PyResult<RopeStyle> {
        Ok(if self.flag("interleaved")? { RopeStyle::Interleaved } else { RopeStyle::HalfSplit })
    }

    /// Refuses options that the operation does not know.
    ///
    /// # Errors
    /// The operation does not know an option.
    pub(crate) fn refuse_others(&self) -> PyResult<()> {
        match self.0.iter().find(|(_, _, is_asked)| !is_asked.get()) {
            Some((name, ..)) => Err(PyTypeError::new_err(format!("the operation has no option {name}"))),
            None => Ok(()),
        }
    }
}

fn in_order([batch, seqlen, heads, head_dim]: [i64; 4]) -> Strides {
    Strides { batch, seqlen, heads, head_dim }
}

/// The type of a tensor's elements.
#[derive(Clone, Copy)]
enum Element {
    Number(Dtype),
    /// Signed 32-bit integers.
    Integer,
}

impl Element {
    /// The size in bytes.
    fn bytes(self) -> u64 {
        match self {
            Element::Number(dtype) => dtype.bytes() as u64,
            Element::Integer => 4,
        }
    }

    /// DLPack's kind of numbers and their bits.
    fn of_dlpack(self) -> (u8, u8) {
        match self {
            Element::Integer => (0, 32),
            Element::Number(Dtype::F16) => (2, 16),
            Element::Number(Dtype::F32) => (2, 32),
            Element::Number(Dtype::Bf16) => (4, 16),
            Element::Number(Dtype::E4m3) => (10, 8),
        }
    }
}

/// Torch's dtypes.
static DTYPES: PyOnceLock<Vec<(Py<PyAny>, Element)>> = PyOnceLock::new();

/// The element type of a dtype, which is torch's or a name; `None` if no operation supports it.
///
/// # Errors
/// Torch cannot be imported.
fn known(dtype: &Bound<'_, PyAny>) -> PyResult<Option<Element>> {
    let py = dtype.py();
    if let Ok(name) = dtype.cast::<PyString>() {
        let name = name.to_str()?;
        return Ok(if name == "i32" {
            Some(Element::Integer)
        } else {
            name.parse().ok().map(Element::Number)
        });
    }
    Ok(dtypes(py)?.iter().find(|(other, _)| dtype.is(other)).map(|(_, element)| *element))
}

/// Torch's dtypes that operations support.
///
/// # Errors
/// Torch cannot be imported.
fn dtypes(py: Python<'_>) -> PyResult<&Vec<(Py<PyAny>, Element)>> {
    DTYPES.get_or_try_init(py, || {
        let torch = py.import("torch")?;
        let names = [
            ("bfloat16", Element::Number(Dtype::Bf16)),
            ("float16", Element::Number(Dtype::F16)),
            ("float32", Element::Number(Dtype::F32)),
            ("float8_e4m3fn", Element::Number(Dtype::E4m3)),
            ("int32", Element::Integer),
        ];
        names
            .into_iter()
            .map(|(name, element)| Ok((torch.getattr(name)?.unbind(), element)))
            .collect::<PyResult<_>>()
    })
}

/// The dtype of numbers that torch's dtype or a name stands for.
///
/// # Errors
/// It is another dtype.
fn named(dtype: &Bound<'_, PyAny>) -> PyResult<Dtype> {
    match known(dtype)? {
        Some(Element::Number(dtype)) => Ok(dtype),
        _ if dtype.is_instance_of::<PyString>() => Err(Error::Dtype { given: dtype.to_string() }.into()),
        _ => {
            let expected = "torch.float16, torch.bfloat16, torch.float8_e4m3fn or, on the CPU, torch.float32";
            Err(PyTypeError::new_err(format!("a tensor is {dtype}, expected {expected}")))
        }
    }
}

/// A Python number, which has no bounds. A number outside T's range is refused like any other invalid number.
pub(crate) struct Number<T>(pub(crate) T);

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
