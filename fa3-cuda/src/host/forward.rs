//! The forward pass as a made plan: everything is decided and compiled, and running it is one launch.

mod error;
mod kernels;
mod slices;

use fa3_sched::Scheduler;
use fa3_sched::forward::{Plan, PlanOptions};
use fa3_types::{Address, Addresses, Placement, Problem, TensorName};

use super::context::Context;
use super::prepared::Prepared;
use super::{Device, DeviceBuffer, Function, HostError, Stream};
use crate::kernels::fwd::{self, FwdArray, FwdSpec};

pub(super) use kernels::Kernels;

pub use error::ForwardError;
pub use slices::Element;

/// Arrays of a launch: one for each [`FwdArray`].
const ARRAYS: usize = FwdArray::Counter as usize + 1;

/// A forward pass, planned and compiled for one device: made once, run any number of times, from any thread.
///
/// ```text
/// O = softmax(mask(cap(softmax_scale · Q Kᵀ))) V        LSE = ln Σ_k exp(score)
/// ```
///
/// Making it compiles a kernel, unless the device has one for such problems already. Running it allocates nothing, waits
/// for nothing and works while the stream is captured into a graph.
///
/// ```
/// use fa3_cuda::host::{Device, Forward, ForwardError};
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
///     for _ in 0..3 {
///         forward.run(&stream, &q, &k, &v, &mut o, &mut lse)?;
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
    /// `None` if there is nothing to compute.
    prepared: Option<Prepared>,
}

impl Forward {
    /// Plans and compiles.
    ///
    /// # Errors
    /// [`ForwardError`] if no kernel computes the problem, or what the driver says.
    pub fn new(device: &Device, problem: &Problem) -> Result<Forward, ForwardError> {
        Forward::with(device, problem, &PlanOptions::default())
    }

    /// Plans with some of the decisions given.
    ///
    /// # Errors
    /// Those of [`Forward::new`].
    pub fn with(device: &Device, problem: &Problem, options: &PlanOptions) -> Result<Forward, ForwardError> {
        let plan = Plan::with(problem, &device.limits(), options)?;
        let (spec, schedule) = (FwdSpec::of(&plan), *plan.schedule());
        let prepare = || {
            let function = device.forward_kernels().function(device, &spec, fwd::kernel)?;
            // SMs that are left to other work must not fill with CTAs that wait. Drivers before 12.3 cannot capture such launches.
            let early = schedule.sms().get() >= device.sm_count() && device.driver_version() >= (12, 3);
            Prepared::new(function, [schedule.grid(), 1, 1], &fwd::args(&plan), ARRAYS, early)
        };
        let prepared = (schedule.grid() > 0).then(prepare).transpose()?;
        if schedule.scheduler() == Scheduler::DynamicPersistent {
            device.counters().reserve(device)?;
        }
        Ok(Forward { device: device.clone(), plan, prepared })
    }

    /// What was decided.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The kernel; `None` if O has no rows.
    pub fn function(&self) -> Option<&Function> {
        self.prepared.as_ref().map(Prepared::function)
    }

    /// Puts it on `stream`: O of the tensors at `at`, and LSE if that has a place. Returns at once.
    ///
    /// A graph that captured it holds its addresses and a counter of its own; it must not be instantiated twice and then
    /// run at the same time.
    ///
    /// # Safety
    /// The stream must be of this device. `at` must be where the problem's tensors are, in memory that the device may
    /// touch. That memory must live until the work is done, and so must this value or a clone of its [`Device`], which keeps
    /// all that the GPU needs; nobody else may use the outputs or change the inputs meanwhile.
    ///
    /// # Errors
    /// What the driver says; [`HostError::Counters`] if a capture needs a counter and none is left.
    pub unsafe fn launch(&self, stream: &Stream, at: &Placement) -> Result<(), HostError> {
        let Some(prepared) = &self.prepared else { return Ok(()) };
        let Addresses { q, k, v, o, lse } = at.addresses();
        let counter = match self.plan.schedule().scheduler() {
            Scheduler::DynamicPersistent => self.device.counters().of(&self.device, stream)?,
            Scheduler::OneTile | Scheduler::StaticPersistent => 0,
        };
        // SAFETY: the caller vouches for the tensors; the counter lives as long as the device, and no launch that may run at
        // the same time has it.
        unsafe { prepared.launch(stream, &[q.0, k.0, v.0, o.0, lse.map_or(0, |lse| lse.0), counter]) }
    }

    /// Puts it on `stream`, over buffers that hold the problem's tensors from their first bytes on. Returns at once.
    ///
    /// # Errors
    /// A buffer that is too small or of another device, or what the driver says.
    pub fn run(
        &self,
        stream: &Stream,
        q: &DeviceBuffer,
        k: &DeviceBuffer,
        v: &DeviceBuffer,
        o: &mut DeviceBuffer,
        lse: &mut DeviceBuffer,
    ) -> Result<(), ForwardError> {
        let buffers: [&DeviceBuffer; 5] = [q, k, v, o, lse];
        let is_own = |context: &Context| context.is(self.device.context());
        if !is_own(stream.context()) || !buffers.iter().all(|buffer| is_own(buffer.context())) {
            return Err(ForwardError::OtherDevice);
        }
        let at = placed(self.plan.problem(), buffers.map(|buffer| (buffer.address(), buffer.bytes())))?;
        // SAFETY: every tensor lies within its buffer, and O and LSE apart from all others. A buffer that is dropped waits for
        // the work under way, as does a kernel.
        Ok(unsafe { self.launch(stream, &at) }?)
    }
}

/// The places of Q, K, V, O and LSE at the starts of memories with these addresses and sizes.
fn placed(problem: &Problem, memories: [(u64, usize); 5]) -> Result<Placement, ForwardError> {
    let lse = problem.lse_shape().iter().map(|&extent| extent as u64).product::<u64>() * 4;
    let [q, k, v, o] = [problem.q(), problem.k(), problem.v(), problem.o()].map(|x| x.extent_bytes().0);
    let names = [TensorName::Q, TensorName::K, TensorName::V, TensorName::O, TensorName::Lse];
    for ((tensor, needed), (_, given)) in names.into_iter().zip([q, k, v, o, lse]).zip(memories) {
        if (given as u64) < needed {
            return Err(ForwardError::BufferSize { tensor, given, needed });
        }
    }
    let [q, k, v, o, lse] = memories.map(|(address, _)| Address(address));
    Ok(Placement::new(problem, Addresses { q, k, v, o, lse: Some(lse) })?)
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
        placed(&ProblemSpec::dense(Dtype::Bf16, q, kv).validate()?, memories)
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

    #[test]
    fn outputs_over_inputs_are_refused() {
        let error = place(|memories| memories[3].0 = 0x2_0000).unwrap_err();
        assert!(matches!(error, ForwardError::Problem(ProblemError::Overlap { .. })), "{error}");
    }
}
