//! The extension module `fa3._fa3`: attention, and quantization for it, over raw addresses, of a GPU's
//! memory or of the CPU's.
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
//! Where a call is computed is said by its device and its stream. The device is the number of a GPU, or -1 for the CPU,
//! as torch's `Tensor.get_device` has it. On the CPU a call is over when the function returns. Where the stream is
//! None, the call is only checked, as far as that needs no device: by the rules of an H100, or by those of the CPU.
//! Then addresses are not looked at.
//!
//! It knows integers and no torch, so one build serves every version of it. The Python sources beside it take the
//! integers from tensors, and make the outputs.

// A call as it comes from Python, and what it can be refused for.
mod call;
mod error;
mod place;

// The CPU.
mod cpu;

// What is kept between calls.
mod backward;
mod kept;
mod plans;
mod quantize;
mod workspaces;

/// Attention, and quantization for it, over raw device addresses: what `fa3` is made of, not for use on its own.
#[pyo3::pymodule]
mod _fa3 {
    use fa3_types::{Address, Addresses, BackwardAddresses, QuantizeAddresses, ValueLayout};
    use pyo3::prelude::*;

    use crate::backward as gradients;
    use crate::call::{Call, Fp8, Number, Options, Tensor, desc, named};
    use crate::cpu;
    use crate::error::Error;
    use crate::place::Place;
    use crate::plans;
    use crate::quantize::{self as quantization, Rotation, Scales};
    use crate::workspaces::Allocate;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }

    /// forward(device, stream, q, k, v, o, lse, descales, softmax_scale, window, softcap, sm_margin, fp8, allocate)
    ///
    /// Puts the forward pass on a stream of a device and returns None at once. A tensor is (dtype, address, shape,
    /// strides), the dtype by its name here ("bf16"), the strides in elements. o and lse are addresses: o of a
    /// contiguous tensor of q's dtype (of bf16 if that is e4m3), (batch, seqlen_q, heads_q, head_dim_v), lse of a
    /// contiguous tensor of float32, (batch, heads_q, seqlen_q), or None if nobody wants it. descales are four of the
    /// latter: (batch, heads_kv), the scales of e4m3 q, k and v, or None where they are 1, and None, or the means of
    /// v's channels. With these the scales of v are of channels, too, and both are (batch, heads_kv, head_dim_v), from
    /// a multiple of 16 bytes on.
    ///
    /// fp8 is None, or (v_transposed, block_rows, output): whether v, of which shape and strides are as if it were not,
    /// lies transposed; None, or how many rows of q share a scale, as 128 of k and v do; None, or the dtype of o.
    /// Scales of blocks are (batch, heads, blocks).
    ///
    /// allocate(bytes, zeros) makes a workspace where the stream has none that is kept, as where V is transposed into
    /// it, or while it is captured into a graph. The result is (address, owner): the address of so many bytes, a
    /// multiple of 256, of which so many, from the first on, are zeroed where the stream is now; and an object that is
    /// dropped after the launch. On the CPU, and where the call is only checked, allocate is not called.
    ///
    /// Addresses are trusted: each must be of such a tensor on the device, in use by nobody
    /// else until the work is done.
    #[pyfunction]
    #[allow(clippy::too_many_arguments, reason = "they come from Python, where a structure would cost more")]
    fn forward(
        py: Python<'_>,
        device: i32,
        stream: Option<usize>,
        q: Tensor<'_>,
        k: Tensor<'_>,
        v: Tensor<'_>,
        o: u64,
        lse: Option<u64>,
        descales: (Option<u64>, Option<u64>, Option<u64>, Option<u64>),
        softmax_scale: Option<Number<f64>>,
        window: (Number<i64>, Number<i64>),
        softcap: Option<Number<f64>>,
        sm_margin: Number<i64>,
        fp8: Option<Fp8<'_>>,
        allocate: Allocate,
    ) -> PyResult<()> {
        let place = Place::new(device, stream);
        let (v_transposed, block_rows, output) = fp8.unwrap_or((false, None, None));
        let options = Options {
            softmax_scale: softmax_scale.map(|Number(scale)| scale),
            window: (window.0.0, window.1.0),
            softcap: softcap.map(|Number(cap)| cap),
            sm_margin: sm_margin.0,
            v_transposed,
            block_rows,
            v_channels: descales.3.is_some(),
            output: output.as_ref().map(named).transpose()?,
        };
        let call = Call::new(place.device(), [desc(&q)?, desc(&k)?, desc(&v)?], options);
        let [q, k, v, o] = [q.1, k.1, v.1, o].map(Address);
        let mut at = Addresses::new(q, k, v, o);
        at.lse = lse.map(Address);
        let [q, k, v, v_mean] = <[Option<u64>; 4]>::from(descales).map(|descale| descale.map(Address));
        (at.descales, at.v_mean) = ([q, k, v], v_mean);
        // Making a plan may take a second. Other threads of Python go on meanwhile, as they do where the driver
        // waits for room in the stream.
        Ok(py.detach(|| match place {
            Place::Stream { stream, .. } => plans::launch(&call, stream, at, &allocate).map(drop),
            Place::Cpu => cpu::run(|| cpu::forward(&call, at)),
            Place::CheckedForGpu => plans::check(&call),
            Place::CheckedForCpu => cpu::check(&call).map(drop),
        })?)
    }

    /// backward(device, stream, q, k, v, dout, o, lse, dlse, dq, dk, dv, softmax_scale, window, softcap, sm_margin,
    /// allocate, deterministic=True)
    ///
    /// Puts the backward pass on a stream of a device and returns None at once. q, k, v and dout are (dtype, address,
    /// shape, strides) as for forward, dout of O's shape. The others are addresses of contiguous tensors: o and lse as
    /// forward wrote them, dlse of lse's shape or None, and dq, dk and dv of q's, k's and v's shapes and dtype, which
    /// are written.
    ///
    /// Unless deterministic, dq may be added up in any order, where that is faster.
    ///
    /// allocate is as for forward.
    ///
    /// Addresses are trusted: each must be of such a tensor on the device, in use by nobody
    /// else until the work is done.
    #[pyfunction]
    #[pyo3(signature = (
        device, stream, q, k, v, dout, o, lse, dlse, dq, dk, dv, softmax_scale, window, softcap, sm_margin, allocate,
        deterministic = true
    ))]
    #[allow(clippy::too_many_arguments, reason = "they come from Python, where a structure would cost more")]
    fn backward(
        py: Python<'_>,
        device: i32,
        stream: Option<usize>,
        q: Tensor<'_>,
        k: Tensor<'_>,
        v: Tensor<'_>,
        dout: Tensor<'_>,
        o: u64,
        lse: u64,
        dlse: Option<u64>,
        dq: u64,
        dk: u64,
        dv: u64,
        softmax_scale: Option<Number<f64>>,
        window: (Number<i64>, Number<i64>),
        softcap: Option<Number<f64>>,
        sm_margin: Number<i64>,
        allocate: Allocate,
        deterministic: bool,
    ) -> PyResult<()> {
        let place = Place::new(device, stream);
        let options = Options {
            softmax_scale: softmax_scale.map(|Number(scale)| scale),
            window: (window.0.0, window.1.0),
            softcap: softcap.map(|Number(cap)| cap),
            sm_margin: sm_margin.0,
            v_transposed: false,
            block_rows: None,
            v_channels: false,
            output: None,
        };
        let forward = Call::new(place.device(), [desc(&q)?, desc(&k)?, desc(&v)?], options);
        let call = gradients::Call::new(forward, desc(&dout)?, deterministic);
        let [q, k, v, o, lse, dout] = [q.1, k.1, v.1, o, lse, dout.1].map(Address);
        let [dq, dk, dv] = [dq, dk, dv].map(Address);
        let dlse = dlse.map(Address);
        let at = BackwardAddresses { q, k, v, o, lse, dout, dlse, dq, dk, dv };
        // Other threads of Python go on meanwhile, as in forward.
        Ok(py.detach(|| match place {
            Place::Stream { stream, .. } => gradients::launch(&call, stream, at, &allocate).map(drop),
            Place::Cpu => cpu::run(|| cpu::backward(&call, at)),
            Place::CheckedForGpu => gradients::check(&call),
            Place::CheckedForCpu => cpu::check_backward(&call).map(drop),
        })?)
    }

    /// quantize(device, stream, x, codes, scales, rotation, hadamard_seed, scale, heads_per_scale, block_rows,
    /// transposed, allocate)
    ///
    /// Puts a quantization to e4m3 on a stream of a device and returns None at once. x is (dtype, address, shape,
    /// strides) as for forward. codes and scales are addresses: codes of a contiguous tensor of x's shape, scales of a
    /// contiguous tensor of float32.
    ///
    /// Where scales come from is said by the first of these that is not None, whatever the others are: scale is the one
    /// of all, and scales is None; heads_per_scale successive heads share one, (batch, heads / heads_per_scale);
    /// block_rows rows of a head share one, (batch, heads, ceil(seqlen / block_rows)). If all are None the tensor has
    /// one.
    ///
    /// rotation is None or (cos, sin, table_rows, rotary_dim, interleaved, positions, first_position). cos and sin are
    /// addresses of contiguous tensors of float32, (table_rows, rotary_dim / 2). positions is that of a contiguous
    /// tensor of int32, (batch, seqlen), or None if row i of each sequence is at first_position + i.
    ///
    /// hadamard_seed is None, or what the random signs before the Hadamard transform are drawn from.
    ///
    /// If transposed, codes is of a contiguous tensor (batch, heads, head_dim, keys), keys being seqlen rounded up to a
    /// multiple of 128, and codes are as products read V.
    ///
    /// allocate is as for forward; the workspace may hold anything, so zeros is 0.
    ///
    /// Addresses are trusted: each must be of such a tensor on the device, in use by nobody
    /// else until the work is done.
    #[pyfunction]
    #[allow(clippy::too_many_arguments, reason = "they come from Python, where a structure would cost more")]
    fn quantize(
        py: Python<'_>,
        device: i32,
        stream: Option<usize>,
        x: Tensor<'_>,
        codes: u64,
        scales: Option<u64>,
        rotation: Option<Rotation>,
        hadamard_seed: Option<Number<u64>>,
        scale: Option<Number<f64>>,
        heads_per_scale: Option<Number<usize>>,
        block_rows: Option<Number<usize>>,
        transposed: bool,
        allocate: Allocate,
    ) -> PyResult<()> {
        let seed = hadamard_seed.map(|Number(seed)| seed);
        let scaling = match (scale, heads_per_scale, block_rows) {
            (Some(Number(scale)), ..) => Scales::given(scale),
            (None, Some(Number(heads)), _) => Scales::Heads(heads),
            (None, None, Some(Number(rows))) => Scales::Blocks(rows),
            (None, None, None) => Scales::Tensor,
        };
        let place = Place::new(device, stream);
        let (x_desc, layout) = (desc(&x)?, layout(transposed));
        let call = quantization::Call::new(place.device(), x_desc, rotation.as_ref(), seed, scaling, layout);
        let at = quantization::addresses(x.1, codes, scales, None, rotation.as_ref());
        // Other threads of Python go on meanwhile, as in forward.
        Ok(py.detach(|| run(place, &call, at, &allocate))?)
    }

    /// quantize_channels(device, stream, x, codes, scales, mean, transposed, allocate)
    ///
    /// Puts a quantization to e4m3 by channels on a stream of a device and returns None at once. x, codes, transposed
    /// and allocate are as for quantize. scales and mean are addresses of contiguous tensors of float32,
    /// (batch, heads, head_dim).
    ///
    /// Addresses are trusted: each must be of such a tensor on the device, in use by nobody
    /// else until the work is done.
    #[pyfunction]
    #[allow(clippy::too_many_arguments, reason = "they come from Python, where a structure would cost more")]
    fn quantize_channels(
        py: Python<'_>,
        device: i32,
        stream: Option<usize>,
        x: Tensor<'_>,
        codes: u64,
        scales: u64,
        mean: u64,
        transposed: bool,
        allocate: Allocate,
    ) -> PyResult<()> {
        let place = Place::new(device, stream);
        let (x_desc, layout) = (desc(&x)?, layout(transposed));
        let call = quantization::Call::new(place.device(), x_desc, None, None, Scales::Channels, layout);
        let at = quantization::addresses(x.1, codes, Some(scales), Some(mean), None);
        // Other threads of Python go on meanwhile, as in forward.
        Ok(py.detach(|| run(place, &call, at, &allocate))?)
    }

    /// Quantizes.
    fn run(
        place: Place,
        call: &quantization::Call,
        at: QuantizeAddresses,
        allocate: &Allocate,
    ) -> Result<(), Error> {
        match place {
            Place::Stream { stream, .. } => quantization::launch(call, stream, at, allocate).map(drop),
            Place::Cpu => cpu::run(|| cpu::quantize(call, at)),
            Place::CheckedForGpu => quantization::check(call),
            Place::CheckedForCpu => cpu::check_quantize(call).map(drop),
        }
    }

    fn layout(transposed: bool) -> ValueLayout {
        if transposed { ValueLayout::Transposed } else { ValueLayout::Rows }
    }
}
