//! A call as it comes from Python.

use fa3_types::{Dtype, Mask, Problem, ProblemError, ProblemSpec, Shape, Strides, TensorDesc};
use pyo3::exceptions::{PyOverflowError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::error::Error;

/// (dtype, address, shape, strides) of a tensor with four dimensions.
pub(crate) type Tensor<'py> = (Bound<'py, PyString>, u64, Four<usize>, Four<i64>);

type Four<T> = (T, T, T, T);

/// (v_transposed, rows of Q that share a scale, dtype of O).
pub(crate) type Fp8<'py> = (bool, Option<usize>, Option<Bound<'py, PyString>>);

/// What a tensor looks like, without the strides that mean nothing: calls that differ in those alone share a plan.
///
/// # Errors
/// A dtype that has no such name.
pub(crate) fn desc((dtype, _, shape, strides): &Tensor<'_>) -> PyResult<TensorDesc> {
    let dtype = named(dtype)?;
    let &(batch, seqlen, heads, head_dim) = shape;
    let shape = Shape { batch, seqlen, heads, head_dim };
    let &(batch, seqlen, heads, head_dim) = strides;
    Ok(TensorDesc { dtype, shape, strides: Strides { batch, seqlen, heads, head_dim } }.canonical())
}

/// A dtype by its name.
///
/// # Errors
/// There is none of that name.
pub(crate) fn named(name: &Bound<'_, PyString>) -> PyResult<Dtype> {
    let name = name.to_str()?;
    Ok(name.parse().map_err(|_| Error::Dtype { given: name.to_owned() })?)
}

/// A number of Python's, which has no bounds: one that is none of T's is as wrong as any other that makes no sense.
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

/// What a call says besides its tensors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    /// 1/√head_dim if `None`.
    pub(crate) softmax_scale: Option<f64>,
    /// Keys that a query sees to the left and to the right of its position; -1 is unbounded.
    pub(crate) window: (i64, i64),
    /// No cap if `None`.
    pub(crate) softcap: Option<f64>,
    /// How many SMs to leave to others.
    pub(crate) sm_margin: i64,
    /// Whether V, which is e4m3, lies transposed.
    pub(crate) v_transposed: bool,
    /// Rows of Q that share a scale, as 128 of K and V do; heads do if `None`.
    pub(crate) block_rows: Option<usize>,
    /// Whether channels of V have scales and means, whatever rows of Q and K share.
    pub(crate) v_channels: bool,
    /// The dtype of O, by its name; Q's own or the usual one for e4m3 if `None`.
    pub(crate) output: Option<Dtype>,
}

/// Everything that a plan depends on. Calls that are equal share one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Call {
    device: u32,
    tensors: [TensorDesc; 3],
    window: (i64, i64),
    /// The bits of f64: NaN, which no problem can have, is equal to itself.
    softmax_scale: Option<u64>,
    softcap: Option<u64>,
    sm_margin: i64,
    v_transposed: bool,
    block_rows: Option<usize>,
    v_channels: bool,
    output: Option<Dtype>,
}

impl Call {
    /// Of Q, K and V on a device.
    pub(crate) fn new(device: u32, tensors: [TensorDesc; 3], options: Options) -> Call {
        let Options {
            softmax_scale,
            window,
            softcap,
            sm_margin,
            v_transposed,
            block_rows,
            v_channels,
            output,
        } = options;
        let bits = |number: Option<f64>| number.map(f64::to_bits);
        Call {
            device,
            tensors,
            window,
            softmax_scale: bits(softmax_scale),
            softcap: bits(softcap),
            sm_margin,
            v_transposed,
            block_rows,
            v_channels,
            output,
        }
    }

    /// The number of its device.
    pub(crate) fn device(&self) -> u32 {
        self.device
    }

    /// How many SMs to leave to others.
    pub(crate) fn sm_margin(&self) -> i64 {
        self.sm_margin
    }

    /// The problem, with a contiguous O, in rows that kernels take.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn problem(&self) -> Result<Problem, ProblemError> {
        let problem = self.spec()?.validate()?;
        problem.check_rows()?;
        Ok(problem)
    }

    /// The same, of which only the window has been checked.
    ///
    /// # Errors
    /// [`ProblemError::WindowSize`].
    pub(crate) fn spec(&self) -> Result<ProblemSpec, ProblemError> {
        let [q, k, v] = self.tensors;
        let o = Shape { head_dim: v.shape.head_dim, ..q.shape };
        let (left, right) = self.window;
        let o = TensorDesc::contiguous(self.output.unwrap_or(q.dtype.default_output()), o);
        let mut spec = ProblemSpec::new(q, k, v, o).mask(Mask::from_window(left, right)?);
        spec.softmax_scale = self.softmax_scale.map(f64::from_bits);
        spec.softcap = self.softcap.map(f64::from_bits);
        if self.v_transposed {
            spec = spec.transposed_v();
        }
        if let Some(rows) = self.block_rows {
            spec = spec.block_scales(rows);
        }
        if self.v_channels {
            spec = spec.v_channels();
        }
        Ok(spec)
    }
}
