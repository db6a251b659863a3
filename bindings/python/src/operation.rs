//! Operations with their options.

use std::cell::RefCell;
use std::sync::LazyLock;

use fa3_call::{
    Attention, Cached, Call, Combination, Error, Fp8Attention, Gradients, Options, Quantization, Table,
};
use fa3_cuda::host::PlanCache;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arguments::Choices;
use crate::call::{Compute, Last, Planned, Plans};
use crate::error::exception;

/// Operation(name, **options)
///
/// An operation with its options, by their names. None stands for an option's default. One Operation serves many calls.
/// Options that the operation does not know are refused.
///
/// - forward: attention, over listed keys if there are indices. Options: softmax_scale, window (left, right, chunk),
///   softcap, sm_margin, the hints max_seqlen_q and max_seqlen_k, split_keys (0: no splits, -1: equal shares, -2:
///   pieces whose size follows from the head dimensions, or the keys of a piece), v_transposed, for block scales
///   block_rows, the number of rows of q that share a scale, and the form of LSE: lse_base_two, lse_without_sink and
///   lse_empty_is_infinite.
/// - append: appends new rows to a cache, then computes forward over it. It also has the option interleaved.
/// - forward_table: writes the table that forward takes for the same lists and options. Returns the number of its
///   32-bit words. Without a tensor table, nothing is written.
/// - backward: the gradients of forward. It also has the option deterministic. Unless it is True, the additions to dq
///   may have any order.
/// - fp8_forward: forward of 16-bit tensors, in 8 bits. Further options: interleaved, hadamard_seed, v_channels, and
///   q_first and k_first, the positions of the first rows if no positions are listed.
/// - quantize: codes and scales. Options: interleaved, first_position, hadamard_seed, transposed, scale,
///   heads_per_scale and block_rows. Of the last three, the first that is given counts. Without them, the tensor has
///   one scale.
/// - combine: the split-KV reduction.
#[pyclass(frozen, module = "fa3._fa3")]
pub(crate) struct Operation {
    /// The operation's name.
    #[pyo3(get)]
    name: String,
    /// The operation's options, as they were given.
    #[pyo3(get)]
    options: Py<PyDict>,
    /// The computation.
    pub(crate) computes: Box<dyn Compute>,
}

#[pymethods]
impl Operation {
    #[new]
    #[pyo3(signature = (name, **options))]
    fn new(py: Python<'_>, name: String, options: Option<Bound<'_, PyDict>>) -> PyResult<Operation> {
        let given = options.unwrap_or_else(|| PyDict::new(py));
        let computes = computation(&name, &Options::new(&Choices(&given))).map_err(exception)?;
        Ok(Operation { name, options: given.unbind(), computes })
    }
}

/// The computation of an operation with these options.
///
/// # Errors
/// There is no such operation, or it does not know an option.
pub(crate) fn computation(name: &str, options: &Options<'_>) -> Result<Box<dyn Compute>, Error> {
    /// The operation of a call type, and its plans.
    macro_rules! planned {
        ($call:ty) => {{
            static PLANS: LazyLock<Plans<$call>> = LazyLock::new(PlanCache::default);
            thread_local!(static LAST: Last<$call> = const { RefCell::new(None) });
            Box::new(Planned::<$call> { numbers: <$call>::numbers(options)?, plans: &PLANS, last: &LAST })
        }};
    }
    let computes: Box<dyn Compute> = match name {
        "forward" => planned!(Attention),
        "append" => planned!(Cached),
        "backward" => planned!(Gradients),
        "fp8_forward" => planned!(Fp8Attention),
        "quantize" => planned!(Quantization),
        "combine" => planned!(Combination),
        "forward_table" => planned!(Table),
        _ => return Err(Error::NoOperation { name: name.to_owned() }),
    };
    options.refuse_others()?;
    Ok(computes)
}
