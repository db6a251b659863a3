//! The operations of this library.

use std::num::NonZeroU32;

use fa3_ir::Program;
use fa3_sched::{DeviceLimits, append, backward, cached, combine, forward, fp8, quantize};
use fa3_types::{
    AppendProblem, BackwardProblem, CachedProblem, CombineProblem, Fp8Problem, Problem, QuantizeProblem,
};

use super::{Compiled, Operation, OperationError};
use crate::kernels::{self, Spec};

/// The forward pass: one launch, or two if a kernel transposes V, lists packed sequences or reduces splits.
///
/// ```text
/// O = softmax(mask(cap(softmax_scale · Q Kᵀ))) V        LSE = ln Σ_k exp(score)
/// ```
///
/// Its tensors are `q`, `k`, `v` and `o`. If `lse` is given, f32 of [`Problem::lse_shape`], it is written. A problem
/// with [sinks](Problem::has_sink) has `sink`, f32 (heads_q). An e4m3 problem has `q_descale`, `k_descale` and
/// `v_descale`, f32 of [`Problem::descale_shapes`]: x = descale · code. Scales of heads are not negative, and default
/// to 1. Scales of blocks must be given, positive and normal. Scales of channels must be given, not negative, with the
/// means `v_mean`, f32 of [`Problem::v_mean_shape`]: V = mean + descale · code. Tensors other than Q, K, V and O are
/// contiguous.
///
/// A problem of packed sequences has `cu_seqlens_q` and `cu_seqlens_k`, i32 (sequences + 1). With
/// [`given_table`](forward::PlanOptions::given_table) it has `table` in their place, as
/// [`ForwardTable`](super::ForwardTable) writes it. [`Compiled::tensors`] lists the further tensors of other problems.
///
/// ```
/// use fa3_cuda::host::{Device, Forward, OperationError, Tensors, Workspace};
/// use fa3_types::{Dtype, ProblemSpec, Shape};
///
/// let run = || -> Result<Vec<f32>, OperationError> {
///     // (batch, seqlen, heads, head_dim); four query heads share a key/value head
///     let q = Shape { batch: 2, seqlen: 512, heads: 8, head_dim: 128 };
///     let kv = Shape { heads: 2, ..q };
///     let problem = ProblemSpec::dense(Dtype::Bf16, q, kv).causal().validate()?;
///
///     let device = Device::open(0)?;
///     let forward = Forward::new(&device, &problem)?;
///
///     let stream = device.stream()?;
///     let zeros = |bytes: u64| -> Result<_, OperationError> {
///         let mut buffer = device.alloc(bytes as usize)?;
///         buffer.fill(&stream, 0)?;
///         Ok(buffer)
///     };
///     let [q, k, v, o] = [problem.q(), problem.k(), problem.v(), problem.o()].map(|x| zeros(x.extent_bytes().0));
///     let (q, k, v, mut o, mut lse) = (q?, k?, v?, o?, zeros(4 * 2 * 8 * 512)?);
///     let mut workspace = Workspace::new(&device, &stream, forward.workspace_bytes())?;
///     for _ in 0..3 {
///         let tensors = Tensors::new([("q", &q), ("k", &k), ("v", &v)], [("o", &mut o), ("lse", &mut lse)]);
///         forward.run(&stream, tensors, &mut workspace)?;
///     }
///     Ok(lse.download(&stream)?)
/// };
/// match run() {
///     Ok(lse) => assert!((lse[511] - 512_f32.ln()).abs() < 1e-4), // the last row sees 512 keys with score 0
///     Err(error) => println!("skipped: {error}"),
/// }
/// ```
pub type Forward = Compiled<forward::Plan>;

impl Operation for forward::Plan {
    type Problem = Problem;
    type Options = forward::PlanOptions;

    fn plan(
        problem: &Problem,
        limits: &DeviceLimits,
        options: &forward::PlanOptions,
    ) -> Result<Self, OperationError> {
        Ok(forward::Plan::with(problem, limits, options)?)
    }

