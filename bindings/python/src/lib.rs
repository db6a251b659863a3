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
//! The module reads tensors by torch's methods and does not link torch, so that one build serves every torch version.
//! The Python sources beside it make the outputs. All operations go through `_fa3.run`.

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
mod operation;
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
    use pyo3::prelude::*;
    use pyo3::types::PyDict;

    #[pymodule_export]
    use crate::operation::Operation;
    use crate::place::Place;
    use crate::workspaces::Allocate;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }

    /// run(operation, device, stream, tensors, allocate)
    ///
    /// Puts an operation on a stream of a device and returns at once.
    ///
    /// tensors is a dict of tensors by names; None stands for no tensor. They are torch's, all in one place. Inputs
    /// that kernels cannot read are copied: q, k, v and other tensors of rows where the last dimension has gaps, all
    /// others where they are not contiguous or aligned. Or they are (dtype, address, shape, strides), which are used as
    /// they are: with torch's dtype or its name here, "f32", "f16", "bf16", "e4m3" or "i32", and strides in elements.
    /// Packed sequences have no batch.
    ///
    /// - forward: attention of q, k and v, to o, and to lse (float32, contiguous) if that is given. Other tensors:
    ///   q_descale, k_descale, v_descale and v_mean of e4m3, sink, qv, intervals. Packed sequences have cu_seqlens_q
    ///   and cu_seqlens_k, and may have seqused_q, seqused_k, and a table as forward_table has written it. A cache has
    ///   seqused_k, page_table, cache_batch_idx and leftpad_k, and q cu_seqlens_q and seqused_q. All these are
    ///   contiguous, but for the rows of a page_table on a GPU.
    /// - append: forward over a cache, to which k_new and v_new are written before, and cu_seqlens_k_new, rotary_cos,
    ///   rotary_sin and rotary_seqlens are of these.
    /// - forward_table: table, of q, k, v and lists.
    /// - backward: dq, dk and dv, and of sink dsink, of q, k, v, o, lse, dout and dlse, the last if it is given. Others
    ///   are as for forward.
    /// - fp8_forward: as forward, of 16 bits. Tensors: cos and sin, (positions, rotary_dim / 2), and q_positions and
    ///   k_positions besides.
    /// - quantize: codes and scales of x; of channels, where there is mean. Tensors: cos, sin and positions besides.
    /// - combine: o and lse of out_partial and lse_partial, whose first dimension is the splits.
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
        operation: &Operation,
        device: i32,
        stream: Option<usize>,
        tensors: &Bound<'_, PyDict>,
        allocate: Allocate,
    ) -> PyResult<Option<u32>> {
        operation.computes.compute(Place::new(device, stream), tensors, &allocate)
    }
}
