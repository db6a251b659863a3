//! Operations with their options.

use std::sync::LazyLock;

use fa3_cuda::host::PlanCache;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arguments::Options;
use crate::attention::Attention;
use crate::cached::Cached;
use crate::call::{Call, Compute, Planned, Plans};
use crate::combine::Combination;
use crate::fp8::Fp8Attention;
use crate::gradients::Gradients;
use crate::quantize::Quantization;
use crate::table::Table;

/// Operation(name, **options)
///
/// An operation with its options, by their names; None is an option's default. It is made once for many calls. Options
/// that an operation does not know are refused.
///
/// - forward: attention. Options: softmax_scale, window (left, right, chunk), softcap, sm_margin, the hints
///   max_seqlen_q and max_seqlen_k, split_keys (0: not, -1: equally, or keys of a split), v_transposed, block_rows, the
///   rows of q that share a scale, where scales are of blocks, and the form of LSE: lse_base_two, lse_without_sink and
///   lse_empty_is_infinite.
/// - append: forward over a cache, to which new rows are written before. Options: interleaved, too.
/// - forward_table: writes the table that calls of forward with the same lists and options take. Its words of 32 bits
///   are returned, and nothing is written where there is no table.
/// - backward: the gradients of forward. Options: deterministic, too; unless it is True, dq may be added up in any
///   order.
/// - fp8_forward: forward of 16-bit tensors, in 8 bits. Options: interleaved; q_first and k_first, the positions of
///   first rows where none are listed; hadamard_seed and v_channels.
/// - quantize: codes and scales. Options: interleaved, first_position, hadamard_seed, transposed, and the first of
///   scale, heads_per_scale and block_rows that is given; if none is, the tensor has one scale.
/// - combine: the merge of partial results.
#[pyclass(frozen, module = "fa3._fa3")]
pub(crate) struct Operation {
    /// Its name.
    #[pyo3(get)]
    name: String,
    /// Its options, as given.
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
        let options = Options::new(&given)?;
        /// A call's operation, and its plans.
        macro_rules! planned {
            ($call:ty) => {{
                static PLANS: LazyLock<Plans<$call>> = LazyLock::new(PlanCache::default);
                Box::new(Planned::<$call> { numbers: <$call>::numbers(&options)?, plans: &PLANS })
            }};
        }
        let computes: Box<dyn Compute> = match &*name {
            "forward" => planned!(Attention),
            "append" => planned!(Cached),
            "backward" => planned!(Gradients),
            "fp8_forward" => planned!(Fp8Attention),
            "quantize" => planned!(Quantization),
            "combine" => planned!(Combination),
            "forward_table" => planned!(Table),
            other => return Err(PyTypeError::new_err(format!("there is no operation {other}"))),
        };
        options.refuse_others()?;
        Ok(Operation { name, options: given.unbind(), computes })
    }
}