    fn program(&self) -> Program<Spec> {
        kernels::fwd::program(self)
    }

    fn sms(options: &forward::PlanOptions) -> Option<NonZeroU32> {
        options.sms
    }
}

/// The backward pass: two or three launches; one more for sinks, two more for packed sequences, three for intervals.
///
/// ```text
/// P = exp(S - LSE)    dP = dO Vᵀ    dS = P ∘ (dP - D + dLSE)    dV = Pᵀ dO    dQ = scale · dS K    dK = scale · dSᵀ Q
/// ```
///
/// dK and dV have the same bits in every run. So has dQ if the plan is
/// [deterministic](fa3_sched::backward::PlanOptions::deterministic), or if tiles do not add to dQ in memory. A
/// sequence's gradients do not depend on the other sequences of the batch.
///
/// Its tensors are `q`, `k` and `v`; `o` and `lse` as the forward pass wrote them; `dout`, the gradient of O; `dlse`,
/// the gradient of LSE, which defaults to 0; and the outputs `dq`, `dk` and `dv`. `lse` and `dlse` are f32 and
/// contiguous. A problem with sinks also has `sink`, and the output `dsink`: f32 (heads_q).
///
/// Its workspace has counters and 8 bytes for each row of a head of Q. If tiles add to dQ in memory, it also has 4
/// bytes for each element of the accumulators of dQ, whose rows and columns are padded to whole blocks of the plan's
/// tile.
///
/// ```
/// use fa3_cuda::host::{Backward, Device, OperationError, Tensors, Workspace};
/// use fa3_types::{BackwardSpec, Dtype, ProblemSpec, Shape};
///
/// let run = || -> Result<Vec<half::bf16>, OperationError> {
///     let shape = Shape { batch: 2, seqlen: 512, heads: 8, head_dim: 128 };
///     let forward = ProblemSpec::dense(Dtype::Bf16, shape, shape).causal();
///     let problem = BackwardSpec::contiguous(forward).validate()?;
///
///     let device = Device::open(0)?;
///     let backward = Backward::new(&device, &problem)?;
///     let stream = device.stream()?;
///     let mut workspace = Workspace::new(&device, &stream, backward.workspace_bytes())?;
///     let mut memory = Vec::new();
///     for (name, bytes) in backward.tensors() {
///         let mut buffer = device.alloc(bytes as usize)?;
///         buffer.fill(&stream, 0)?;
///         memory.push((name, buffer));
///     }
///     let is_gradient = |name: &str| ["dq", "dk", "dv"].contains(&name);
///     let tensors = memory.iter_mut().fold(Tensors::default(), |tensors, (name, buffer)| match is_gradient(name) {
///         true => tensors.output(name, buffer),
///         false => tensors.input(name, &*buffer),
///     });
///     backward.run(&stream, tensors, &mut workspace)?;
///     let (_, dv) = memory.pop().expect("dV is the last one");
///     Ok(dv.download(&stream)?)
/// };
/// match run() {
///     Ok(dv) => assert!(dv.iter().all(|x| x.to_f32() == 0.0)), // the gradient of O was 0
///     Err(error) => println!("skipped: {error}"),
/// }
/// ```
pub type Backward = Compiled<backward::Plan>;

impl Operation for backward::Plan {
    type Problem = BackwardProblem;
    type Options = backward::PlanOptions;

    fn plan(
        problem: &BackwardProblem,
        limits: &DeviceLimits,
        options: &backward::PlanOptions,
    ) -> Result<Self, OperationError> {
        Ok(backward::Plan::with(problem, limits, options)?)
    }

    fn program(&self) -> Program<Spec> {
        kernels::bwd::program(self)
    }

    fn sms(options: &backward::PlanOptions) -> Option<NonZeroU32> {
        options.sms
    }
}

