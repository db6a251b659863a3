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
//! Where a call is computed is said by its device and its stream. The device is the number of a GPU, or -1 for the CPU,
//! as torch's `Tensor.get_device` has it. On the CPU a call is over when the function returns. Where the stream is
//! None, the call is only checked, as far as that needs no device: by the rules of an H100, or by those of the CPU.
//! Then addresses are not looked at.
//!
//! It knows integers and no torch, so one build serves every version of it. The Python sources beside it take the
//! integers from tensors, and make the outputs.

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
mod kept;
mod workspaces;

/// Attention, and quantization for it, over raw device addresses: what `fa3` is made of, not for use on its own.
#[pyo3::pymodule]
mod _fa3 {
    use fa3_types::{Sequences, Shape, TensorDesc, ValueLayout};
    use pyo3::prelude::*;
    use pyo3::types::PyString;

    use crate::arguments::{
        Cache, Four, Fp8, Intervals, NewRows, Number, Packed, Parts, QkRotation, Rotation, Tensor, Window,
        append_rotary, cached, desc, lists, lists_of_cache, named, output, partials, qk_rotary, rotary,
        sequences,
    };
    use crate::attention::Attention;
    use crate::cached::Cached;
    use crate::call;
    use crate::combine::Combination;
    use crate::fp8::Fp8Attention;
    use crate::gradients::Gradients;
    use crate::place::Place;
    use crate::quantize::{Quantization, Scales};
    use crate::table::Table;
    use crate::workspaces::Allocate;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }

    /// forward(device, stream, q, k, v, o, lse, descales, softmax_scale, window, softcap, sm_margin, fp8, allocate,
    /// o_strides=None, packed=None, sink=None, table=None, qv=None, intervals=None)
    ///
    /// Puts the forward pass on a stream of a device and returns None at once. A tensor is (dtype, address, shape,
    /// strides), the dtype by its name here ("bf16"), the strides in elements. o and lse are addresses: o of a tensor
    /// of q's dtype (of bf16 if that is e4m3), (batch, seqlen_q, heads_q, head_dim_v), contiguous unless it has
    /// o_strides; lse of a contiguous tensor of float32, (batch, heads_q, seqlen_q), or None if nobody wants it.
    /// descales are four of the
    /// latter: (batch, heads_kv), the scales of e4m3 q, k and v, or None where they are 1, and None, or the means of
    /// v's channels. With these the scales of v are of channels, too, and both are (batch, heads_kv, head_dim_v), from
    /// a multiple of 16 bytes on.
    ///
    /// window is (left, right, chunk): how many keys a query sees to the left and to the right of its position, -1
    /// being unbounded, and how many keys a chunk has, 0 being none.
    ///
    /// fp8 is None, or (v_transposed, block_rows, output): whether v, of which shape and strides are as if it were not,
    /// lies transposed; None, or how many rows of q share a scale, as 128 of k and v do; None, or the dtype of o.
    /// Scales of blocks are (batch, heads, blocks).
    ///
    /// packed is None, or (sequences, cu_seqlens, seqused, longest): tensors have a batch of 1, in which so many
    /// sequences lie one after the other. The others are pairs, of q and of k and v. cu_seqlens are addresses of
    /// contiguous tensors of int32, (sequences + 1,): sequence i is rows cu_seqlens[i] .. cu_seqlens[i + 1]. seqused
    /// are addresses of such tensors, (sequences,), that say how many of its rows are in use, or None where all are.
    /// longest are the rows of the longest sequences, or None: they decide how the call is computed, and change no
    /// result beyond its rounding. The lists are read where the call is computed, and only there.
    ///
    /// sink is None, or the address of a contiguous tensor of float32, (heads_q,): a logit of each query head in the
    /// softmax's denominator.
    ///
    /// qv is None, or a tensor of O's shape, (batch, seqlen_q, heads_q, head_dim_v), and q's dtype, whose product with
    /// v is added to that of q and k.
    ///
    /// intervals is None, or (address, shape): of a contiguous tensor of int32, (batch or 1, heads_q or 1, seqlen_q,
    /// 2 or 4), from a multiple of 16 bytes on: start and end of one or two intervals of keys that each query sees.
    ///
    /// table is None, or the address of packed sequences' table as forward_table has written it, and its words. Then
    /// the lists are not looked at, but for which there are.
    ///
    /// allocate(bytes, zeros) makes a workspace while the stream is captured into a graph, or its scratch where the
    /// stream has none that is kept and as large, as where V is transposed into it. The result is (address, owner): the
    /// address of so many bytes, a multiple of 256, of which so many, from the first on, are zeroed where the stream is
    /// now; and an object that is dropped after the launch. On the CPU, and where the call is only checked, allocate is
    /// not called.
    ///
    /// Addresses are trusted: each must be of such a tensor on the device, in use by nobody
    /// else until the work is done.
    #[pyfunction]
    #[pyo3(signature = (
        device, stream, q, k, v, o, lse, descales, softmax_scale, window, softcap, sm_margin, fp8, allocate,
        o_strides = None, packed = None, sink = None, table = None, qv = None, intervals = None
    ))]
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
        window: Window,
        softcap: Option<Number<f64>>,
        sm_margin: Number<i64>,
        fp8: Option<Fp8<'_>>,
        allocate: Allocate,
        o_strides: Option<Four<i64>>,
        packed: Option<Packed>,
        sink: Option<u64>,
        table: Option<(u64, u32)>,
        qv: Option<Tensor<'_>>,
        intervals: Option<Intervals>,
    ) -> PyResult<()> {
        let (v_transposed, block_rows, o_dtype) = fp8.unwrap_or((false, None, None));
        let inputs = [desc(&q)?, desc(&k)?, desc(&v)?];
        let o_dtype = match &o_dtype {
            Some(dtype) => named(dtype)?,
            None => inputs[0].dtype.default_output(),
        };
        let call = Attention {
            inputs,
            qv: qv.as_ref().map(desc).transpose()?,
            o: output(o_dtype, shape_of_o(&inputs), o_strides),
            sequences: packed.as_ref().map(sequences),
            softmax_scale: softmax_scale.map(|Number(scale)| scale.into()),
            window: window.into(),
            intervals: intervals.map(|(_, (batch, heads, rows, bounds))| [batch, heads, rows, bounds]),
            softcap: softcap.map(|Number(cap)| cap.into()),
            sink: sink.is_some(),
            split_keys: 0,
            sm_margin: sm_margin.0,
            v_transposed,
            block_rows,
            v_channels: descales.3.is_some(),
            table: table.map(|(_, words)| words),
        };
        let (q_descale, k_descale, v_descale, v_mean) = descales;
        // What a table says is not said again.
        let [cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k] =
            lists(packed.as_ref().filter(|_| table.is_none()));
        let at = [
            ("q", Some(q.1)),
            ("k", Some(k.1)),
            ("v", Some(v.1)),
            ("qv", qv.map(|qv| qv.1)),
            ("o", Some(o)),
            ("lse", lse),
            ("q_descale", q_descale),
            ("k_descale", k_descale),
            ("v_descale", v_descale),
            ("v_mean", v_mean),
            ("sink", sink),
            cu_seqlens_q,
            cu_seqlens_k,
            seqused_q,
            seqused_k,
            ("table", table.map(|(address, _)| address)),
            ("intervals", intervals.map(|(address, _)| address)),
        ];
        // Making a plan may take a second. Other threads of Python go on meanwhile, as they do where the driver
        // waits for room in the stream.
        Ok(py.detach(|| call::run(Place::new(device, stream), call, &at, &allocate))?)
    }

    /// forward_table(device, stream, q, k, v, window, has_softcap, sm_margin, packed, table, allocate)
    ///
    /// Puts the kernel on a stream of a device that writes the table of packed sequences to the address table, for
    /// calls of forward that share it, and returns the table's words of 32 bits. If table is None nothing is put
    /// anywhere. Of q, k and v only dtypes and shapes matter. The others are as for forward, whose calls must have the
    /// same.
    #[pyfunction]
    #[allow(clippy::too_many_arguments, reason = "they come from Python, where a structure would cost more")]
    fn forward_table(
        py: Python<'_>,
        device: i32,
        stream: Option<usize>,
        q: Tensor<'_>,
        k: Tensor<'_>,
        v: Tensor<'_>,
        window: Window,
        has_softcap: bool,
        sm_margin: Number<i64>,
        packed: Packed,
        table: Option<u64>,
        allocate: Allocate,
    ) -> PyResult<u32> {
        let inputs = [desc(&q)?, desc(&k)?, desc(&v)?];
        let call = Table(Attention {
            inputs,
            qv: None,
            o: output(inputs[0].dtype.default_output(), shape_of_o(&inputs), None),
            sequences: Some(sequences(&packed)),
            softmax_scale: None,
            window: window.into(),
            intervals: None,
            softcap: has_softcap.then(|| 1.0.into()),
            sink: false,
            split_keys: 0,
            sm_margin: sm_margin.0,
            v_transposed: false,
            block_rows: None,
            v_channels: false,
            table: None,
        });
        let words = call.words()?;
        let [cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k] = lists(Some(&packed));
        let at = [cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, ("table", table)];
        if table.is_some() {
            py.detach(|| call::run(Place::new(device, stream), call, &at, &allocate))?;
        }
        Ok(words)
    }

    fn shape_of_o(&[q, _, v]: &[TensorDesc; 3]) -> Shape {
        Shape { head_dim: v.shape.head_dim, ..q.shape }
    }

    /// cached_forward(device, stream, q, k, v, o, lse, descales, softmax_scale, window, softcap, sm_margin, allocate,
    /// cache, split_keys, o_dtype=None, o_strides=None, sink=None, new=None, qv=None)
    ///
    /// Puts the forward pass over a cache of keys and values on a stream of a device and returns None at once.
    /// Arguments are as for forward, but for these. q has a batch of 1 if its sequences are packed. descales are three:
    /// (sequences, heads_kv), the scales of e4m3 q, k and v, or None where they are 1. o_dtype is None or the dtype of
    /// o.
    ///
    /// cache is (sequences, cu_seqlens_q, seqused, leftpad_k, page_table, longest): so many sequences. cu_seqlens_q is
    /// None, or the address that says that q is packed. seqused are two addresses, of q's and of k's, or None where all
    /// rows are in use. leftpad_k is None, or the address of a contiguous tensor of int32, (sequences,): so many rows
    /// of memory are before each sequence; seqused of k counts them. page_table is None where k has the rows of each
    /// sequence in an entry of its batch, or (address, pages, stride, index): of a tensor of int32, (sequences, pages),
    /// whose rows begin `stride` entries apart, on the CPU without gaps: the entries of the batch of k and v that are
    /// the pages of each sequence. Numbers of pages that are not there are of rows of zeros. index is None, or
    /// (address, rows): of a contiguous tensor of int32, (sequences,), which row of the table, (rows, pages) then, is
    /// each sequence's. longest are hints, as in packed.
    ///
    /// split_keys is 0, or -1: CTAs share the keys of sequences equally where rows of q are few; or a number of keys:
    /// in pieces of so many.
    ///
    /// new is None or (k_new, v_new, cu_seqlens_k_new, rotation): rows that are written to k and v before, behind those
    /// in use. They have a batch of 1 if they are packed, and cu_seqlens_k_new is the address that says so. rotation is
    /// None or (dtype, cos, sin, table_rows, rotary_dim, interleaved, rotary_seqlens): k_new and q are rotated. cos and
    /// sin are addresses of contiguous tensors of this dtype, (table_rows, rotary_dim / 2); rotary_seqlens is that of
    /// the positions of the sequences' first rows, or None where these are seqused.
    ///
    /// Addresses are trusted: each must be of such a tensor on the device, in use by nobody
    /// else until the work is done.
    #[pyfunction]
    #[pyo3(signature = (
        device, stream, q, k, v, o, lse, descales, softmax_scale, window, softcap, sm_margin, allocate, cache,
        split_keys, o_dtype = None, o_strides = None, sink = None, new = None, qv = None
    ))]
    #[allow(clippy::too_many_arguments, reason = "they come from Python, where a structure would cost more")]
    fn cached_forward(
        py: Python<'_>,
        device: i32,
        stream: Option<usize>,
        q: Tensor<'_>,
        k: Tensor<'_>,
        v: Tensor<'_>,
        o: u64,
        lse: Option<u64>,
        descales: (Option<u64>, Option<u64>, Option<u64>),
        softmax_scale: Option<Number<f64>>,
        window: Window,
        softcap: Option<Number<f64>>,
        sm_margin: Number<i64>,
        allocate: Allocate,
        cache: Cache,
        split_keys: Number<i64>,
        o_dtype: Option<Bound<'_, PyString>>,
        o_strides: Option<Four<i64>>,
        sink: Option<u64>,
        new: Option<NewRows<'_>>,
        qv: Option<Tensor<'_>>,
    ) -> PyResult<()> {
        let inputs = [desc(&q)?, desc(&k)?, desc(&v)?];
        let o_dtype = match &o_dtype {
            Some(dtype) => named(dtype)?,
            None => inputs[0].dtype.default_output(),
        };
        let call = Attention {
            inputs,
            qv: qv.as_ref().map(desc).transpose()?,
            o: output(o_dtype, shape_of_o(&inputs), o_strides),
            sequences: Some(cached(&cache, inputs.map(|x| x.shape))),
            softmax_scale: softmax_scale.map(|Number(scale)| scale.into()),
            window: window.into(),
            intervals: None,
            softcap: softcap.map(|Number(cap)| cap.into()),
            sink: sink.is_some(),
            split_keys: split_keys.0,
            sm_margin: sm_margin.0,
            v_transposed: false,
            block_rows: None,
            v_channels: false,
            table: None,
        };
        let (q_descale, k_descale, v_descale) = descales;
        let [cu_seqlens_q, seqused_q, seqused_k, leftpad_k, page_table, cache_batch_idx] =
            lists_of_cache(&cache);
        let rotation = new.as_ref().and_then(|new| new.3.as_ref());
        let at = [
            ("q", Some(q.1)),
            ("k", Some(k.1)),
            ("v", Some(v.1)),
            ("qv", qv.map(|qv| qv.1)),
            ("o", Some(o)),
            ("lse", lse),
            ("q_descale", q_descale),
            ("k_descale", k_descale),
            ("v_descale", v_descale),
            ("sink", sink),
            cu_seqlens_q,
            seqused_q,
            seqused_k,
            leftpad_k,
            page_table,
            cache_batch_idx,
            ("k_new", new.as_ref().map(|new| new.0.1)),
            ("v_new", new.as_ref().map(|new| new.1.1)),
            ("cu_seqlens_k_new", new.as_ref().and_then(|new| new.2)),
            ("rotary_cos", rotation.map(|rotation| rotation.1)),
            ("rotary_sin", rotation.map(|rotation| rotation.2)),
            ("rotary_seqlens", rotation.and_then(|rotation| rotation.6)),
        ];
        let place = Place::new(device, stream);
        // Other threads of Python go on meanwhile, as in forward.
        let Some((k_new, v_new, packed, _)) = &new else {
            return Ok(py.detach(|| call::run(place, call, &at, &allocate))?);
        };
        let new = [desc(k_new)?, desc(v_new)?];
        let dense = Sequences::dense(new[0].shape.batch, new[0].shape.seqlen);
        let sequences = packed.map_or(dense, |_| Sequences::packed(cache.0));
        let rotary = rotation.map(append_rotary).transpose()?;
        let call = Cached { attention: call, new, sequences, rotary };
        Ok(py.detach(|| call::run(place, call, &at, &allocate))?)
    }

    /// fp8_forward(device, stream, q, k, v, o, lse, rotation, hadamard_seed, v_channels, softmax_scale, window,
    /// softcap, allocate, packed=None)
    ///
    /// Puts attention in 8 bits of float16 or bfloat16 q, k and v on a stream of a device and returns None at once:
    /// their quantizations, and the forward pass of the codes. q, k, v, o, lse, softmax_scale, window, softcap,
    /// allocate and packed are as for forward; o is of q's dtype and contiguous. Codes and scales lie in the workspace.
    ///
    /// rotation is None or (cos, sin, table_rows, rotary_dim, interleaved, q_positions, k_positions). cos and sin are
    /// as for quantize. q_positions and k_positions are (positions, first_position) as there, of the rows of q and of
    /// k.
    ///
    /// hadamard_seed is None, or what the random signs before the Hadamard transform of q and k are drawn from. If
    /// v_channels, channels of v have means and scales, in place of blocks of its rows.
    ///
    /// Addresses are trusted: each must be of such a tensor on the device, in use by nobody
    /// else until the work is done.
    #[pyfunction]
    #[pyo3(signature = (
        device, stream, q, k, v, o, lse, rotation, hadamard_seed, v_channels, softmax_scale, window, softcap, allocate,
        packed = None
    ))]
    #[allow(clippy::too_many_arguments, reason = "they come from Python, where a structure would cost more")]
    fn fp8_forward(
        py: Python<'_>,
        device: i32,
        stream: Option<usize>,
        q: Tensor<'_>,
        k: Tensor<'_>,
        v: Tensor<'_>,
        o: u64,
        lse: Option<u64>,
        rotation: Option<QkRotation>,
        hadamard_seed: Option<Number<u64>>,
        v_channels: bool,
        softmax_scale: Option<Number<f64>>,
        window: Window,
        softcap: Option<Number<f64>>,
        allocate: Allocate,
        packed: Option<Packed>,
    ) -> PyResult<()> {
        let inputs = [desc(&q)?, desc(&k)?, desc(&v)?];
        let call = Fp8Attention {
            attention: Attention {
                inputs,
                qv: None,
                o: output(inputs[0].dtype, shape_of_o(&inputs), None),
                sequences: packed.as_ref().map(sequences),
                softmax_scale: softmax_scale.map(|Number(scale)| scale.into()),
                window: window.into(),
                intervals: None,
                softcap: softcap.map(|Number(cap)| cap.into()),
                sink: false,
                split_keys: 0,
                sm_margin: 0,
                v_transposed: false,
                block_rows: None,
                v_channels: false,
                table: None,
            },
            rotary: rotation.as_ref().map(qk_rotary),
            hadamard_seed: hadamard_seed.map(|Number(seed)| seed),
            v_channels,
        };
        let [cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k] = lists(packed.as_ref());
        let at = [
            ("q", Some(q.1)),
            ("k", Some(k.1)),
            ("v", Some(v.1)),
            ("o", Some(o)),
            ("lse", lse),
            ("cos", rotation.as_ref().map(|rotation| rotation.0)),
            ("sin", rotation.as_ref().map(|rotation| rotation.1)),
            ("q_positions", rotation.as_ref().and_then(|rotation| rotation.5.0)),
            ("k_positions", rotation.as_ref().and_then(|rotation| rotation.6.0)),
            cu_seqlens_q,
            cu_seqlens_k,
            seqused_q,
            seqused_k,
        ];
        // Other threads of Python go on meanwhile, as in forward.
        Ok(py.detach(|| call::run(Place::new(device, stream), call, &at, &allocate))?)
    }

    /// backward(device, stream, q, k, v, dout, o, lse, dlse, dq, dk, dv, softmax_scale, window, softcap, sm_margin,
    /// allocate, deterministic=True, gradient_strides=None, packed=None, sink=None, o_strides=None, intervals=None)
    ///
    /// Puts the backward pass on a stream of a device and returns None at once. q, k, v and dout are (dtype, address,
    /// shape, strides) as for forward, dout of O's shape. The others are addresses of contiguous tensors: o and lse as
    /// forward wrote them, dlse of lse's shape or None, and dq, dk and dv of q's, k's and v's shapes and dtype, which
    /// are written. These three and o are contiguous unless they have strides.
    ///
    /// Unless deterministic, dq may be added up in any order, where that is faster.
    ///
    /// allocate, packed and intervals are as for forward. sink is None, or the addresses of what it is there and of its
    /// gradient, which is written.
    ///
    /// Addresses are trusted: each must be of such a tensor on the device, in use by nobody
    /// else until the work is done.
    #[pyfunction]
    #[pyo3(signature = (
        device, stream, q, k, v, dout, o, lse, dlse, dq, dk, dv, softmax_scale, window, softcap, sm_margin, allocate,
        deterministic = true, gradient_strides = None, packed = None, sink = None, o_strides = None, intervals = None
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
        window: Window,
        softcap: Option<Number<f64>>,
        sm_margin: Number<i64>,
        allocate: Allocate,
        deterministic: bool,
        gradient_strides: Option<[Option<Four<i64>>; 3]>,
        packed: Option<Packed>,
        sink: Option<(u64, u64)>,
        o_strides: Option<Four<i64>>,
        intervals: Option<Intervals>,
    ) -> PyResult<()> {
        let inputs = [desc(&q)?, desc(&k)?, desc(&v)?];
        let mut strides = gradient_strides.unwrap_or_default().into_iter();
        let call = Gradients {
            forward: Attention {
                inputs,
                qv: None,
                o: output(inputs[0].dtype.default_output(), shape_of_o(&inputs), o_strides),
                sequences: packed.as_ref().map(sequences),
                softmax_scale: softmax_scale.map(|Number(scale)| scale.into()),
                window: window.into(),
                intervals: intervals.map(|(_, (batch, heads, rows, bounds))| [batch, heads, rows, bounds]),
                softcap: softcap.map(|Number(cap)| cap.into()),
                sink: sink.is_some(),
                split_keys: 0,
                sm_margin: sm_margin.0,
                v_transposed: false,
                block_rows: None,
                v_channels: false,
                table: None,
            },
            dout: desc(&dout)?,
            outputs: inputs.map(|x| output(x.dtype, x.shape, strides.next().flatten())),
            deterministic,
        };
        let [cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k] = lists(packed.as_ref());
        let at = [
            ("q", Some(q.1)),
            ("intervals", intervals.map(|(address, _)| address)),
            ("k", Some(k.1)),
            ("v", Some(v.1)),
            ("o", Some(o)),
            ("lse", Some(lse)),
            ("dout", Some(dout.1)),
            ("dlse", dlse),
            ("dq", Some(dq)),
            ("dk", Some(dk)),
            ("dv", Some(dv)),
            ("sink", sink.map(|(sink, _)| sink)),
            ("dsink", sink.map(|(_, dsink)| dsink)),
            cu_seqlens_q,
            cu_seqlens_k,
            seqused_q,
            seqused_k,
        ];
        // Other threads of Python go on meanwhile, as in forward.
        Ok(py.detach(|| call::run(Place::new(device, stream), call, &at, &allocate))?)
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
        let scaling = match (scale, heads_per_scale, block_rows) {
            (Some(Number(scale)), ..) => Scales::given(scale),
            (None, Some(Number(heads)), _) => Scales::Heads(heads),
            (None, None, Some(Number(rows))) => Scales::Blocks(rows),
            (None, None, None) => Scales::Tensor,
        };
        let call = Quantization {
            x: desc(&x)?,
            rotary: rotation.as_ref().map(rotary),
            hadamard_seed: hadamard_seed.map(|Number(seed)| seed),
            scales: scaling,
            layout: layout(transposed),
        };
        let at = [
            ("x", Some(x.1)),
            ("codes", Some(codes)),
            ("scales", scales),
            ("cos", rotation.as_ref().map(|rotation| rotation.0)),
            ("sin", rotation.as_ref().map(|rotation| rotation.1)),
            ("positions", rotation.as_ref().and_then(|rotation| rotation.5)),
        ];
        // Other threads of Python go on meanwhile, as in forward.
        Ok(py.detach(|| call::run(Place::new(device, stream), call, &at, &allocate))?)
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
        let (scaling, layout) = (Scales::Channels, layout(transposed));
        let call = Quantization { x: desc(&x)?, rotary: None, hadamard_seed: None, scales: scaling, layout };
        let at = [("x", Some(x.1)), ("codes", Some(codes)), ("scales", Some(scales)), ("mean", Some(mean))];
        // Other threads of Python go on meanwhile, as in forward.
        Ok(py.detach(|| call::run(Place::new(device, stream), call, &at, &allocate))?)
    }

    /// combine(device, stream, out_partial, lse_partial, o, lse, allocate)
    ///
    /// Puts a merge of partial results on a stream of a device and returns None at once. A tensor is (dtype, address,
    /// shape, strides) as for forward. out_partial is (num_splits, batch, seqlen, heads, head_dim) and o (batch,
    /// seqlen, heads, head_dim); lse_partial and lse are of the same shapes with a head_dim of 1, and of float32. o
    /// and lse are written.
    ///
    /// allocate is as for forward; there is no workspace, so it is not called.
    ///
    /// Addresses are trusted: each must be of such a tensor on the device, in use by nobody
    /// else until the work is done.
    #[pyfunction]
    #[allow(clippy::too_many_arguments, reason = "they come from Python, where a structure would cost more")]
    fn combine(
        py: Python<'_>,
        device: i32,
        stream: Option<usize>,
        out_partial: Parts<'_>,
        lse_partial: Parts<'_>,
        o: Tensor<'_>,
        lse: Tensor<'_>,
        allocate: Allocate,
    ) -> PyResult<()> {
        let call = Combination {
            out_partial: partials(&out_partial)?,
            lse_partial: partials(&lse_partial)?,
            o: desc(&o)?,
            lse: desc(&lse)?,
        };
        let at = [
            ("out_partial", Some(out_partial.1)),
            ("lse_partial", Some(lse_partial.1)),
            ("o", Some(o.1)),
            ("lse", Some(lse.1)),
        ];
        // Other threads of Python go on meanwhile, as in forward.
        Ok(py.detach(|| call::run(Place::new(device, stream), call, &at, &allocate))?)
    }

    fn layout(transposed: bool) -> ValueLayout {
        if transposed { ValueLayout::Transposed } else { ValueLayout::Rows }
    }
}
