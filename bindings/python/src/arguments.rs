//! Arguments as they come from Python.

use std::cell::Cell;

use fa3::problem::hint;
use fa3_types::{
    AppendRotary, Dtype, Partials, Positions, QkRotary, RopeStyle, Rotary, SequenceBase, Sequences, Shape,
    Strides, TensorDesc,
};
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple};

use crate::attention::Bounds;
use crate::error::Error;

/// Largest number of dimensions of a tensor.
const DIMS: usize = 5;

/// The names of operations' tensors.
const NAMES: [&str; 43] = [
    "q",
    "k",
    "v",
    "o",
    "lse",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "seqused_q",
    "seqused_k",
    "page_table",
    "cache_batch_idx",
    "leftpad_k",
    "dout",
    "dlse",
    "dq",
    "dk",
    "dv",
    "qv",
    "sink",
    "dsink",
    "intervals",
    "table",
    "q_descale",
    "k_descale",
    "v_descale",
    "v_mean",
    "k_new",
    "v_new",
    "cu_seqlens_k_new",
    "rotary_cos",
    "rotary_sin",
    "rotary_seqlens",
    "x",
    "cos",
    "sin",
    "positions",
    "q_positions",
    "k_positions",
    "codes",
    "scales",
    "mean",
    "out_partial",
    "lse_partial",
];

/// A tensor argument from Python.
struct Given<'py> {
    name: &'static str,
    dtype: Bound<'py, PyString>,
    address: u64,
    rank: usize,
    shape: [usize; DIMS],
    strides: [i64; DIMS],
    is_asked: Cell<bool>,
}

/// A call's tensors: a dict of (dtype, address, shape, strides) by their names.
pub(crate) struct Tensors<'py>(Vec<Given<'py>>);

impl<'py> Given<'py> {
    fn new(name: &str, tensor: &Bound<'py, PyAny>) -> PyResult<Given<'py>> {
        let known = NAMES.into_iter().find(|known| *known == name);
        let name = known.ok_or_else(|| PyTypeError::new_err(format!("no operation has a tensor {name}")))?;
        let (dtype, address, extents, steps): (_, _, Bound<'py, PyTuple>, Bound<'py, PyTuple>) =
            tensor.extract()?;
        let rank = extents.len();
        let is_contiguous = steps.is_empty();
        if rank > DIMS || !(is_contiguous || steps.len() == rank) {
            return Err(PyValueError::new_err(format!(
                "{name} has {rank} dimensions and {} strides",
                steps.len()
            )));
        }
        let (mut shape, mut strides) = ([0; DIMS], [0; DIMS]);
        for (to, extent) in shape.iter_mut().zip(extents.iter_borrowed()) {
            *to = extent.extract()?;
        }
        if is_contiguous {
            let mut step = 1_i64;
            for (to, extent) in strides[..rank].iter_mut().zip(&shape[..rank]).rev() {
                *to = step;
                step = step.saturating_mul(*extent as i64);
            }
        }
        for (to, stride) in strides.iter_mut().zip(steps.iter_borrowed()) {
            *to = stride.extract()?;
        }
        Ok(Given { name, dtype, address, rank, shape, strides, is_asked: Cell::new(false) })
    }

    fn shape(&self) -> &[usize] {
        &self.shape[..self.rank]
    }

    /// The extents and strides of a tensor. If it has one dimension fewer than N, a dimension of 1 is inserted at index
    /// `at`.
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

    /// The description of a tensor without meaningless strides: calls that differ only in such strides share a plan.
    fn desc(&self) -> Result<TensorDesc, Error> {
        let ([batch, seqlen, heads, head_dim], strides) = self.dims(0)?;
        let shape = Shape { batch, seqlen, heads, head_dim };
        Ok(TensorDesc { dtype: named(&self.dtype)?, shape, strides: in_order(strides) }.canonical())
    }
}

impl<'py> Tensors<'py> {
    /// The tensors of a dict.
    ///
    /// # Errors
    /// A tensor is unknown to all operations, or an entry has a wrong type.
    pub(crate) fn new(given: &Bound<'py, PyDict>) -> PyResult<Tensors<'py>> {
        let mut tensors = Vec::with_capacity(given.len());
        for (name, tensor) in given.iter() {
            tensors.push(Given::new(name.cast::<PyString>()?.to_str()?, &tensor)?);
        }
        Ok(Tensors(tensors))
    }

    fn find(&self, name: &str) -> Option<&Given<'py>> {
        let found = self.0.iter().find(|given| given.name == name)?;
        found.is_asked.set(true);
        Some(found)
    }

