//! The backward pass, planned and compiled: running it is two or three launches.

mod error;

use fa3_sched::backward::{Plan, PlanOptions};
use fa3_types::{Address, BackwardAddresses, BackwardPlacement, BackwardProblem};

use super::planned::Planned;
use super::unfit::{check_given, check_sizes};
use super::{Device, DeviceBuffer, Function, HostError, Stream, Workspace};
use crate::kernels::bwd::{self, buffers};

pub use error::BackwardError;

/// A backward pass, planned and compiled for one device. Make it once; run it any number of times, from any thread.
///
/// ```text
/// P = exp(S - LSE)    dP = dO Vᵀ    dS = P ∘ (dP - D + dLSE)    dV = Pᵀ dO    dQ = scale · dS K    dK = scale · dSᵀ Q
/// ```
///
/// dK and dV are the same bits in every run, and so is dQ where the plan is
/// [deterministic](fa3_sched::backward::PlanOptions::deterministic) or has no additions. What a sequence gets does not
/// depend on the others in the batch. Running it allocates no device memory, waits for nothing, and works while the
/// stream is captured into a graph.
///
/// ```
/// use fa3_cuda::host::{Backward, BackwardError, BackwardTensors, Device, Workspace};
/// use fa3_types::{BackwardSpec, Dtype, ProblemSpec, Shape};
///
/// let run = || -> Result<Vec<half::bf16>, BackwardError> {
///     let shape = Shape { batch: 2, seqlen: 512, heads: 8, head_dim: 128 };
///     let forward = ProblemSpec::dense(Dtype::Bf16, shape, shape).causal();
///     let problem = BackwardSpec::contiguous(forward).validate()?;
///
///     let device = Device::open(0)?;
///     let backward = Backward::new(&device, &problem)?;
///     let stream = device.stream()?;
///     let zeros = |bytes: u64| -> Result<_, BackwardError> {
///         let mut buffer = device.alloc(bytes as usize)?;
///         buffer.fill(&stream, 0)?;
///         Ok(buffer)
///     };
///     let [q, k, v, o, lse, dout, _, dq, dk, dv] = problem.tensor_bytes().map(|(_, bytes)| zeros(bytes));
///     let (q, k, v, o, lse, dout, mut dq, mut dk, mut dv) = (q?, k?, v?, o?, lse?, dout?, dq?, dk?, dv?);
///     let mut workspace = Workspace::new(&device, &stream, backward.workspace_bytes())?;
///     let gradients = [&mut dq, &mut dk, &mut dv];
///     let tensors = BackwardTensors::new([&q, &k, &v], [&o, &lse], &dout, gradients);
///     backward.run(&stream, tensors, &mut workspace)?;
///     Ok(dv.download(&stream)?)
/// };
/// match run() {
///     Ok(dv) => assert!(dv.iter().all(|x| x.to_f32() == 0.0)), // the gradient of O was 0
///     Err(error) => println!("skipped: {error}"),
/// }
/// ```
#[derive(Debug)]
pub struct Backward {
    device: Device,
    plan: Plan,
    planned: Planned,
}

/// Buffers that hold a problem's tensors from their first bytes on.
#[derive(Debug)]
#[non_exhaustive]
pub struct BackwardTensors<'a> {
    /// Q.
    pub q: &'a DeviceBuffer,
    /// K.
    pub k: &'a DeviceBuffer,
    /// V.
    pub v: &'a DeviceBuffer,
    /// O of the forward pass.
    pub o: &'a DeviceBuffer,
    /// LSE of the forward pass.
    pub lse: &'a DeviceBuffer,
    /// The gradient of O.
    pub dout: &'a DeviceBuffer,
    /// The gradient of LSE; without one it is 0.
    pub dlse: Option<&'a DeviceBuffer>,
    /// The gradient of Q.
    pub dq: &'a mut DeviceBuffer,
    /// The gradient of K.
    pub dk: &'a mut DeviceBuffer,
    /// The gradient of V.
    pub dv: &'a mut DeviceBuffer,
}

