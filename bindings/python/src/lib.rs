//! The extension module `fa3._fa3`: attention, quantization for it, both in one call, and the split-KV reduction.
//! Tensors are addresses in the memory of a GPU or of the CPU.
//!
//! The crate `fa3-call` defines the operations.
//!
//! A call's device and stream say where it is computed. The device is the number of a GPU, or -1 for the CPU, as in
//! torch's `Tensor.get_device`. On the CPU a call is over when the function returns. If the stream is None, the call is
//! only checked, without a device: by the rules of an H100, or by the rules of the CPU. Addresses are then ignored.
//!
//! The module reads tensors by DLPack's C exchange or, if torch is older than 2.10, by torch's methods. It does not
//! link torch, so that one build serves every torch version. The Python sources beside it make the outputs. All
//! operations go through `_fa3.run`, or for calls that are made again through `_fa3.Repeats`. XLA calls the handlers of
//! `_fa3.xla_handlers`, and tvm-ffi the function that `tvm_ffi` exports.

mod arguments;
mod buffers;
mod call;
mod dlpack;
mod error;
mod operation;
mod repeats;
mod threads;
mod torch;
mod tvm_ffi;
mod xla;

// State that is kept between calls.
mod kernels;
mod workspaces;

/// Attention, and quantization for it, over raw device addresses. The package `fa3` is built on this module, which is
/// not meant to be used directly.
#[pyo3::pymodule]
mod _fa3 {
    use fa3_call::Place;
    use pyo3::prelude::*;
    use pyo3::types::PyDict;

    use crate::call::Names;
    use crate::error::exception;
    use crate::kernels;
    #[pymodule_export]
    use crate::operation::Operation;
    #[pymodule_export]
    use crate::repeats::Repeats;
    use crate::workspaces::Allocate;
    use crate::xla;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        kernels::name_archive(module);
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }

    /// run(operation, device, stream, tensors, allocate)
    ///
    /// Puts an operation on a stream of a device, and returns at once. On the CPU, returns when the operation is done.
    ///
    /// tensors is a dict of tensors by their names, in which None stands for no tensor. All are torch tensors, in one
    /// place, or all are tuples (dtype, address, shape, strides). Torch tensors that kernels cannot read are copied: q,
    /// k, v and other tensors of rows if the last dimension has gaps, all others if they are not contiguous or not
    /// aligned. Tuples are used as they are. Their dtype is torch's or a name: "f32", "f16", "bf16", "e4m3", "int8" or
    /// "i32". Strides count elements. Packed sequences have no batch.
    ///
    /// - forward: writes attention of q, k and v to o, and LSE to lse (float32, contiguous) if lse is given. Other
    ///   inputs are sink, qv, intervals, and for e4m3 q_descale, k_descale, v_descale and v_mean. Packed sequences have
    ///   cu_seqlens_q and cu_seqlens_k, and may have seqused_q, seqused_k, and a table that forward_table has written.
    ///   A cache has seqused_k, page_table, cache_batch_idx and leftpad_k, and its q may have cu_seqlens_q and
    ///   seqused_q. These tensors are contiguous, except for the rows of a page_table on a GPU. k and v of e4m3 beside
    ///   q of 16 bits may have k_scales and v_scales, of the shape of k with one column, in place of descales.
    /// - append: first writes k_new and v_new to a cache, and then computes forward over it. cu_seqlens_k_new,
    ///   rotary_cos, rotary_sin and rotary_seqlens describe the new rows.
    /// - forward_table: writes table for q, k, v and their lists.
    /// - backward: writes dq, dk and dv, and dsink if there is sink, from q, k, v, o, lse, dout and, if given, dlse.
    ///   Other inputs are as for forward.
    /// - fp8_forward: computes forward of 16-bit tensors in 8 bits. Further inputs are cos and sin, (positions,
    ///   rotary_dim / 2), q_positions and k_positions.
    /// - quantize: writes codes and scales of x. If mean is given, scales are per channel. Further inputs are cos, sin
    ///   and positions.
    /// - combine: writes o and lse from out_partial and lse_partial, whose first dimension is the splits.
    ///
    /// allocate(bytes, zeros) makes a workspace while the stream is captured into a graph. Otherwise it makes scratch
    /// memory if the stream's cached workspace is missing or too small, for example if V is transposed into it. The
    /// result is (address, owner). The address, a multiple of 256, has `bytes` bytes. Their first `zeros` bytes are
    /// zeroed at the current point of the stream. The owner is dropped after the launch. On the CPU, and if the call is
    /// only checked, allocate is not called.
    ///
    /// Addresses are trusted: each must be the address of such a tensor on the device. No other code may use the tensor
    /// until the work is done.
    #[pyfunction]
    fn run(
        operation: &Operation,
        device: i32,
        stream: Option<usize>,
        tensors: &Bound<'_, PyDict>,
        allocate: Py<PyAny>,
    ) -> PyResult<Option<u32>> {
        let (names, allocate) = (Names::of(tensors)?, Allocate { function: allocate, like: None });
        let place = Place::new(device, stream);
        operation.computes.compute(tensors.py(), place, &names.arguments()?, &allocate)
    }

    /// warm_up(device, calls)
    ///
    /// Compiles the kernels that calls launch on a GPU, side by side. A call is (operation, tensors), with tuples for
    /// tensors, as in run. Later calls find the kernels. Returns the kernels, each once: the entry of each, and the
    /// place where its machine code comes from. This is "archive", the file kernels.sm_90a in the package's folder;
    /// "driver's cache", which is on disk; or "compiler", the driver's.
    #[pyfunction]
    fn warm_up(
        py: Python<'_>,
        device: u32,
        calls: Vec<(Bound<'_, Operation>, Bound<'_, PyDict>)>,
    ) -> PyResult<Vec<(String, &'static str)>> {
        let plannings: Vec<_> = calls
            .iter()
            .map(|(operation, tensors)| operation.get().computes.planning(tensors))
            .collect::<PyResult<_>>()?;
        py.detach(|| kernels::compile(device, plannings)).map_err(exception)
    }

    /// xla_handlers()
    ///
    /// The addresses of the handlers of XLA's foreign function interface, by the names of XLA's platforms. The
    /// attribute `operation` of a call names an operation, `tensors` the arguments and then the results, with a blank
    /// between two. All other attributes are the operation's options: bools, 64-bit numbers, texts, and lists of three
    /// 64-bit integers. Every operation can be called but append, and forward_table without a table.
    #[pyfunction]
    fn xla_handlers() -> [(&'static str, usize); 2] {
        let address = |handler: xla::Handler| (handler as *const ()).expose_provenance();
        [("cpu", address(xla::on_cpu)), ("CUDA", address(xla::on_gpu))]
    }
}
