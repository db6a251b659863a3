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
//! gradients they may be up to 576 for Q and K and up to 512 for V, and up to 512 for e4m3 K and V beside 16-bit Q.
//! Rows begin at multiples of 16 bytes, and the last stride is 1.
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
mod inputs;
mod rows;
pub(crate) mod sparse;

use fa3_quant::RopeTable;
use fa3_types::{
    BackwardProblem, CombineProblem, Fp8Problem, KnownProblem, Problem, QuantizeProblem, ScoreTable,
};
use ndarray::{Array1, Array3, Array4, ArrayView1, ArrayView3, ArrayView4, Axis};

use crate::cpu::queries::Queries;
use crate::results::Results;
use crate::scales::Descales;
use crate::{Combined, Gradients, Output, OutputGradients, Quantized, Scalar};
use inputs::DeviceInputs;
use rows::unpad;

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
/// problem's shapes: all come from one [`crate::Attention`]. Tensors with scales need no padding.
pub(crate) fn forward<T: Scalar>(
    device: &Device,
    problem: &KnownProblem,
    Queries { q, qv, sink }: Queries<'_, T>,
    [k, v]: [ArrayView4<'_, T>; 2],
    descales: Option<&Descales>,
    results: Results<'_, T>,
) -> Result<(), OperationError> {
    let padded = problem.padded();
    let forward = Forward::new(device, &padded)?;
    let mut inputs = DeviceInputs::new(device)?;
    inputs.add_padded([("q", q), ("k", k), ("v", v)].into_iter().chain(qv.map(|qv| ("qv", qv))))?;
    inputs.add("sink", sink)?;
    inputs.add_data_of(problem)?;
    if let Some(Descales { of, v_mean }) = descales {
        for (name, scales) in ["q_descale", "k_descale", "v_descale"].into_iter().zip(of) {
            inputs.add(name, [scales.view()])?;
        }
        inputs.add("v_mean", v_mean.as_ref().map(|mean| mean.view()))?;
    }
    Ok(attend(device, &forward, &inputs, &padded)?.download_to(&inputs, &padded, results)?)
}

/// Computes the forward pass in 8 bits. `codes` is the problem of the quantized tensors. All arguments belong to one
/// [`crate::Fp8`].
pub(crate) fn fp8<T: Scalar>(
    device: &Device,
    (problem, codes): (&Fp8Problem, &KnownProblem),
    qkv: [ArrayView4<'_, T>; 3],
    sink: Option<ArrayView1<'_, f32>>,
    table: Option<&RopeTable>,
    [of_q, of_k]: [Option<&[i32]>; 2],
) -> Result<Output<T>, OperationError> {
    let forward = Fp8Forward::new(device, problem)?;
    let mut inputs = DeviceInputs::new(device)?;
    QKV.into_iter().zip(qkv).try_for_each(|(name, x)| inputs.add(name, [x]))?;
    inputs.add_tables(["cos", "sin"], table)?;
    inputs.add_lists([("q_positions", of_q), ("k_positions", of_k)])?;
    inputs.add("sink", sink)?;
    inputs.add_data_of(codes)?;
    let outputs = attend(device, &forward, &inputs, problem.attention())?;
    let (o, lse) = outputs.download(&inputs, problem.attention())?;
    Ok(Output::of(codes, o, lse))
}

const QKV: [&str; 3] = ["q", "k", "v"];

/// Runs a forward pass of `problem`.
fn attend<P>(
    device: &Device,
    forward: &Compiled<P>,
    inputs: &DeviceInputs<'_>,
    problem: &Problem,
) -> Result<OutputBuffers, OperationError> {
    let mut outputs = OutputBuffers::new(device, problem)?;
    inputs.run(forward, outputs.beside(inputs.tensors()))?;
    Ok(outputs)
}

/// Computes attention over a cache into arrays, on the device. `add` adds the inputs, with padded rows. Keys are split
/// where Q has few rows.
fn over_cache<T: Scalar>(
    device: &Device,
    problem: &Problem,
    add: impl FnOnce(&mut DeviceInputs<'_>) -> Result<(), HostError>,
    results: Results<'_, T>,
) -> Result<(), OperationError> {
    let padded = problem.padded();
    let options = ForwardOptions::default().split_keys(SplitKeys::Even);
    let forward = Forward::with(device, &padded, &options)?;
    let mut inputs = DeviceInputs::new(device)?;
    add(&mut inputs)?;
    Ok(attend(device, &forward, &inputs, &padded)?.download_to(&inputs, &padded, results)?)
}

/// The lengths of a problem's sequences in device memory: `cu_seqlens` of Q and K that are packed, and `seqused` of Q
/// and K that are used in part.
#[derive(Debug)]
pub struct Lengths(Vec<(&'static str, DeviceBuffer)>);

impl Lengths {
    /// Copies the lengths of a problem to newly allocated device memory.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn upload(device: &Device, stream: &Stream, problem: &KnownProblem) -> Result<Lengths, HostError> {
        let (q, k) = (problem.seqs_q(), problem.seqs_k());
        let lists = [
            ("cu_seqlens_q", q.is_packed().then(|| problem.rows_q().cu_seqlens())),
            ("cu_seqlens_k", k.is_packed().then(|| problem.rows_k().cu_seqlens())),
            ("seqused_q", q.has_used().then(|| problem.rows_q().seqused())),
            ("seqused_k", k.has_used().then(|| problem.rows_k().seqused())),
        ];
        let given = lists.into_iter().filter_map(|(name, list)| Some((name, list?)));
        given
            .map(|(name, list)| Ok((name, device.upload(stream, &list)?)))
            .collect::<Result<_, _>>()
            .map(Lengths)
    }

    /// Adds these arrays to the tensors of a call.
    #[must_use]
    pub fn beside<'a>(&'a self, tensors: Tensors<'a>) -> Tensors<'a> {
        self.0.iter().fold(tensors, |tensors, (name, list)| tensors.input(name, list))
    }
}

/// Device memory for the results of a forward pass.
struct OutputBuffers {
    o: DeviceBuffer,
    lse: DeviceBuffer,
    /// The largest scores, if they are a result.
    max_logits: Option<DeviceBuffer>,
}

impl OutputBuffers {
    /// Allocates the buffers for a problem.
    fn new(device: &Device, problem: &Problem) -> Result<OutputBuffers, HostError> {
        let of_rows = || device.alloc(problem.lse_shape().iter().product::<usize>() * size_of::<f32>());
        Ok(OutputBuffers {
            o: device.alloc(problem.o().extent_bytes().0 as usize)?,
            lse: of_rows()?,
            max_logits: problem.has_max_logits().then(of_rows).transpose()?,
        })
    }

    /// Adds the buffers to the tensors of a call.
    fn beside<'a>(&'a mut self, tensors: Tensors<'a>) -> Tensors<'a> {
        let tensors = tensors.output("o", &mut self.o).output("lse", &mut self.lse);
        tensors.output("max_logits", self.max_logits.as_mut())
    }

    /// Downloads the written results to arrays, without the padding of rows of O.
    fn download_to<T: Scalar>(
        &self,
        inputs: &DeviceInputs<'_>,
        problem: &Problem,
        Results { o, mut lse, max_logits }: Results<'_, T>,
    ) -> Result<(), HostError> {
        let (of_o, of_lse) = self.download::<T::Output>(inputs, problem)?;
        unpad(of_o, o.len_of(Axis(3))).assign_to(o);
        lse.assign(&of_lse);
        if let Some((to, from)) = max_logits.zip(self.max_logits.as_ref()) {
            inputs.download::<f32, _>(from, problem.lse_shape())?.assign_to(to);
        }
        Ok(())
    }

    /// Downloads O and LSE.
    fn download<T: Scalar>(
        &self,
        inputs: &DeviceInputs<'_>,
        problem: &Problem,
    ) -> Result<(Array4<T>, Array3<f32>), HostError> {
        let o = inputs.download(&self.o, problem.o().shape.dims())?;
        Ok((o, inputs.download(&self.lse, problem.lse_shape())?))
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
    let mut inputs = DeviceInputs::new(device)?;
    inputs.add_padded(QKV.into_iter().zip(qkv).chain([("o", output.o.view()), ("dout", of.dout)]))?;
    inputs.add("lse", [output.lse.view()])?;
    inputs.add("dlse", of.dlse)?;
    inputs.add("sink", sink)?;
    inputs.add_data_of(known)?;
    let descs = [padded.dq(), padded.dk(), padded.dv()];
    let [dq, dk, dv] = descs.map(|x| device.alloc(x.extent_bytes().0 as usize));
    let mut buffers = [dq?, dk?, dv?];
    let mut dsink = sink.map(|sink| device.alloc(size_of::<f32>() * sink.len())).transpose()?;
    let outputs = ["dq", "dk", "dv"].into_iter().zip(&mut buffers);
    let tensors = outputs.fold(inputs.tensors(), |tensors, (name, buffer)| tensors.output(name, buffer));
    let mut dtables = known.score_zeros::<f32>();
    let of_tables = |dtable: &Vec<f32>| device.alloc(size_of::<f32>() * dtable.len());
    let mut of_tables = dtables.iter().map(of_tables).collect::<Result<Vec<_>, _>>()?;
    let learned = ScoreTable::OF_GRADIENTS.into_iter().zip(&mut of_tables).zip(&dtables);
    let learned = learned.filter(|(_, dtable)| !dtable.is_empty()).map(|(output, _)| output);
    let tensors = learned.fold(tensors, |tensors, (name, buffer)| tensors.output(name, buffer));
    inputs.run(&backward, tensors.output("dsink", dsink.as_mut()))?;
    for (dtable, buffer) in dtables.iter_mut().zip(&of_tables).filter(|(dtable, _)| !dtable.is_empty()) {
        *dtable = buffer.download(&inputs.stream)?;
    }
    let forward = problem.forward();
    let head_dims = [forward.head_dim(), forward.head_dim(), forward.head_dim_v()];
    let [dq, dk, dv] = std::array::from_fn(|at| {
        let gradient = inputs.download(&buffers[at], descs[at].shape.dims())?;
        Ok::<_, HostError>(unpad(gradient, head_dims[at]))
    });
    let dsink = dsink.map(|dsink| dsink.download(&inputs.stream)).transpose()?.map(Array1::from_vec);
    Ok(Gradients { dsink, dtables, ..Gradients::new([dq?, dk?, dv?]) })
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
    let mut inputs = DeviceInputs::new(device)?;
    inputs.add("x", [x])?;
    inputs.add_tables(["cos", "sin"], table)?;
    inputs.add_lists([("positions", listed), ("cu_seqlens", packed)])?;
    let mut codes = device.alloc(problem.codes_bytes().0 as usize)?;
    let numbers = |shape: Option<[usize; 3]>| {
        shape.map(|shape| device.alloc(size_of::<f32>() * shape.iter().product::<usize>())).transpose()
    };
    let (mut scales, mut mean) = (numbers(problem.scales_shape())?, numbers(problem.mean_shape())?);
    let tensors = inputs.tensors().output("codes", &mut codes);
    inputs.run(&quantize, tensors.output("scales", scales.as_mut()).output("mean", mean.as_mut()))?;
    let [scales, mean] = [scales, mean]
        .map(|numbers| numbers.map_or(Ok(Vec::new()), |numbers| numbers.download(&inputs.stream)));
    Ok(Quantized::new(problem, codes.download(&inputs.stream)?, scales?, mean?))
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
    let mut inputs = DeviceInputs::new(device)?;
    inputs.add_parts("out_partial", out_partial)?;
    inputs.add_parts("lse_partial", lse_partial)?;
    let [o, lse] = [problem.o(), problem.lse()].map(|x| device.alloc(x.extent_bytes().0 as usize));
    let (mut o, mut lse) = (o?, lse?);
    inputs.run(&combine, inputs.tensors().output("o", &mut o).output("lse", &mut lse))?;
    Ok(Combined::new(problem, o.download(&inputs.stream)?, lse.download(&inputs.stream)?))
}
