//! Attention and quantization on a Hopper GPU, over tensors in its memory.
//!
//! [`Attention::forward`](crate::Attention::forward) copies arrays to the GPU and back. If the tensors are on
//! the GPU already, make a [`Forward`] of the problem once and run it many times: it copies nothing and
//! allocates no device memory.
//!
//! [`Device`] in this module is a GPU. [`crate::Device`] is the place where [`Attention`](crate::Attention) computes:
//! the CPU or a GPU.
//!
//! With memory of this library:
//!
//! ```
//! use fa3::cuda::{Device, Forward, OperationError, Tensors, Workspace};
//! use fa3::half::bf16;
//! use fa3::problem::{Dtype, ProblemSpec, Shape};
//!
//! let attend = || -> Result<Vec<f32>, OperationError> {
//!     // (batch, seqlen, heads, head_dim)
//!     let shape = Shape { batch: 1, seqlen: 1000, heads: 4, head_dim: 128 };
//!     let problem = ProblemSpec::dense(Dtype::Bf16, shape, shape).causal().validate()?;
//!     let device = Device::open(0)?;
//!     let forward = Forward::new(&device, &problem)?;
//!
//!     let (stream, ones) = (device.stream()?, vec![bf16::ONE; 1000 * 4 * 128]);
//!     let x = device.upload(&stream, &ones)?;
//!     let (mut o, mut lse) = (device.alloc(x.bytes())?, device.alloc(4 * 4 * 1000)?);
//!     let mut workspace = Workspace::new(&device, &stream, forward.workspace_bytes())?;
//!     for _ in 0..10 {
//!         let tensors = Tensors::new([("q", &x), ("k", &x), ("v", &x)], [("o", &mut o), ("lse", &mut lse)]);
//!         forward.run(&stream, tensors, &mut workspace)?;
//!     }
//!     Ok(lse.download(&stream)?)
//! };
//! match attend() {
//!     // The last row sees 1000 keys with the score 128 / sqrt(128).
//!     Ok(lse) => assert!((lse[999] - (1000_f32.ln() + 128_f32.sqrt())).abs() < 1e-4),
//!     Err(error) => println!("skipped: {error}"),
//! }
//! ```
//!
//! With memory and a stream of another library, given as plain numbers:
//!
//! ```
//! use fa3::cuda::{Device, DeviceBuffer, Forward, OperationError, Stream, Tensors, Workspace};
//!
//! /// Q, K, V and O, each an address and a number of bytes, and a workspace that was zeroed once.
//! unsafe fn attend(
//!     device: &Device,
//!     forward: &Forward,
//!     stream: usize,
//!     memories: [(u64, usize); 5],
//! ) -> Result<(), OperationError> {
//!     // SAFETY: the caller vouches for the stream and the memories.
//!     let stream = unsafe { Stream::from_raw(device, stream) };
//!     let buffers = memories.map(|(address, bytes)| unsafe { DeviceBuffer::from_raw(device, address, bytes) });
//!     let [q, k, v, mut o, workspace] = buffers;
//!     let mut workspace = unsafe { Workspace::from_buffer(workspace) };
//!     let tensors = Tensors::new([("q", &q), ("k", &k), ("v", &v)], [("o", &mut o)]);
//!     forward.run(&stream, tensors, &mut workspace)
//! }
//! ```
//!
//! Nothing is padded here. Head dimensions are multiples of 8, or of 16 for e4m3, up to 256; in 16 bits without
//! gradients they may be up to 576 for Q and K and up to 512 for V. Rows begin at multiples of 16 bytes, and the last
//! stride is 1.
//!
//! If tensors do not begin at the starts of their buffers, use [`Tensors::input_from`] and [`Tensors::output_from`], or
//! [`Forward::launch`], which takes addresses. With the feature `cudarc`, `Forward::run_slices` takes slices of that
//! crate.
//!
//! A plan depends on no lengths, pages or addresses: the layers of a model and the steps of decoding share one plan,
//! and a captured [`Graph`] runs with other lengths and pages. One [`Workspace`] serves all operations of a stream.
//! [docs/for-engines.md](https://github.com/fa3-rs/fa3/blob/main/docs/for-engines.md) explains it, and
//! `examples/decode_on_device.rs` is a decoding loop.
//!
//! [`Backward`] computes gradients. It is made once from a [`BackwardProblem`], which has the layouts of dO, dQ, dK and
//! dV. [`BackwardOptions`] make it deterministic.
//!
//! [`ForwardOptions`] are the options of [`Forward::with`] and [`CachedForward::with`]. [`CachedForward::new`] uses
//! split-KV ([`SplitKeys::Even`]), as decoding needs it; [`Forward::new`] does not. For a [`Forward`] of a few rows
//! over many keys, request split-KV:
//!
//! ```
//! use fa3::cuda::{Device, Forward, ForwardOptions, OperationError, SplitKeys};
//! use fa3::problem::{Dtype, ProblemSpec, Sequences, Shape};
//!
//! // A token of each of 4 sequences, over 2048 pages of 16 rows, up to 512 of them a sequence
//! let q = Shape { batch: 4, seqlen: 1, heads: 32, head_dim: 128 };
//! let pool = Shape { batch: 2048, seqlen: 16, heads: 8, head_dim: 128 };
//! let spec = ProblemSpec::dense(Dtype::Bf16, q, pool).seqs_k(Sequences::paged(4, 512).used());
//!
//! let options = ForwardOptions::default().split_keys(SplitKeys::Even);
//! let plan = || -> Result<Forward, OperationError> {
//!     Forward::with(&Device::open(0)?, &spec.validate()?, &options)
//! };
//! match plan() {
//!     Ok(forward) => println!("{}", forward.plan()),
//!     Err(error) => println!("skipped: {error}"),
//! }
//! ```
//!
//! [`Quantize`] is the counterpart of [`crate::Quantize`]: made once of a [`QuantizeProblem`], run many times.
//! [`Fp8Forward`] is the counterpart of [`crate::Fp8`], of an [`Fp8Problem`]: codes and scales stay in its workspace.
//! [`Combine`] is the counterpart of [`crate::Combine`], of a [`CombineProblem`]. [`Append`] appends new rows to a
//! cache, of an [`AppendProblem`](crate::problem::AppendProblem), and [`CachedForward`], which
//! [`crate::CachedAttention`] uses, computes attention over the cache afterwards, of a
//! [`CachedProblem`](crate::problem::CachedProblem). [`ForwardTable`] writes the table of packed sequences that the
//! forward passes of a model's layers share. All eight are a [`Compiled`], which takes [`Tensors`] by their names.