/// Attention of f16 or bf16 tensors in 8 bits: kernels quantize Q, K and V to codes in the workspace, and the forward
/// pass reads the codes. If the problem has signs, Q and K are first multiplied by a Hadamard matrix.
///
/// Its tensors are `q`, `k`, `v`, `o`, and `lse` as for [`Forward`]. A rotation has `cos` and `sin`, f32 (table_rows,
/// rotary_dim / 2), and for listed positions `q_positions` and `k_positions`, i32 (batch, seqlen). Packed sequences
/// have `cu_seqlens_q` and `cu_seqlens_k`, i32 (sequences + 1). Tensors other than Q, K, V and O are contiguous.
///
/// ```
/// use fa3_cuda::host::{Device, Fp8Forward, OperationError, Tensors, Workspace};
/// use fa3_types::{Dtype, Fp8Spec, ProblemSpec, Shape};
///
/// let run = || -> Result<Vec<u16>, OperationError> {
///     let shape = Shape { batch: 1, seqlen: 300, heads: 2, head_dim: 64 };
///     let attention = ProblemSpec::dense(Dtype::Bf16, shape, shape).causal();
///     let problem = Fp8Spec::new(attention).validate().expect("bf16 has codes");
///
///     let device = Device::open(0)?;
///     let forward = Fp8Forward::new(&device, &problem)?;
///     let stream = device.stream()?;
///     let mut workspace = Workspace::new(&device, &stream, forward.workspace_bytes())?;
///     // 1 in bf16
///     let x = device.upload(&stream, &[0x3F80_u16; 300 * 2 * 64])?;
///     let mut o = device.alloc(x.bytes())?;
///     let tensors = Tensors::new([("q", &x), ("k", &x), ("v", &x)], [("o", &mut o)]);
///     forward.run(&stream, tensors, &mut workspace)?;
///     Ok(o.download(&stream)?)
/// };
/// match run() {
///     Ok(o) => assert_eq!(o, [0x3F80; 300 * 2 * 64]), // the mean of ones
///     Err(error) => println!("skipped: {error}"),
/// }
/// ```
pub type Fp8Forward = Compiled<fp8::Plan>;

impl Operation for fp8::Plan {
    type Problem = Fp8Problem;
    type Options = ();

    fn plan(problem: &Fp8Problem, limits: &DeviceLimits, _options: &()) -> Result<Self, OperationError> {
        Ok(fp8::Plan::new(problem, limits)?)
    }

    fn program(&self) -> Program<Spec> {
        kernels::fp8::program(self)
    }
}

/// Quantization to e4m3, with rotary embedding and incoherent processing before it: one launch, or three launches with
/// a workspace if scales take another pass. The workspace needs no initialisation.
///
/// ```text
/// y = x, rotated by its position, times M       M = diag(±1) · Hadamard
/// codes = e4m3(y / scale)                       scale = max |y| / 448 of each block of rows of a head
/// ```
///
/// With [`QuantizeSpec::transposed`](fa3_types::QuantizeSpec::transposed) codes are in the layout that products read.
/// [`Scaling`](fa3_types::Scaling) lists the other granularities of scales: heads, the tensor, or channels, whose means
/// are subtracted first. These granularities take another pass over the tensor.
///
/// Its tensors are `x`, `codes` in the problem's layout, and depending on the problem: `scales`, f32 of
/// [`QuantizeProblem::scales_shape`]; `mean`, f32 (batch, heads, head_dim), the means of channels; `cos` and `sin`, f32
/// (table_rows, rotary_dim / 2); `positions`, i32 (batch, seqlen); for packed sequences `cu_seqlens`, i32 (sequences +
/// 1). All tensors except `x` and `codes` are contiguous.
///
/// ```
/// use fa3_cuda::host::{Device, OperationError, Quantize, Tensors, Workspace};
/// use fa3_types::{Dtype, QuantizeSpec, Shape};
///
/// let run = || -> Result<Vec<f32>, OperationError> {
///     // (batch, seqlen, heads, head_dim), with a scale for each 128 rows of a head
///     let shape = Shape { batch: 1, seqlen: 1000, heads: 2, head_dim: 64 };
///     let problem = QuantizeSpec::contiguous(Dtype::Bf16, shape).validate()?;
///
///     let device = Device::open(0)?;
///     let quantize = Quantize::new(&device, &problem)?;
///
///     let stream = device.stream()?;
///     let mut x = device.alloc(problem.x().extent_bytes().0 as usize)?;
///     x.fill(&stream, 0)?;
///     let (mut codes, mut scales) = (device.alloc(1000 * 2 * 64)?, device.alloc(4 * 2 * 8)?);
///     let mut workspace = Workspace::new(&device, &stream, quantize.workspace_bytes())?;
///     let tensors = Tensors::new([("x", &x)], [("codes", &mut codes), ("scales", &mut scales)]);
///     quantize.run(&stream, tensors, &mut workspace)?;
///     Ok(scales.download(&stream)?)
/// };
/// match run() {
///     Ok(scales) => assert_eq!(scales, [1.0; 16]), // the scale of zeros
///     Err(error) => println!("skipped: {error}"),
/// }
/// ```
pub type Quantize = Compiled<quantize::Plan>;