impl<'a> BackwardTensors<'a> {
    /// Q, K and V; O and LSE of the forward pass; the gradient of O; and where the gradients of Q, K and V go.
    pub fn new(
        [q, k, v]: [&'a DeviceBuffer; 3],
        [o, lse]: [&'a DeviceBuffer; 2],
        dout: &'a DeviceBuffer,
        [dq, dk, dv]: [&'a mut DeviceBuffer; 3],
    ) -> BackwardTensors<'a> {
        BackwardTensors { q, k, v, o, lse, dout, dlse: None, dq, dk, dv }
    }

    /// Gives the gradient of LSE, if there is one.
    #[must_use]
    pub fn dlse(self, dlse: impl Into<Option<&'a DeviceBuffer>>) -> BackwardTensors<'a> {
        BackwardTensors { dlse: dlse.into(), ..self }
    }
}

impl Backward {
    /// Plans and compiles.
    ///
    /// # Errors
    /// [`BackwardError`] if no kernels compute the problem, or what the driver says.
    pub fn new(device: &Device, problem: &BackwardProblem) -> Result<Backward, BackwardError> {
        Backward::with(device, problem, &PlanOptions::default())
    }

    /// Plans with some of the decisions overridden by `options`, and compiles.
    ///
    /// # Errors
    /// Those of [`Backward::new`].
    pub fn with(
        device: &Device,
        problem: &BackwardProblem,
        options: &PlanOptions,
    ) -> Result<Backward, BackwardError> {
        let plan = Plan::with(problem, &device.limits(), options)?;
        let planned = Planned::new(device, &bwd::program(&plan), device.may_overlap(options.sms))?;
        Ok(Backward { device: device.clone(), plan, planned })
    }

    /// What was decided.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The kernels that it launches; none if there is nothing to compute.
    pub fn functions(&self) -> impl Iterator<Item = &Function> {
        self.planned.functions()
    }

    /// Bytes of the [`Workspace`] that a launch needs: counters, 8 for each row of a head of Q, and where dQ is added
    /// up, 4 for each element of its sums, whose rows and columns are whole blocks of the plan's tile.
    pub fn workspace_bytes(&self) -> usize {
        self.planned.workspace_bytes()
    }

    /// How many of them, from the first on, must be 0 before the first launch: those of counters, at most
    /// [`Workspace::COUNTERS`].
    pub fn counter_bytes(&self) -> usize {
        self.planned.counter_bytes()
    }

    /// Launches it on `stream`: writes dQ, dK and dV of the tensors at `at`. Returns at once.
    ///
    /// # Safety
    /// - The stream must be of this device.
    /// - `at` must be where the problem's tensors are, in memory that the device may touch.
    /// - `workspace` must be the address, a multiple of 256, of [`Backward::workspace_bytes`] bytes. The first
    ///   [`Backward::counter_bytes`] must be 0, or all have been used as a workspace only by earlier launches on the
    ///   same stream, or in the same branch of a graph.
    /// - All of that memory must live until the work is done. So must this value or a clone of its [`Device`], which
    ///   keeps all that the GPU needs.
    /// - Until the work is done, nothing else may use the outputs or the workspace, or change the inputs. A graph that
    ///   captured the launch holds its addresses.
    ///
    /// # Errors
    /// What the driver says.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        at: &BackwardPlacement,
        workspace: u64,
    ) -> Result<(), HostError> {
        let addresses: [u64; buffers::OF_CALLER] =
            at.addresses().all().map(|address| address.map_or(0, |Address(address)| address));
        // SAFETY: the caller vouches for tensors and workspace.
        unsafe { self.planned.launch(stream, &addresses, workspace) }
    }

    /// Launches it on `stream`. Returns at once. Launches that share a workspace must run one after the other: on one
    /// stream, or on streams that wait for each other.
    ///
    /// # Errors
    /// A buffer that is too small or of another device, or what the driver says.
    pub fn run(
        &self,
        stream: &Stream,
        tensors: BackwardTensors<'_>,
        workspace: &mut Workspace,
    ) -> Result<(), BackwardError> {
        let BackwardTensors { q, k, v, o, lse, dout, dlse, dq, dk, dv } = tensors;
        let [q, k, v, o, lse, dout, dq, dk, dv] = [q, k, v, o, lse, dout, &*dq, &*dk, &*dv].map(Some);
        let given = [q, k, v, o, lse, dout, dlse, dq, dk, dv];
        check_given(self.device.context(), stream, given, workspace, self.workspace_bytes())?;
        let memories = given.map(|buffer| buffer.map(|buffer| (buffer.address(), buffer.bytes())));
        let at = placed(self.plan.problem(), memories)?;
        // SAFETY: every tensor lies within its buffer, and outputs apart from all others. A buffer of our own
        // that is dropped waits for the work under way, as does a kernel; one of the caller's outlives it, for
        // which the caller vouched.
        Ok(unsafe { self.launch(stream, &at, workspace.address()) }?)
    }
}

/// The addresses of tensors at the starts of memories with these addresses and sizes.
fn placed(
    problem: &BackwardProblem,
    memories: [Option<(u64, usize)>; 10],
) -> Result<BackwardPlacement, BackwardError> {
    check_sizes(problem.tensor_bytes(), memories)?;
    let [q, k, v, o, lse, dout, dlse, dq, dk, dv] =
        memories.map(|memory| memory.map(|(address, _)| Address(address)));
    // One that must be there and is not is a null address, which is refused.
    let [q, k, v, o, lse, dout, dq, dk, dv] =
        [q, k, v, o, lse, dout, dq, dk, dv].map(|address| address.unwrap_or(Address(0)));
    let at = BackwardAddresses { q, k, v, o, lse, dout, dlse, dq, dk, dv };
    Ok(BackwardPlacement::new(problem, at)?)
}

#[cfg(test)]
mod tests {
    use fa3_types::{BackwardSpec, Dtype, ProblemSpec, Shape};

    use super::*;

    #[test]
    fn memories_that_are_too_small_are_named() {
        let q = Shape { batch: 2, seqlen: 5, heads: 4, head_dim: 64 };
        let forward = ProblemSpec::dense(Dtype::Bf16, q, Shape { seqlen: 7, heads: 2, ..q });
        let problem = BackwardSpec::contiguous(forward).validate().unwrap();
        let sizes = problem.tensor_bytes();
        let good: Vec<_> =
            (1..).zip(sizes).map(|(at, (_, bytes))| Some((at << 16, bytes as usize))).collect();
        let good: [_; 10] = good.try_into().unwrap();
        assert!(placed(&problem, good).is_ok());
        for (index, (tensor, needed)) in sizes.into_iter().enumerate() {
            let mut small = good;
            small[index] = Some(((index as u64 + 1) << 16, needed as usize - 1));
            let given = needed as usize - 1;
            assert_eq!(placed(&problem, small), Err(BackwardError::BufferSize { tensor, given, needed }));
        }
        let mut without = good;
        without[6] = None;
        assert_eq!(placed(&problem, without).unwrap().addresses().dlse, None);
    }
}