pub(crate) mod cached;
mod rows;

use bytemuck::Pod;
use fa3_quant::RopeTable;
use fa3_types::{
    BackwardProblem, CombineProblem, Fp8Problem, IntervalRows, KnownProblem, Problem, QuantizeProblem,
    TensorDesc,
};
use ndarray::{Array1, Array3, Array4, ArrayView, ArrayView1, ArrayView3, ArrayView4, Dimension};

use crate::cpu::inputs::Inputs;
use crate::scales::Descales;
use crate::{Combined, Gradients, Output, OutputGradients, Quantized, Scalar};
use rows::{pad, unpad};

#[cfg(feature = "cudarc")]
pub use fa3_cuda::cudarc;
#[cfg(feature = "cudarc")]
pub use fa3_cuda::host::Element;
pub use fa3_cuda::host::{
    Append, Backward, CachedForward, Combine, Compiled, Device, DeviceBuffer, Event, Forward, ForwardTable,
    Fp8Forward, Function, Graph, HostBuffer, HostError, Memory, Operation, OperationError, PlacementError,
    PlanCache, Quantize, Stream, Tensors, Workspace,
};
pub use fa3_sched::backward::PlanOptions as BackwardOptions;
pub use fa3_sched::forward::{PlanOptions as ForwardOptions, SplitKeys};

/// Copies tensors to the device, padded and contiguous, computes the forward pass, and copies back. The views have the
/// problem's shapes, and O has type `O`: all come from one [`crate::Attention`]. Tensors with scales need no padding.
pub(crate) fn forward<T: Scalar, O: Scalar>(
    device: &Device,
    problem: &KnownProblem,
    Inputs { qkv, qv, sink }: Inputs<'_, T>,
    descales: Option<&Descales>,
) -> Result<Output<O>, OperationError> {
    let padded = problem.padded();
    let forward = Forward::new(device, &padded)?;
    let stream = device.stream()?;
    let [q, k, v] = qkv.map(|x| upload(device, &stream, pad(x).view()));
    let (q, k, v) = (q?, k?, v?);
    let qv = qv.map(|qv| upload(device, &stream, pad(qv).view())).transpose()?;
    let OutputBuffers { mut o, mut lse } = OutputBuffers::new(device, &padded)?;
    let mut workspace = Workspace::new(device, &stream, forward.workspace_bytes())?;
    let lengths = Lengths::upload(device, &stream, problem)?;
    let sink = sink.map(|sink| upload(device, &stream, sink)).transpose()?;
    let tensors = Tensors::new([("q", &q), ("k", &k), ("v", &v)], [("o", &mut o), ("lse", &mut lse)]);
    let intervals = intervals(device, &stream, problem)?;
    let tensors = tensors.input("qv", qv.as_ref()).input("sink", sink.as_ref());
    let tensors = tensors.input("intervals", intervals.as_ref());
    let of = descales.map(|scales| scales.of.each_ref().map(|x| upload(device, &stream, x.view())));
    let mean = descales.and_then(|scales| scales.v_mean.as_ref());
    let mean = mean.map(|mean| upload(device, &stream, mean.view())).transpose()?;
    let scales = of.map(|[q, k, v]| Ok::<_, HostError>([q?, k?, v?])).transpose()?;
    let named = ["q_descale", "k_descale", "v_descale"].into_iter().zip(scales.iter().flatten());
    let tensors = named.fold(tensors, |tensors, (name, scales)| tensors.input(name, scales));
    let tensors = tensors.input("v_mean", mean.as_ref());
    forward.run(&stream, lengths.beside(tensors), &mut workspace)?;
    let (o, lse) = OutputBuffers { o, lse }.download(&stream, &padded)?;
    Ok(Output::of(problem, unpad(o, problem.head_dim_v()), lse))
}