impl Operation for quantize::Plan {
    type Problem = QuantizeProblem;
    type Options = ();

    fn plan(problem: &QuantizeProblem, limits: &DeviceLimits, _options: &()) -> Result<Self, OperationError> {
        Ok(quantize::Plan::new(problem, limits)?)
    }

    fn program(&self) -> Program<Spec> {
        kernels::quantize::program(self)
    }
}

/// The reduction of partial results of attention over disjoint sets of keys (split-KV): one launch without a workspace.
///
/// ```text
/// LSE = ln Σ_s exp(LSE_s)        O = Σ_s exp(LSE_s - LSE) O_s        s over the parts
/// ```
///
/// A part whose LSE is -inf has seen no key, and its O counts for nothing, even NaN. The results have the same bits in
/// every run. Sums are f32 and are divided at the end, so |O_s| may be up to 2¹²⁸ / num_splits.
///
/// Its tensors are `out_partial`, `lse_partial`, `o` and `lse`, all with the strides of the problem.
///
/// ```
/// use fa3_cuda::host::{Combine, Device, OperationError, Tensors, Workspace};
/// use fa3_types::{CombineSpec, Dtype, Shape};
///
/// let run = || -> Result<Vec<f32>, OperationError> {
///     // (batch, seqlen, heads, head_dim), in three parts
///     let shape = Shape { batch: 1, seqlen: 100, heads: 2, head_dim: 64 };
///     let problem = CombineSpec::contiguous(Dtype::F32, Dtype::Bf16, 3, shape).validate()?;
///
///     let device = Device::open(0)?;
///     let combine = Combine::new(&device, &problem)?;
///
///     let stream = device.stream()?;
///     let out_partial = device.upload(&stream, &[1.0_f32; 3 * 100 * 2 * 64])?;
///     let lse_partial = device.upload(&stream, &[0.0_f32; 3 * 100 * 2])?;
///     let (mut o, mut lse) = (device.alloc(2 * 100 * 2 * 64)?, device.alloc(4 * 100 * 2)?);
///     let mut workspace = Workspace::new(&device, &stream, combine.workspace_bytes())?;
///     let tensors = Tensors::new(
///         [("out_partial", &out_partial), ("lse_partial", &lse_partial)],
///         [("o", &mut o), ("lse", &mut lse)],
///     );
///     combine.run(&stream, tensors, &mut workspace)?;
///     Ok(lse.download(&stream)?)
/// };
/// match run() {
///     Ok(lse) => assert!(lse.iter().all(|lse| (lse - 3_f32.ln()).abs() < 1e-6)),
///     Err(error) => println!("skipped: {error}"),
/// }
/// ```
pub type Combine = Compiled<combine::Plan>;

impl Operation for combine::Plan {
    type Problem = CombineProblem;
    type Options = ();

    fn plan(problem: &CombineProblem, _limits: &DeviceLimits, _options: &()) -> Result<Self, OperationError> {
        Ok(combine::Plan::new(problem)?)
    }

    fn program(&self) -> Program<Spec> {
        kernels::combine::program(self)
    }
}

