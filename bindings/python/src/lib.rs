//! The extension module `fa3._fa3`: attention, quantization for it, both in one call, and the reduction of partial
//! results. It takes raw addresses of a GPU's memory or of the CPU's.
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
//! A call's device and stream say where it is computed. The device is the number of a GPU, or -1 for the CPU, as in
//! torch's `Tensor.get_device`. On the CPU a call is over when the function returns. If the stream is None, the call is
//! only checked, without a device: by the rules of an H100, or by the rules of the CPU. Addresses are then ignored.
//!
//! The module handles integers and does not link torch, so that one build serves every torch version. The Python
//! sources beside it take the integers from tensors, and make the outputs. All operations go through [`_fa3::run`].

// A call as it comes from Python, and the reasons for refusing it.
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

// State that is kept between calls.
mod devices;
mod workspaces;

/// Attention, and quantization for it, over raw device addresses. The package `fa3` is built on this module, which is
/// not meant to be used directly.
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
    /// - forward: attention of q, k and v, written to o, and to lse (float32, contiguous) if lse is given. Other
    ///   tensors: q_descale, k_descale, v_descale and v_mean of e4m3 inputs, sink, qv, intervals. Packed sequences have
    ///   cu_seqlens_q and cu_seqlens_k, and may have seqused_q, seqused_k, and a table that forward_table has written.
    ///   A cache has seqused_k, page_table, cache_batch_idx and leftpad_k, and its q may have cu_seqlens_q and
    ///   seqused_q. All of these tensors are contiguous, except for the rows of a page_table on a GPU. Options:
    ///   softmax_scale; window (left, right, chunk); softcap; sm_margin; the hints max_seqlen_q and max_seqlen_k;
    ///   split_keys (0 for no split, -1 for equal shares, or the number of keys of a split); v_transposed; and, if
    ///   blocks have scales, block_rows, the number of rows of q that share a scale.
    /// - append: forward over a cache, to which k_new and v_new are written first. The tensors cu_seqlens_k_new,
    ///   rotary_cos, rotary_sin and rotary_seqlens describe these new rows and their rotation. Additional option:
    ///   interleaved.
    /// - forward_table: writes table, for calls of forward with the same q, k, v, lists and options. If table is not
    ///   given, nothing is written. Returns the number of 32-bit words of the table.
    /// - backward: computes dq, dk and dv, and dsink if there is sink, from q, k, v, o, lse, dout and the optional
    ///   dlse. Other tensors and options are as for forward. Additional option: deterministic. Unless it is True, tiles
    ///   may add to dq in any order.
    /// - fp8_forward: forward of 16-bit q, k and v, computed in 8 bits. Additional tensors: cos and sin, (positions,
    ///   rotary_dim / 2), and q_positions and k_positions. Additional options: interleaved; q_first and k_first, the
    ///   positions of first rows if no positions are listed; hadamard_seed and v_channels.
    /// - quantize: computes codes and scales of x; if mean is given, scales and means of channels. Additional tensors:
    ///   cos, sin and positions. Options: interleaved, first_position, hadamard_seed, transposed, and the first of
    ///   scale, heads_per_scale and block_rows that is given. If none of the three is given, the tensor has one scale.
    /// - combine: computes o and lse from out_partial and lse_partial, whose first dimension is the splits.
    ///
    /// allocate(bytes, zeros) makes a workspace while the stream is captured into a graph. Otherwise it makes scratch
    /// memory if the stream's cached workspace is missing or too small, for example if V is transposed into it. The
    /// result is (address, owner). The address, a multiple of 256, has `bytes` bytes. Their first `zeros` bytes are
    /// zeroed at the current point of the stream. The owner is dropped after the launch. On the CPU, and if the call is
    /// only checked, allocate is not called.
    ///
    /// Addresses are trusted: each must be the address of such a tensor on the device, which no other code uses until
    /// the work is done.
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