/// Computes the forward pass in 8 bits. Tables and positions of Q and of K belong to the problem, and the lengths of
/// its codes are known.
pub(crate) fn fp8<T: Scalar>(
    device: &Device,
    (problem, codes): (&Fp8Problem, &KnownProblem),
    qkv: [ArrayView4<'_, T>; 3],
    sink: Option<ArrayView1<'_, f32>>,
    table: Option<&RopeTable>,
    listed: [Option<&[i32]>; 2],
) -> Result<Output<T>, OperationError> {
    let (forward, attention) = (Fp8Forward::new(device, problem)?, problem.attention());
    let stream = device.stream()?;
    let [q, k, v] = qkv.map(|x| upload(device, &stream, x));
    let (q, k, v) = (q?, k?, v?);
    let OutputBuffers { mut o, mut lse } = OutputBuffers::new(device, attention)?;
    let mut workspace = Workspace::new(device, &stream, forward.workspace_bytes())?;
    let (cos, sin) = tables(device, &stream, table)?;
    let [of_q, of_k] = listed.map(|each| list(device, &stream, each));
    let (of_q, of_k) = (of_q?, of_k?);
    let sink = sink.map(|sink| upload(device, &stream, sink)).transpose()?;
    let tensors = Tensors::new([("q", &q), ("k", &k), ("v", &v)], [("o", &mut o), ("lse", &mut lse)]);
    let tensors = tensors.input("cos", cos.as_ref()).input("sin", sin.as_ref()).input("sink", sink.as_ref());
    let tensors = tensors.input("q_positions", of_q.as_ref()).input("k_positions", of_k.as_ref());
    let lengths = Lengths::upload(device, &stream, codes)?;
    forward.run(&stream, lengths.beside(tensors), &mut workspace)?;
    let (o, lse) = OutputBuffers { o, lse }.download(&stream, attention)?;
    Ok(Output::of(codes, o, lse))
}

/// The device arrays of lengths that the programs of a problem take: `cu_seqlens` and `seqused` of Q and of K.
#[derive(Debug)]
pub struct Lengths([Option<DeviceBuffer>; 4]);

impl Lengths {
    /// Copies the lengths of a problem to newly allocated device memory.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn upload(device: &Device, stream: &Stream, problem: &KnownProblem) -> Result<Lengths, HostError> {
        let array = |is_there: bool, values: Vec<i32>| {
            is_there.then(|| upload(device, stream, ArrayView1::from(&values))).transpose()
        };
        let (q, k) = (problem.seqs_q(), problem.seqs_k());
        Ok(Lengths([
            array(q.is_packed(), problem.rows_q().cu_seqlens())?,
            array(k.is_packed(), problem.rows_k().cu_seqlens())?,
            array(q.has_used(), problem.rows_q().seqused())?,
            array(k.has_used(), problem.rows_k().seqused())?,
        ]))
    }

    /// Adds these arrays to the tensors of a call.
    #[must_use]
    pub fn beside<'a>(&'a self, tensors: Tensors<'a>) -> Tensors<'a> {
        let names = ["cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"];
        names.into_iter().zip(&self.0).fold(tensors, |all, (name, array)| all.input(name, array.as_ref()))
    }
}

/// Device memory for O and LSE.
struct OutputBuffers {
    o: DeviceBuffer,
    lse: DeviceBuffer,
}