/// An append of new keys and values to a cache, with rotation of new keys and of queries: one launch, without a
/// workspace. The host knows no lengths.
///
/// ```text
/// k_cache[i][seqused_k[i] + t] = rotate(k_new[i][t], base[i] + t)        v_cache[i][seqused_k[i] + t] = v_new[i][t]
/// q_rotated[i][t] = rotate(q[i][t], base[i] + t)                         or, for all rows, at base[i]
/// ```
///
/// Its tensors depend on the problem. For new rows: `k_new`, `v_new`, `k_cache` and `v_cache`, of which only the new
/// rows are written; `seqused_k` (sequences), the number of rows of each sequence before the append, and the output
/// `seqused_after`, the number after it; `cu_seqlens_k_new` (sequences + 1) if the new rows are packed, `page_table`
/// (sequences, pages) if the cache is paged, `cache_batch_idx` (sequences) if it selects rows of that table. For
/// queries: `q`, the output `q_rotated`, contiguous, and `cu_seqlens_q` if they are packed. For the rotation:
/// `rotary_cos` and `rotary_sin` (table_rows, rotary_dim / 2), and `rotary_seqlens` (sequences) if it gives the
/// positions, otherwise `seqused_k`. Lengths and pages are i32, and may have any values: rows without a place in the
/// cache are dropped. Keys and values of the cache may be interleaved by rows, heads or sequences.
///
/// ```
/// use fa3_cuda::host::{Append, Device, OperationError, Tensors, Workspace};
/// use fa3_types::{AppendSpec, AppendedRows, Dtype, Sequences, Shape, TensorDesc};
///
/// let run = || -> Result<Vec<u32>, OperationError> {
///     // A row for each of 2 sequences, whose cache has 16 rows.
///     let new = TensorDesc::contiguous(Dtype::Bf16, Shape { batch: 2, seqlen: 1, heads: 4, head_dim: 64 });
///     let cache = TensorDesc::contiguous(Dtype::Bf16, Shape { batch: 2, seqlen: 16, heads: 4, head_dim: 64 });
///     let (of_new, of_cache) = (Sequences::dense(2, 1), Sequences::dense(2, 16).used());
///     let rows =
///         AppendedRows { k_new: new, v_new: new, new: of_new, k_cache: cache, v_cache: cache, cache: of_cache };
///     let problem = AppendSpec::new(rows).validate()?;
///
///     let device = Device::open(0)?;
///     let append = Append::new(&device, &problem)?;
///
///     let stream = device.stream()?;
///     let x = device.upload(&stream, &[0x3F80_u16; 2 * 4 * 64])?;
///     let [mut k, mut v] = [device.alloc(2 * 2 * 16 * 4 * 64)?, device.alloc(2 * 2 * 16 * 4 * 64)?];
///     let (used, mut after) = (device.upload(&stream, &[3_u32, 16])?, device.alloc(8)?);
///     let mut workspace = Workspace::new(&device, &stream, append.workspace_bytes())?;
///     let inputs = [("k_new", &x), ("v_new", &x), ("seqused_k", &used)];
///     let outputs = [("k_cache", &mut k), ("v_cache", &mut v), ("seqused_after", &mut after)];
///     append.run(&stream, Tensors::new(inputs, outputs), &mut workspace)?;
///     Ok(after.download(&stream)?)
/// };
/// match run() {
///     Ok(after) => assert_eq!(after, [4, 16]), // the second one is full
///     Err(error) => println!("skipped: {error}"),
/// }
/// ```
pub type Append = Compiled<append::Plan>;

impl Operation for append::Plan {
    type Problem = AppendProblem;
    type Options = ();

    fn plan(problem: &AppendProblem, _limits: &DeviceLimits, _options: &()) -> Result<Self, OperationError> {
        Ok(append::Plan::new(problem)?)
    }

    fn program(&self) -> Program<Spec> {
        kernels::append::program(self)
    }
}

