//! The extension module `fa3._fa3`: attention, quantization for it, both in one call, and merges of partial results,
//! over raw addresses, of a GPU's memory or of the CPU's.
//!
//! ```text
//! O = softmax(mask(cap(softmax_scale · Q Kᵀ))) V        LSE = ln Σ_k exp(score)
//!
//! y = x, rotated by its position, times M               M = diag(±1) · Hadamard
//! codes = e4m3(y / scale)                               scale = max |y| / 448 of each block of rows of a head
//! ```
//!
//! or of each group of heads, or of the tensor; or, by channels, y = x - mean of its channel, with the scale of its
//! channel.
//!
//! A call's device and stream say where it is computed. The device is the number of a GPU, or -1 for the CPU, as
//! torch's `Tensor.get_device` has it. On the CPU a call is over when the function returns. Where the stream is None,
//! the call is only checked, as far as that needs no device: by the rules of an H100, or by the rules of the CPU. Then
//! addresses are ignored.
//!
//! The module handles integers and does not link torch, so that one build serves every torch version. The Python
//! sources beside it take the integers from tensors, and make the outputs. All operations go through [`_fa3::run`].

// A call as it comes from Python, and why it can be refused.
mod arguments;
mod caught;
mod error;
mod place;

// The operations.
mod attention;
mod cached;
mod call;
mod combine;
mod fp8;
mod gradients;
mod quantize;
mod table;

// The CPU.
mod cpu;

// Between calls.
mod devices;
mod workspaces;

/// Attention, and quantization for it, over raw device addresses: what `fa3` is made of, not for use on its own.
#[pyo3::pymodule]
mod _fa3 {
    use pyo3::exceptions::PyTypeError;
    use pyo3::prelude::*;
    use pyo3::types::PyDict;

    use crate::arguments::{Options, Tensors};
    use crate::attention::Attention;
    use crate::cached::Cached;
    use crate::call::{Call, computed};
    use crate::combine::Combination;
    use crate::fp8::Fp8Attention;
    use crate::gradients::Gradients;
    use crate::place::Place;
    use crate::quantize::Quantization;
    use crate::table::Table;
    use crate::workspaces::Allocate;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }

    /// run(operation, device, stream, tensors, options, allocate)
    ///
    /// Puts an operation on a stream of a device and returns at once.
    ///
    /// tensors is a dict of (dtype, address, shape, strides) by names. A dtype has its name here: "f32", "f16", "bf16",
    /// "e4m3" or "i32". Strides are in elements; a contiguous tensor may have () for them. Packed sequences have no
    /// batch. options is a dict of values by names; None is an option's default. Options that an operation does not
    /// know are refused.
    ///
    /// - forward: attention of q, k and v, to o, and to lse (float32, contiguous) if that is given. Other tensors:
    ///   q_descale, k_descale, v_descale and v_mean of e4m3, sink, qv, intervals. Packed sequences have cu_seqlens_q
    ///   and cu_seqlens_k, and may have seqused_q, seqused_k, and a table as forward_table has written it. A cache has
    ///   seqused_k, page_table, cache_batch_idx and leftpad_k, and q cu_seqlens_q and seqused_q. All these are
    ///   contiguous, but for the rows of a page_table on a GPU. Options: softmax_scale, window (left, right, chunk),
    ///   softcap, sm_margin, the hints max_seqlen_q and max_seqlen_k, split_keys (0: not, -1: equally, or keys of a split),
    ///   v_transposed, and block_rows, of q that share a scale, where scales are of blocks.
    /// - append: forward over a cache, to which k_new and v_new are written before, and cu_seqlens_k_new, rotary_cos,
    ///   rotary_sin and rotary_seqlens are of these. Options: interleaved, too.
    /// - forward_table: writes table for calls of forward with such q, k, v, lists and options. Where it is not given,
    ///   nothing is written. Returns the table's words of 32 bits.
    /// - backward: dq, dk and dv, and of sink dsink, of q, k, v, o, lse, dout and dlse, the last if it is given. Others
    ///   are as for forward. Options: deterministic, too; unless it is True, dq may be added up in any order.
    /// - fp8_forward: forward of q, k and v of 16 bits, in 8 bits. Tensors: cos and sin, (positions, rotary_dim / 2),
    ///   and q_positions and k_positions besides. Options: interleaved; q_first and k_first, the positions of first
    ///   rows where none are listed; hadamard_seed and v_channels.
    /// - quantize: codes and scales of x; of channels, where there is mean. Tensors: cos, sin and positions besides.
    ///   Options: interleaved, first_position, hadamard_seed, transposed, and the first of scale, heads_per_scale and
    ///   block_rows that is given; if none is, the tensor has one scale.
    /// - combine: o and lse of out_partial and lse_partial, whose first dimension is the splits.
    ///
    /// allocate(bytes, zeros) makes a workspace while the stream is captured into a graph, or its scratch where the
    /// stream has none that is kept and as large, as where V is transposed into it. The result is (address, owner): the
    /// address of `bytes` bytes, a multiple of 256, whose first `zeros` bytes are zeroed where the stream is now; and
    /// an object that is dropped after the launch. On the CPU, and where the call is only checked, allocate is not
    /// called.
    ///
    /// Addresses are trusted: each must belong to such a tensor on the device, in use by no other code until the
    /// work is done.
    #[pyfunction]
    fn run(
        py: Python<'_>,
        operation: &str,
        device: i32,
        stream: Option<usize>,
        tensors: &Bound<'_, PyDict>,
        options: &Bound<'_, PyDict>,
        allocate: Allocate,
    ) -> PyResult<Option<u32>> {
        let (tensors, options) = (Tensors::new(tensors)?, Options::new(options)?);
        let (place, given) = (Place::new(device, stream), (&tensors, &options));
        match operation {
            "forward" => computed::<Attention>(py, place, given, &allocate)?,
            "append" => computed::<Cached>(py, place, given, &allocate)?,
            "backward" => computed::<Gradients>(py, place, given, &allocate)?,
            "fp8_forward" => computed::<Fp8Attention>(py, place, given, &allocate)?,
            "quantize" => computed::<Quantization>(py, place, given, &allocate)?,
            "combine" => computed::<Combination>(py, place, given, &allocate)?,
            "forward_table" => {
                let words = Table::given(&tensors, &options)?.words()?;
                if tensors.has("table") {
                    computed::<Table>(py, place, given, &allocate)?;
                }
                return Ok(Some(words));
            }
            other => return Err(PyTypeError::new_err(format!("there is no operation {other}"))),
        }
        Ok(None)
    }
}