impl OutputBuffers {
    /// Allocates the buffers for a problem.
    fn new(device: &Device, problem: &Problem) -> Result<OutputBuffers, HostError> {
        Ok(OutputBuffers {
            o: device.alloc(problem.o().extent_bytes().0 as usize)?,
            lse: device.alloc(problem.lse_shape().iter().product::<usize>() * size_of::<f32>())?,
        })
    }

    /// Downloads the written results.
    fn download<T: Scalar>(
        &self,
        stream: &Stream,
        problem: &Problem,
    ) -> Result<(Array4<T>, Array3<f32>), HostError> {
        let (o, lse) = (self.o.download(stream)?, self.lse.download(stream)?);
        let o = Array4::from_shape_vec(problem.o().shape.dims(), o).expect("one element each");
        Ok((o, Array3::from_shape_vec(problem.lse_shape(), lse).expect("one element each")))
    }
}

/// Copies tensors to the device, padded and contiguous, computes the backward pass, and copies back. All arrays have
/// the problem's shapes: they come from one [`crate::Attention`], whose lengths are `known`.
pub(crate) fn backward<T: Scalar>(
    device: &Device,
    (problem, known): (&BackwardProblem, &KnownProblem),
    qkv: [ArrayView4<'_, T>; 3],
    sink: Option<ArrayView1<'_, f32>>,
    output: &Output<T>,
    of: OutputGradients<'_, T>,
    deterministic: bool,
) -> Result<Gradients<T>, OperationError> {
    let options = BackwardOptions::default();
    let options = if deterministic { options.deterministic() } else { options };
    let padded = problem.padded();
    let backward = Backward::with(device, &padded, &options)?;
    let stream = device.stream()?;
    let [q, k, v] = qkv.map(|x| upload(device, &stream, pad(x).view()));
    let [o, dout] = [output.o.view(), of.dout].map(|x| upload(device, &stream, pad(x).view()));
    let (q, k, v, o, dout) = (q?, k?, v?, o?, dout?);
    let lse = upload(device, &stream, output.lse.view())?;
    let dlse = of.dlse.map(|dlse| upload(device, &stream, dlse)).transpose()?;
    let sink = sink.map(|sink| upload(device, &stream, sink)).transpose()?;
    let mut dsink = sink.as_ref().map(|sink| device.alloc(sink.bytes())).transpose()?;
    let descs = [padded.dq(), padded.dk(), padded.dv()];
    let [dq, dk, dv] = descs.map(|x| device.alloc(x.extent_bytes().0 as usize));
    let (mut dq, mut dk, mut dv) = (dq?, dk?, dv?);
    let mut workspace = Workspace::new(device, &stream, backward.workspace_bytes())?;
    let lengths = Lengths::upload(device, &stream, known)?;
    let intervals = intervals(device, &stream, known)?;
    let tensors = Tensors::new(
        [("q", &q), ("k", &k), ("v", &v), ("o", &o), ("lse", &lse), ("dout", &dout)],
        [("dq", &mut dq), ("dk", &mut dk), ("dv", &mut dv)],
    )
    .input("dlse", dlse.as_ref())
    .input("intervals", intervals.as_ref())
    .input("sink", sink.as_ref())
    .output("dsink", dsink.as_mut());
    backward.run(&stream, lengths.beside(tensors), &mut workspace)?;
    let [dq, dk, dv] = [dq.download(&stream)?, dk.download(&stream)?, dv.download(&stream)?];
    let array = |x: &TensorDesc, elements, head_dim| {
        unpad(Array4::from_shape_vec(x.shape.dims(), elements).expect("one element each"), head_dim)
    };
    let ([q, k, v], forward) = (descs, problem.forward());
    let (head_dim, head_dim_v) = (forward.head_dim(), forward.head_dim_v());
    let gradients = [array(q, dq, head_dim), array(k, dk, head_dim), array(v, dv, head_dim_v)];
    let dsink = dsink.map(|dsink| dsink.download(&stream)).transpose()?.map(Array1::from_vec);
    Ok(Gradients { dsink, ..Gradients::new(gradients) })
}

/// Copies a contiguous tensor to the device, quantizes it, and copies back. The view has the problem's shape, and
/// table, positions and `cu_seqlens` belong to the problem: all come from one [`crate::Quantize`].
pub(crate) fn quantize<T: Scalar>(
    device: &Device,
    problem: &QuantizeProblem,
    x: ArrayView4<'_, T>,
    table: Option<&RopeTable>,
    [listed, packed]: [Option<&[i32]>; 2],
) -> Result<Quantized, OperationError> {
    let quantize = Quantize::new(device, problem)?;
    let stream = device.stream()?;
    let x = upload(device, &stream, x)?;
    let mut codes = device.alloc(problem.codes_bytes().0 as usize)?;
    let numbers = |shape: Option<[usize; 3]>| {
        shape.map(|shape| device.alloc(size_of::<f32>() * shape.iter().product::<usize>())).transpose()
    };
    let (mut scales, mut mean) = (numbers(problem.scales_shape())?, numbers(problem.mean_shape())?);
    let mut workspace = Workspace::new(device, &stream, quantize.workspace_bytes())?;
    let (cos, sin) = tables(device, &stream, table)?;
    let (positions, ends) = (list(device, &stream, listed)?, list(device, &stream, packed)?);
    let tensors = Tensors::new([("x", &x)], [("codes", &mut codes)]);
    let tensors = tensors.output("scales", scales.as_mut()).output("mean", mean.as_mut());
    let tensors = tensors.input("cos", cos.as_ref()).input("sin", sin.as_ref());
    let tensors = tensors.input("positions", positions.as_ref()).input("cu_seqlens", ends.as_ref());
    quantize.run(&stream, tensors, &mut workspace)?;
    let [scales, mean] =
        [scales, mean].map(|numbers| numbers.map_or(Ok(Vec::new()), |numbers| numbers.download(&stream)));
    Ok(Quantized::new(problem, codes.download(&stream)?, scales?, mean?))
}

/// Copies partial results to the device, reduces them, and copies back. There is at least one part, and all have the
/// problem's shapes: they come from one [`crate::Combine`].
pub(crate) fn combine<T: Scalar, O: Scalar>(
    device: &Device,
    problem: &CombineProblem,
    out_partial: &[ArrayView4<'_, T>],
    lse_partial: &[ArrayView3<'_, f32>],
) -> Result<Combined<O>, OperationError> {
    let combine = Combine::new(device, problem)?;
    let stream = device.stream()?;
    let out_partial = upload_parts(device, &stream, out_partial)?;
    let lse_partial = upload_parts(device, &stream, lse_partial)?;
    let [o, lse] = [problem.o(), problem.lse()].map(|x| device.alloc(x.extent_bytes().0 as usize));
    let (mut o, mut lse) = (o?, lse?);
    let mut workspace = Workspace::new(device, &stream, combine.workspace_bytes())?;
    let tensors = Tensors::new(
        [("out_partial", &out_partial), ("lse_partial", &lse_partial)],
        [("o", &mut o), ("lse", &mut lse)],
    );
    combine.run(&stream, tensors, &mut workspace)?;
    Ok(Combined::new(problem, o.download(&stream)?, lse.download(&stream)?))
}

/// Uploads cosines and sines, if any.
fn tables(
    device: &Device,
    stream: &Stream,
    table: Option<&RopeTable>,
) -> Result<(Option<DeviceBuffer>, Option<DeviceBuffer>), HostError> {
    let Some(table) = table else { return Ok((None, None)) };
    let [cos, sin] = [table.cos(), table.sin()].map(|x| upload(device, stream, x.view()));
    Ok((Some(cos?), Some(sin?)))
}

/// Uploads the bounds of intervals, if the mask is one of intervals.
fn intervals(
    device: &Device,
    stream: &Stream,
    problem: &KnownProblem,
) -> Result<Option<DeviceBuffer>, HostError> {
    list(device, stream, problem.intervals().map(IntervalRows::bounds))
}

/// Uploads a list of positions or of `cu_seqlens`, if any.
fn list(device: &Device, stream: &Stream, listed: Option<&[i32]>) -> Result<Option<DeviceBuffer>, HostError> {
    listed.map(|each| upload(device, stream, ArrayView1::from(each))).transpose()
}

/// Uploads the elements in order, contiguous.
fn upload<T: Pod, D: Dimension>(
    device: &Device,
    stream: &Stream,
    x: ArrayView<'_, T, D>,
) -> Result<DeviceBuffer, HostError> {
    let x = x.as_standard_layout();
    device.upload(stream, x.as_slice().expect("the standard layout has no gaps"))
}

/// Uploads parts of one shape, one after the other.
fn upload_parts<T: Pod, D: Dimension>(
    device: &Device,
    stream: &Stream,
    parts: &[ArrayView<'_, T, D>],
) -> Result<DeviceBuffer, HostError> {
    let bytes = parts.first().map_or(0, |part| part.len() * size_of::<T>());
    let mut buffer = device.alloc(parts.len() * bytes)?;
    for (index, part) in parts.iter().enumerate() {
        let part = part.as_standard_layout();
        buffer.upload_at(stream, index * bytes, part.as_slice().expect("the standard layout has no gaps"))?;
    }
    Ok(buffer)
}
