//! An operation, planned and compiled for a device.

use std::num::NonZeroU32;

use fa3_ir::Program;
use fa3_sched::DeviceLimits;

use super::planned::Planned;
use super::{Device, Function, OperationError, PlacementError, Stream, Tensors, Workspace};
use crate::kernels::Spec;

/// A plan of an operation, as [`Compiled`] needs it.
pub trait Operation: Sized {
    /// A valid call.
    type Problem;
    /// The decisions of the plan that a caller may override.
    type Options: Default;

    /// Plans a call for a device with these limits.
    ///
    /// # Errors
    /// An error if no kernel computes the problem, or no kernel computes it with these options.
    fn plan(
        problem: &Self::Problem,
        limits: &DeviceLimits,
        options: &Self::Options,
    ) -> Result<Self, OperationError>;

    /// The options of [`Compiled::new`].
    fn options() -> Self::Options {
        Self::Options::default()
    }

    /// The plan's launches, and the tensors that they read and write.
    fn program(&self) -> Program<Spec>;

    /// The kernels of the program, each as often as it is launched, for [`Device::warm_up`].
    fn kernels(&self) -> Vec<Spec> {
        self.program().steps.into_iter().map(|step| step.kernel).collect()
    }

    /// Number of SMs that launches use, if they leave other SMs to other work.
    fn sms(_options: &Self::Options) -> Option<NonZeroU32> {
        None
    }
}

/// An operation, planned and compiled for one device. It is made once and run any number of times, from any thread.
///
/// Making it compiles its kernels, unless the device already has them from another problem. Running it allocates no
/// device memory, never waits, and works while the stream is captured into a graph. For each tensor, the last eight
/// tensor maps are kept.
#[derive(Debug)]
pub struct Compiled<P> {
    device: Device,
    plan: P,
    planned: Planned,
}

impl<P: Operation> Compiled<P> {
    /// Plans with the operation's default options, and compiles.
    ///
    /// # Errors
    /// An error if no kernel computes the problem, or an error of the driver. Most kernels that rotate or transform
    /// need a driver for CUDA 12.1.
    pub fn new(device: &Device, problem: &P::Problem) -> Result<Compiled<P>, OperationError> {
        Compiled::with(device, problem, &P::options())
    }

    /// Plans with the given options, and compiles. The plan makes the decisions that `options` leave open.
    ///
    /// # Errors
    /// The errors of [`Compiled::new`].
    pub fn with(
        device: &Device,
        problem: &P::Problem,
        options: &P::Options,
    ) -> Result<Compiled<P>, OperationError> {
        let plan = P::plan(problem, &device.limits(), options)?;
        let planned = Planned::new(device, &plan.program(), device.may_overlap(P::sms(options)))?;
        Ok(Compiled { device: device.clone(), plan, planned })
    }
}