/// Attention over a cache to which new rows are appended first, and new keys are rotated as Q is: an [`Append`], and a
/// [`Forward`] with the lengths after the append, in one call. The host knows no lengths.
///
/// It has the tensors of [`Forward`]. `k` and `v` are the cache, whose new rows are written; `q` is not rotated yet,
/// and `seqused_k` has the lengths before the append. Depending on the problem, it also has these tensors of
/// [`Append`]: `k_new` and `v_new`, `cu_seqlens_k_new`, `rotary_cos` and `rotary_sin`, `rotary_seqlens`. Rotated
/// queries and the new lengths are in the workspace.
///
/// [`Compiled::new`] uses split-KV ([`SplitKeys::Even`](forward::SplitKeys::Even)) if Q has few rows, as in
/// decoding. The whole GPU then works on one long sequence, and a row's last bits depend on the other sequences of the
/// batch. [`Compiled::with`] follows its options, without split-KV by default; with
/// [`SplitKeys::FixedSize`](forward::SplitKeys::FixedSize) a row has the same bits in any batch.
///
/// Lengths and pages are data: one value of this type serves all steps of a model's decoding, and so does a graph that
/// captured it.
///
/// ```
/// use fa3_cuda::host::{CachedForward, Device, OperationError, Tensors, Workspace};
/// use fa3_types::{CachedSpec, Dtype, ProblemSpec, Sequences, Shape, TensorDesc};
///
/// let run = || -> Result<Vec<f32>, OperationError> {
///     // A new token for each of 2 sequences, whose cache has 16 rows.
///     let q = Shape { batch: 2, seqlen: 1, heads: 4, head_dim: 64 };
///     let attention = ProblemSpec::dense(Dtype::Bf16, q, Shape { seqlen: 16, ..q });
///     let attention = attention.seqs_k(Sequences::dense(2, 16).used());
///     let new = TensorDesc::contiguous(Dtype::Bf16, q);
///     let problem = CachedSpec::new(attention, [new, new], Sequences::dense(2, 1)).validate()?;
///
///     let device = Device::open(0)?;
///     let forward = CachedForward::new(&device, &problem)?;
///
///     let stream = device.stream()?;
///     let zeros = device.upload(&stream, &[0_u16; 2 * 4 * 64])?;
///     let cache = || device.upload(&stream, &[0_u16; 2 * 16 * 4 * 64]);
///     let (mut k, mut v, used) = (cache()?, cache()?, device.upload(&stream, &[3_u32, 15])?);
///     let (mut o, mut lse) = (device.alloc(2 * 2 * 4 * 64)?, device.alloc(4 * 2 * 4)?);
///     let mut workspace = Workspace::new(&device, &stream, forward.workspace_bytes())?;
///     let inputs = [("q", &zeros), ("k_new", &zeros), ("v_new", &zeros), ("seqused_k", &used)];
///     let outputs = [("k", &mut k), ("v", &mut v), ("o", &mut o), ("lse", &mut lse)];
///     forward.run(&stream, Tensors::new(inputs, outputs), &mut workspace)?;
///     Ok(lse.download(&stream)?)
/// };
/// match run() {
///     // Rows see 4 keys of the first sequence and 16 of the second, with score 0.
///     Ok(lse) => assert!((lse[0] - 4_f32.ln()).abs() < 1e-4 && (lse[7] - 16_f32.ln()).abs() < 1e-4),
///     Err(error) => println!("skipped: {error}"),
/// }
/// ```
pub type CachedForward = Compiled<cached::Plan>;

impl Operation for cached::Plan {
    type Problem = CachedProblem;
    type Options = forward::PlanOptions;

    fn plan(
        problem: &CachedProblem,
        limits: &DeviceLimits,
        options: &forward::PlanOptions,
    ) -> Result<Self, OperationError> {
        Ok(cached::Plan::with(problem, limits, options)?)
    }

    fn options() -> forward::PlanOptions {
        forward::PlanOptions::default().split_keys(forward::SplitKeys::Even)
    }

    fn program(&self) -> Program<Spec> {
        kernels::cached::program(self)
    }

    fn sms(options: &forward::PlanOptions) -> Option<NonZeroU32> {
        options.sms
    }
}
