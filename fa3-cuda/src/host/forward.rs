//! The forward pass, planned and compiled: running it is one launch, or two where V is transposed before.

#[cfg(feature = "cudarc")]
mod cudarc;
mod error;

use fa3_sched::forward::{Plan, PlanOptions};
use fa3_types::{Address, Addresses, Placement, Problem, TensorName};

use super::planned::Planned;
use super::unfit::{check_given, check_sizes};
use super::{Device, DeviceBuffer, Function, HostError, Stream, Workspace};
use crate::kernels::fwd;

#[cfg(feature = "cudarc")]
pub use cudarc::Element;
pub use error::ForwardError;

/// A forward pass, planned and compiled for one device. Make it once; run it any number of times, from any thread.
///
/// ```text
/// O = softmax(mask(cap(softmax_scale · Q Kᵀ))) V        LSE = ln Σ_k exp(score)
/// ```
///
/// Making it compiles its kernels, unless the device already has them, as of such problems. Running it allocates no
/// device memory, waits for nothing, and works while the stream is captured into a graph. Tensor
/// maps of the last addresses are kept, those of eight calls.
///
/// ```
/// use fa3_cuda::host::{Device, Forward, ForwardError, ForwardTensors, Workspace};
/// use fa3_types::{Dtype, ProblemSpec, Shape};
///
/// let run = || -> Result<Vec<f32>, ForwardError> {
///     // (batch, seqlen, heads, head_dim); four query heads share a key/value head
///     let q = Shape { batch: 2, seqlen: 512, heads: 8, head_dim: 128 };
///     let kv = Shape { heads: 2, ..q };
///     let problem = ProblemSpec::dense(Dtype::Bf16, q, kv).causal().validate()?;
///
///     let device = Device::open(0)?;
///     let forward = Forward::new(&device, &problem)?;
///
///     let stream = device.stream()?;
///     let zeros = |bytes: u64| -> Result<_, ForwardError> {
///         let mut buffer = device.alloc(bytes as usize)?;
///         buffer.fill(&stream, 0)?;
///         Ok(buffer)
///     };
///     let [q, k, v, o] = [problem.q(), problem.k(), problem.v(), problem.o()].map(|x| zeros(x.extent_bytes().0));
///     let (q, k, v, mut o, mut lse) = (q?, k?, v?, o?, zeros(4 * 2 * 8 * 512)?);
///     let mut workspace = Workspace::new(&device, &stream, forward.workspace_bytes())?;
///     for _ in 0..3 {
///         let tensors = ForwardTensors::new(&q, &k, &v, &mut o).lse(&mut lse);
///         forward.run(&stream, tensors, &mut workspace)?;
///     }
///     Ok(lse.download(&stream)?)
/// };
/// match run() {
///     Ok(lse) => assert!((lse[511] - 512_f32.ln()).abs() < 1e-4), // the last row sees 512 keys with score 0
///     Err(error) => println!("skipped: {error}"),
/// }
/// ```
#[derive(Debug)]
pub struct Forward {
    device: Device,
    plan: Plan,
    planned: Planned,
}

/// Buffers that hold a problem's tensors from their first bytes on.
#[derive(Debug)]
#[non_exhaustive]
pub struct ForwardTensors<'a> {
    /// Q.
    pub q: &'a DeviceBuffer,
    /// K.
    pub k: &'a DeviceBuffer,
    /// V.
    pub v: &'a DeviceBuffer,
    /// Scales of e4m3 Q, K and V, f32 of [`Problem::descale_shapes`]: x = descale · code. `None` means 1 for scales of
    /// heads. Those of blocks and of channels must be given.
    pub descales: [Option<&'a DeviceBuffer>; 3],
    /// Means of V's channels, f32 of [`Problem::v_mean_shape`], where these have scales: V = mean + descale · code.
    pub v_mean: Option<&'a DeviceBuffer>,
    /// O.
    pub o: &'a mut DeviceBuffer,
    /// LSE; without one it is not written.
    pub lse: Option<&'a mut DeviceBuffer>,
}