    fn get(&self, name: &'static str) -> Result<&Given<'py>, Error> {
        self.find(name).ok_or(Error::NoTensor { tensor: name })
    }

    /// Whether there is a tensor of this name.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.find(name).is_some()
    }

    /// A tensor (batch, seqlen, heads, head_dim), or packed sequences without a batch.
    ///
    /// # Errors
    /// The tensor is missing, its dtype is unknown, or it has another number of dimensions.
    pub(crate) fn desc(&self, name: &'static str) -> Result<TensorDesc, Error> {
        self.get(name)?.desc()
    }

    /// Like [`Tensors::desc`], for an optional tensor.
    ///
    /// # Errors
    /// The errors of [`Tensors::desc`].
    pub(crate) fn optional(&self, name: &'static str) -> Result<Option<TensorDesc>, Error> {
        self.find(name).map(Given::desc).transpose()
    }

    /// A tensor (batch, heads, head_dim, keys), described as (batch, seqlen, heads, head_dim).
    ///
    /// # Errors
    /// The errors of [`Tensors::desc`].
    pub(crate) fn transposed(&self, name: &'static str, seqlen: usize) -> Result<TensorDesc, Error> {
        let given = self.get(name)?;
        let ([batch, heads, head_dim, _], _) = given.dims(0)?;
        Ok(TensorDesc::contiguous(named(&given.dtype)?, Shape { batch, seqlen, heads, head_dim }))
    }

    /// LSE (batch, seqlen, heads), or (seqlen, heads) for packed sequences, as a tensor with head_dim 1.
    ///
    /// # Errors
    /// The errors of [`Tensors::desc`].
    pub(crate) fn rows_of_one(&self, name: &'static str) -> Result<TensorDesc, Error> {
        let given = self.get(name)?;
        let ([batch, seqlen, heads], [of_batch, of_seqlen, of_heads]) = given.dims(0)?;
        let shape = Shape { batch, seqlen, heads, head_dim: 1 };
        let strides = in_order([of_batch, of_seqlen, of_heads, 1]);
        Ok(TensorDesc { dtype: named(&given.dtype)?, shape, strides }.canonical())
    }