impl<P> Compiled<P> {
    /// The plan.
    pub fn plan(&self) -> &P {
        &self.plan
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The kernels, in the order of their launches; none if there is nothing to compute.
    pub fn functions(&self) -> impl Iterator<Item = &Function> {
        self.planned.functions()
    }

    /// The tensors of a call, in the order of the program's buffers: names and sizes in bytes.
    pub fn tensors(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.planned.interface().tensors().map(|(_, place)| (place.tensor, place.bytes))
    }

    /// Checks the sizes in bytes of tensors, by their names. Other names may be among them.
    ///
    /// # Errors
    /// [`PlacementError::BufferSize`] if a tensor is too small.
    pub fn check_sizes(&self, sizes: &[(&'static str, u64)]) -> Result<(), OperationError> {
        for &(tensor, given) in sizes {
            let needed = self.tensors().find(|(name, _)| *name == tensor).map_or(0, |(_, bytes)| bytes);
            if given < needed {
                return Err(PlacementError::BufferSize { tensor, given, needed }.into());
            }
        }
        Ok(())
    }

    /// Size in bytes of the [`Workspace`] that a launch needs.
    pub fn workspace_bytes(&self) -> usize {
        self.planned.workspace_bytes()
    }

    /// Number of leading bytes of the workspace that must be 0 before the first launch: counters, at most
    /// [`Workspace::COUNTERS`].
    pub fn counter_bytes(&self) -> usize {
        self.planned.counter_bytes()
    }

    /// Number of bytes of the workspace behind [`Workspace::COUNTERS`], which need no initialisation.
    pub fn scratch_bytes(&self) -> usize {
        self.workspace_bytes().saturating_sub(Workspace::COUNTERS)
    }

    /// Launches the operation on `stream` with the tensors at the addresses `at`, by their names; a tensor without an
    /// address is left out. Returns at once.
    ///
    /// # Safety
    /// - The stream must belong to this device.
    /// - `at` must have the addresses of the problem's tensors, in memory that the device may access.
    /// - `counters` must be the address of [`Compiled::counter_bytes`] bytes, and `scratch` the address of
    ///   [`Compiled::scratch_bytes`] bytes. Both must be multiples of 256. If a number of bytes is 0, the address may
    ///   be any number. The counters must be 0 before their first use. After it, only launches on the same stream, or
    ///   in the same branch of a graph, may have used them.
    /// - Calls with the same counters or scratch must not be made at the same time: an operation has several launches,
    ///   and the stream orders launches, not operations. Host threads that share them need a lock around the call.
    /// - All of this memory must live until the work is done. So must this value, or a clone of its [`Device`], which
    ///   keeps everything that the GPU needs.
    /// - Until the work is done, nothing else may use the outputs, counters or scratch, or change the inputs. A graph
    ///   that captured the launch holds its addresses.
    ///
    /// # Errors
    /// [`PlacementError`] if a tensor is missing or unknown, if its address is not aligned, or if an output overlaps
    /// another tensor; or an error of the driver. Nothing is launched then.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        at: &[(&'static str, Option<u64>)],
        [counters, scratch]: [u64; 2],
    ) -> Result<(), OperationError> {
        let addresses = self.planned.interface().place(at.iter().copied())?;
        // SAFETY: the caller guarantees the tensors, the counters and the scratch memory.
        Ok(unsafe { self.planned.launch(stream, addresses, [counters, scratch]) }?)
    }

    /// Launches the operation on `stream`. Returns at once. Runs that share a workspace must execute one after the
    /// other on the GPU: on one stream, or on streams that wait for each other. Otherwise their results are wrong. The
    /// host orders their launches by itself, because a run borrows the workspace mutably.
    ///
    /// Dropping a buffer or a workspace before the work is done waits for the device. Memory of
    /// [`DeviceBuffer::from_raw`](super::DeviceBuffer::from_raw) is not freed and does not wait: its caller has
    /// promised that it lives long enough.
    ///
    /// # Errors
    /// The errors of [`Compiled::launch`]; a buffer or a workspace that is too small or belongs to another device; or
    /// an output in a buffer that was given as an input.
    pub fn run(
        &self,
        stream: &Stream,
        tensors: Tensors<'_>,
        workspace: &mut Workspace,
    ) -> Result<(), OperationError> {
        let (own, interface) = (self.device.context(), self.planned.interface());
        for (given, context) in
            [("the stream", &**stream.context()), ("the workspace", workspace.buffer().context())]
        {
            if !context.is(own) {
                return Err(PlacementError::OtherDevice { given }.into());
            }
        }
        let (given, needed) = (workspace.bytes(), self.workspace_bytes());
        if given < needed {
            return Err(PlacementError::WorkspaceSize { given, needed }.into());
        }
        tensors.check(own, interface)?;
        let addresses = interface.place(tensors.addresses())?;
        // SAFETY: every tensor lies within its buffer, and outputs do not overlap other tensors. Dropping a buffer or a
        // kernel of ours waits for the work under way. The caller's memory outlives the work, as the caller has
        // promised.
        Ok(unsafe { self.planned.launch(stream, addresses, Workspace::parts(workspace.address())) }?)
    }
}