impl<'a> ForwardTensors<'a> {
    /// Q, K, V and O. LSE is not written, and there are no scales.
    pub fn new(
        q: &'a DeviceBuffer,
        k: &'a DeviceBuffer,
        v: &'a DeviceBuffer,
        o: &'a mut DeviceBuffer,
    ) -> ForwardTensors<'a> {
        ForwardTensors { q, k, v, descales: [None; 3], v_mean: None, o, lse: None }
    }

    /// Has LSE written here, if anywhere.
    #[must_use]
    pub fn lse(self, lse: impl Into<Option<&'a mut DeviceBuffer>>) -> ForwardTensors<'a> {
        ForwardTensors { lse: lse.into(), ..self }
    }

    /// Gives the scales of e4m3 Q, K and V.
    #[must_use]
    pub fn descales(self, descales: [Option<&'a DeviceBuffer>; 3]) -> ForwardTensors<'a> {
        ForwardTensors { descales, ..self }
    }

    /// Gives the means of V's channels, if there are any.
    #[must_use]
    pub fn v_mean(self, v_mean: impl Into<Option<&'a DeviceBuffer>>) -> ForwardTensors<'a> {
        ForwardTensors { v_mean: v_mean.into(), ..self }
    }
}

impl Forward {
    /// Plans and compiles.
    ///
    /// # Errors
    /// [`ForwardError`] if no kernel computes the problem, or what the driver says.
    pub fn new(device: &Device, problem: &Problem) -> Result<Forward, ForwardError> {
        Forward::with(device, problem, &PlanOptions::default())
    }

    /// Plans with some of the decisions overridden by `options`, and compiles.
    ///
    /// # Errors
    /// Those of [`Forward::new`].
    pub fn with(device: &Device, problem: &Problem, options: &PlanOptions) -> Result<Forward, ForwardError> {
        let plan = Plan::with(problem, &device.limits(), options)?;
        let program = fwd::program(&plan);
        let planned = Planned::new(device, &program, device.may_overlap(options.sms))?;
        Ok(Forward { device: device.clone(), plan, planned })
    }

    /// What was decided.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The kernels that it launches; none if O has no rows.
    pub fn functions(&self) -> impl Iterator<Item = &Function> {
        self.planned.functions()
    }

    /// Bytes of the [`Workspace`] that a launch needs.
    pub fn workspace_bytes(&self) -> usize {
        self.planned.workspace_bytes()
    }

    /// How many of them, from the first on, must be 0 before the first launch: those of counters, at most
    /// [`Workspace::COUNTERS`].
    pub fn counter_bytes(&self) -> usize {
        self.planned.counter_bytes()
    }

    /// Launches it on `stream`: writes O of the tensors at `at`, and LSE if that has an address. Returns at once.
    ///
    /// # Safety
    /// - The stream must be of this device.
    /// - `at` must be where the problem's tensors are, in memory that the device may touch.
    /// - `workspace` must be the address, a multiple of 256, of [`Forward::workspace_bytes`] bytes. The first
    ///   [`Forward::counter_bytes`] must be 0, or all have been used as a workspace only by earlier launches on the
    ///   same stream, or in the same branch of a graph.
    /// - All of that memory must live until the work is done. So must this value or a clone of its [`Device`], which
    ///   keeps all that the GPU needs.
    /// - Until the work is done, nothing else may use the outputs or the workspace, or change the inputs. A graph that
    ///   captured the launch holds its addresses.
    ///
    /// # Errors
    /// What the driver says.
    pub unsafe fn launch(&self, stream: &Stream, at: &Placement, workspace: u64) -> Result<(), HostError> {
        let Addresses { q, k, v, o, lse, descales, v_mean, .. } = at.addresses();
        let address = |address: Option<Address>| address.map_or(0, |Address(address)| address);
        let [q_descale, k_descale, v_descale] = descales.map(address);
        let addresses = [q.0, k.0, v.0, o.0, address(lse), q_descale, k_descale, v_descale, address(v_mean)];
        let count = fwd::buffers::of_caller(self.plan.problem());
        // SAFETY: the caller vouches for tensors and workspace.
        unsafe { self.planned.launch(stream, &addresses[..count], workspace) }
    }

    /// Launches it on `stream`. Returns at once. Launches that share a workspace must run one after the other: on one
    /// stream, or on streams that wait for each other.
    ///
    /// # Errors
    /// A buffer that is missing, not wanted, too small or of another device, or what the driver says.
    pub fn run(
        &self,
        stream: &Stream,
        tensors: ForwardTensors<'_>,
        workspace: &mut Workspace,
    ) -> Result<(), ForwardError> {
        let ForwardTensors { q, k, v, descales, v_mean, o, lse } = tensors;
        let lse = lse.as_deref();
        let buffers = [Some(q), Some(k), Some(v), Some(&*o), lse, v_mean].into_iter().chain(descales);
        check_given(self.device.context(), stream, buffers, workspace, self.workspace_bytes())?;
        let memory = |buffer: &DeviceBuffer| (buffer.address(), buffer.bytes());
        let qkvo = [q, k, v, &*o].map(memory);
        let descales = descales.map(|scales| scales.map(memory));
        let at = placed(self.plan.problem(), qkvo, lse.map(memory), descales, v_mean.map(memory))?;
        // SAFETY: every tensor lies within its buffer, and O and LSE apart from all others. A buffer of our own
        // that is dropped waits for the work under way, as does a kernel; one of the caller's outlives it, for
        // which the caller vouched.
        Ok(unsafe { self.launch(stream, &at, workspace.address()) }?)
    }
}

/// The addresses of Q, K, V, O, LSE, scales and means at the starts of memories with these addresses and sizes.
fn placed(
    problem: &Problem,
    qkvo: [(u64, usize); 4],
    lse: Option<(u64, usize)>,
    descales: [Option<(u64, usize)>; 3],
    v_mean: Option<(u64, usize)>,
) -> Result<Placement, ForwardError> {
    let f32_bytes = |shape: &[usize]| shape.iter().map(|&extent| extent as u64).product::<u64>() * 4;
    let [q, k, o] = [problem.q(), problem.k(), problem.o()].map(|x| x.extent_bytes().0);
    let (v, lse_bytes) = (problem.v_bytes().0, f32_bytes(&problem.lse_shape()));
    let [q_descale, k_descale, v_descale] = problem.descale_shapes().map(|shape| f32_bytes(&shape));
    let needed = [
        (TensorName::Q, q),
        (TensorName::K, k),
        (TensorName::V, v),
        (TensorName::O, o),
        (TensorName::Lse, lse_bytes),
        (TensorName::QDescale, q_descale),
        (TensorName::KDescale, k_descale),
        (TensorName::VDescale, v_descale),
        (TensorName::VMean, problem.v_mean_shape().map_or(0, |shape| f32_bytes(&shape))),
    ];
    let memories = qkvo.map(Some).into_iter().chain([lse]).chain(descales).chain([v_mean]);
    check_sizes(needed, memories)?;
    let address = |(address, _)| Address(address);
    let [q, k, v, o] = qkvo.map(address);
    let mut at = Addresses::new(q, k, v, o).descales(descales.map(|scales| scales.map(address)));
    (at.lse, at.v_mean) = (lse.map(address), v_mean.map(address));
    Ok(Placement::new(problem, at)?)
}

#[cfg(test)]
mod tests {
    use fa3_types::{Dtype, ProblemError, ProblemSpec, Shape};

    use super::*;

    /// Q, O: 2 · 5 · 4 · 64 elements of 2 bytes. K, V: 2 · 7 · 2 · 64. LSE: 2 · 4 · 5 of 4 bytes.
    const MEMORIES: [(u64, usize); 5] =
        [(0x1_0000, 5120), (0x2_0000, 3584), (0x3_0000, 3584), (0x4_0000, 5120), (0x5_0000, 160)];

    fn place(change: impl FnOnce(&mut [(u64, usize); 5])) -> Result<Placement, ForwardError> {
        let q = Shape { batch: 2, seqlen: 5, heads: 4, head_dim: 64 };
        let kv = Shape { seqlen: 7, heads: 2, ..q };
        let mut memories = MEMORIES;
        change(&mut memories);
        let [q_at, k_at, v_at, o_at, lse_at] = memories;
        let problem = ProblemSpec::dense(Dtype::Bf16, q, kv).validate()?;
        placed(&problem, [q_at, k_at, v_at, o_at], Some(lse_at), [None; 3], None)
    }

    #[test]
    fn tensors_lie_at_the_starts_of_memories_that_hold_them() {
        let at = place(|memories| memories[1].1 += 1).unwrap().addresses();
        let starts = [at.q, at.k, at.v, at.o, at.lse.unwrap()].map(|Address(start)| start);
        assert_eq!(starts, [0x1_0000, 0x2_0000, 0x3_0000, 0x4_0000, 0x5_0000]);
    }

    #[test]
    fn memories_that_are_too_small_are_named() {
        let names = [TensorName::Q, TensorName::K, TensorName::V, TensorName::O, TensorName::Lse];
        for (index, tensor) in names.into_iter().enumerate() {
            let needed = MEMORIES[index].1;
            let error = place(|memories| memories[index].1 -= 1).unwrap_err();
            assert_eq!(error, ForwardError::BufferSize { tensor, given: needed - 1, needed: needed as u64 });
        }
        let error = place(|memories| memories[4].1 = 0).unwrap_err();
        assert_eq!(error.to_string(), "lse takes 160 bytes, its memory has 0");
    }

    /// Of heads: 2 · 2 numbers of 4 bytes each. Of blocks: 2 · 4 · 2 of Q, 2 · 2 · 1 of K and V.
    #[test]
    fn scales_are_placed_and_those_that_are_too_small_or_missing_are_named() {
        let q = Shape { batch: 2, seqlen: 100, heads: 4, head_dim: 64 };
        let kv = Shape { seqlen: 7, heads: 2, ..q };
        let heads = ProblemSpec::dense(Dtype::E4m3, q, kv);
        let blocks = heads.clone().block_scales(64);
        let [q_at, k_at, v_at, o_at] = [1, 2, 3, 4].map(|place| (place << 20, 1 << 20));
        let names = [TensorName::QDescale, TensorName::KDescale, TensorName::VDescale];
        for (spec, sizes, required) in [(heads, [16, 16, 16], false), (blocks, [64, 16, 16], true)] {
            let problem = spec.validate().unwrap();
            let good = [0, 1, 2].map(|i| Some((0x5000 + 0x100 * i as u64, sizes[i])));
            let place = |descales| placed(&problem, [q_at, k_at, v_at, o_at], None, descales, None);
            let at = place(good).unwrap().addresses();
            assert_eq!(at.descales, [0x5000, 0x5100, 0x5200].map(|start| Some(Address(start))));
            for (index, tensor) in names.into_iter().enumerate() {
                let (given, needed) = (sizes[index] - 1, sizes[index] as u64);
                let (mut small, mut missing) = (good, good);
                small[index] = Some((0x5000, given));
                missing[index] = None;
                assert_eq!(place(small), Err(ForwardError::BufferSize { tensor, given, needed }));
                let expected = ForwardError::from(ProblemError::NullAddress { tensor });
                assert_eq!(place(missing).err(), required.then_some(expected));
            }
        }
        let half = ProblemSpec::dense(Dtype::Bf16, q, kv).validate().unwrap();
        let unwanted = placed(&half, [q_at, k_at, v_at, o_at], None, [None, Some((0x5000, 16)), None], None);
        let (tensor, dtype) = (TensorName::KDescale, Dtype::Bf16);
        assert_eq!(unwanted, Err(ProblemError::Descale { tensor, dtype }.into()));
    }

    /// Of 2 · 2 heads with 64 channels.
    #[test]
    fn means_of_channels_are_placed() {
        let shape = Shape { batch: 2, seqlen: 100, heads: 2, head_dim: 64 };
        let problem = ProblemSpec::dense(Dtype::E4m3, shape, shape).v_channels().validate().unwrap();
        let qkvo = [1, 2, 3, 4].map(|place| (place << 20, 1 << 20));
        let descales = [None, None, Some((0x6000, 1024))];
        let place = |bytes| placed(&problem, qkvo, None, descales, Some((0x5000, bytes)));
        assert_eq!(place(1024).unwrap().addresses().v_mean, Some(Address(0x5000)));
        let error = ForwardError::BufferSize { tensor: TensorName::VMean, given: 1023, needed: 1024 };
        assert_eq!(place(1023), Err(error));
    }

    #[test]
    fn outputs_over_inputs_are_refused() {
        let error = place(|memories| memories[3].0 = 0x2_0000).unwrap_err();
        assert!(matches!(error, ForwardError::Problem(ProblemError::Overlap { .. })), "{error}");
    }
}