    /// A tensor of splits, (splits, batch, seqlen, heads, head_dim), without a batch for packed sequences. LSE has no
    /// head_dim dimension, and is described with head_dim 1.
    ///
    /// # Errors
    /// The errors of [`Tensors::desc`].
    pub(crate) fn partials(&self, name: &'static str, is_lse: bool) -> Result<Partials, Error> {
        let given = self.get(name)?;
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

    /// The extents of an optional tensor.
    ///
    /// # Errors
    /// The tensor has another number of dimensions.
    pub(crate) fn extents<const N: usize>(&self, name: &'static str) -> Result<Option<[usize; N]>, Error> {
        let Some(given) = self.find(name) else { return Ok(None) };
        let shape = given.shape().try_into();
        shape.map(Some).map_err(|_| Error::Rank { tensor: name, given: given.rank, expected: N })
    }

    /// The sequences of Q, and of K and V, for tensors of these shapes, with hints as plans need them; `None` if all
    /// are dense and in use in full.
    ///
    /// # Errors
    /// A list has another number of dimensions, or a hint is not a number.
    pub(crate) fn sequences(
        &self,
        options: &Options<'_>,
        [q, k]: [Shape; 2],
    ) -> PyResult<Option<[Sequences; 2]>> {
        let ends = |name| -> Result<Option<usize>, Error> {
            Ok(self.extents(name)?.map(|[numbers]| numbers.saturating_sub(1)))
        };
        let (packed_q, packed_k) = (ends("cu_seqlens_q")?, ends("cu_seqlens_k")?);
        let of_q = packed_q.map_or(Sequences::dense(q.batch, q.seqlen), Sequences::packed);
        let of_k = match (packed_k, self.find("page_table")) {
            (Some(count), _) => Sequences::packed(count),
            (None, Some(table)) => {
                let ([rows, pages], [stride, _]) = table.dims(0)?;
                // The stride of a single row is meaningless.
                let stride = if rows > 1 { stride as usize } else { pages };
                let count = of_q.count();
                let indexed = self.has("cache_batch_idx");
                let paged = if indexed {
                    Sequences::indexed(count, [rows, pages])
                } else {
                    Sequences::paged(count, pages)
                };
                paged.table_stride(stride)
            }
            (None, None) => Sequences::dense(k.batch, k.seqlen),
        };
        let (longest_q, longest_k) = (options.hint("max_seqlen_q")?, options.hint("max_seqlen_k")?);
        let of_q = longest_q.map_or(of_q, |rows| of_q.longest(hint::rounded_up(rows)));
        let of_k = longest_k.map_or(of_k, |rows| of_k.longest(hint::rounded_down(rows)));
        let of_q = if self.has("seqused_q") { of_q.used() } else { of_q };
        let of_k = if self.has("leftpad_k") { of_k.left_padded() } else { of_k };
        let of_k = if self.has("seqused_k") { of_k.used() } else { of_k };
        let dense = Sequences::dense;
        let are_plain = [of_q, of_k] == [dense(q.batch, q.seqlen), dense(k.batch, k.seqlen)];
        Ok((!are_plain).then_some([of_q, of_k]))
    }

    /// The rotation of a tensor. `listed` is the name of its list of positions. `first` is the name of the option with
    /// its first position, which is used without a list.
    ///
    /// # Errors
    /// A table or an option has a wrong type.
    pub(crate) fn rotary(
        &self,
        options: &Options<'_>,
        [listed, first]: [&'static str; 2],
    ) -> PyResult<Option<Rotary>> {
        let (style, first) = (options.style()?, options.number(first)?.unwrap_or(0));
        let listed = self.has(listed);
        let Some([table_rows, pairs]) = self.table("cos", "sin")? else { return Ok(None) };
        let positions = if listed { Positions::Listed } else { Positions::From(first) };
        Ok(Some(Rotary { style, rotary_dim: 2 * pairs, table_rows, positions }))
    }
}

impl<'py> Tensors<'py> {
    /// The extents of a pair of tables; `None` without tables.
    ///
    /// # Errors
    /// The tables have other dimensions.
    fn table(&self, cos: &'static str, sin: &'static str) -> Result<Option<[usize; 2]>, Error> {
        let extents = self.extents(cos)?;
        self.extents::<2>(sin)?;
        Ok(extents)
    }

    /// The rotation of Q and K.
    ///
    /// # Errors
    /// A table or an option has a wrong type.
    pub(crate) fn qk_rotary(&self, options: &Options<'_>) -> PyResult<Option<QkRotary>> {
        let of_q = self.rotary(options, ["q_positions", "q_first"])?;
        let of_k = self.rotary(options, ["k_positions", "k_first"])?;
        Ok(of_q.zip(of_k).map(|(Rotary { style, rotary_dim, table_rows, positions }, of_k)| QkRotary {
            style,
            rotary_dim,
            table_rows,
            q_positions: positions,
            k_positions: of_k.positions,
        }))
    }

    /// The rotation of new keys and of queries.
    ///
    /// # Errors
    /// A table or an option has a wrong type.
    pub(crate) fn append_rotary(&self, options: &Options<'_>) -> PyResult<Option<AppendRotary>> {
        let style = options.style()?;
        let base = if self.has("rotary_seqlens") { SequenceBase::Listed } else { SequenceBase::Used };
        let Some([table_rows, pairs]) = self.table("rotary_cos", "rotary_sin")? else { return Ok(None) };
        let table = named(&self.get("rotary_cos")?.dtype)?;
        Ok(Some(AppendRotary { style, rotary_dim: 2 * pairs, table, table_rows, base }))
    }

    /// The addresses of the tensors, by their names.
    ///
    /// # Errors
    /// The operation does not know a tensor.
    pub(crate) fn at(&self) -> PyResult<Vec<(&'static str, Option<u64>)>> {
        if let Some(other) = self.0.iter().find(|given| !given.is_asked.get()) {
            return Err(PyTypeError::new_err(format!("the operation has no tensor {}", other.name)));
        }
        Ok(self.0.iter().map(|given| (given.name, Some(given.address))).collect())
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

    /// A hint, which only decides how a call is computed. A negative hint counts as no hint.
    fn hint(&self, name: &str) -> PyResult<Option<usize>> {
        Ok(self.number::<i64>(name)?.and_then(|rows| usize::try_from(rows).ok()))
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

    fn style(&self) -> PyResult<RopeStyle> {
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

/// A dtype by its name.
///
/// # Errors
/// No dtype has this name.
fn named(name: &Bound<'_, PyString>) -> Result<Dtype, Error> {
    let name = name.to_str()?;
    name.parse().map_err(|_| Error::Dtype { given: name.to_owned() })
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
