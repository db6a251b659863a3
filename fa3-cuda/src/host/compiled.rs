//! An operation, planned and compiled for a device.

use std::num::NonZeroU32;

use fa3_ir::Program;
use fa3_sched::DeviceLimits;

use super::planned::Planned;
use super::{Device, Function, OperationError, PlacementError, Stream, Tensors, Workspace};
use crate::kernels::Spec;

/// A plan of an operation: all that [`Compiled`] needs to know of one.
pub trait Operation: Sized {
    /// A call that makes sense.
    type Problem;
    /// Decisions of the plan that a caller may override.
    type Options: Default;

    /// Plans a call for a device with these limits.
    ///
    /// # Errors
    /// No kernel computes the problem, or not with these options.
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

    /// SMs that launches use, if others are left to other work.
    fn sms(_options: &Self::Options) -> Option<NonZeroU32> {
        None
    }
}

/// An operation, planned and compiled for one device: made once, run any number of times, from any thread.
///
/// Making it compiles its kernels, unless the device already has them, as of such problems. Running it allocates no
/// device memory, waits for nothing, and works while the stream is captured into a graph. Of each tensor map the last
/// eight are kept.
#[derive(Debug)]
pub struct Compiled<P> {
    device: Device,
    plan: P,
    planned: Planned,
}

impl<P: Operation> Compiled<P> {
    /// Plans with the options that the operation has if nothing is said, and compiles.
    ///
    /// # Errors
    /// No kernel computes the problem, or what the driver says. Most kernels that rotate or transform need a driver for
    /// CUDA 12.1.
    pub fn new(device: &Device, problem: &P::Problem) -> Result<Compiled<P>, OperationError> {
        Compiled::with(device, problem, &P::options())
    }

    /// Plans with some of the decisions overridden by `options`, and compiles.
    ///
    /// # Errors
    /// As for [`Compiled::new`].
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
    /// The decisions that were made.
    pub fn plan(&self) -> &P {
        &self.plan
    }

    /// Its device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The kernels that it launches, in this order; none if there is nothing to compute.
    pub fn functions(&self) -> impl Iterator<Item = &Function> {
        self.planned.functions()
    }

    /// The tensors of a call, in the order of the program's buffers: their names, and how many bytes each takes.
    pub fn tensors(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.planned.interface().tensors().map(|(_, place)| (place.tensor, place.bytes))
    }

    /// Bytes of the [`Workspace`] that a launch needs.
    pub fn workspace_bytes(&self) -> usize {
        self.planned.workspace_bytes()
    }

    /// Bytes of the workspace, from the first on, that must be 0 before the first launch: counters, at most
    /// [`Workspace::COUNTERS`].
    pub fn counter_bytes(&self) -> usize {
        self.planned.counter_bytes()
    }

    /// Bytes of the workspace behind [`Workspace::COUNTERS`], which may hold anything.
    pub fn scratch_bytes(&self) -> usize {
        self.workspace_bytes().saturating_sub(Workspace::COUNTERS)
    }

    /// Launches it on `stream` over the tensors `at` these addresses, by their names; one without an address is left
    /// out. Returns at once.
    ///
    /// # Safety
    /// - The stream must be of this device.
    /// - `at` must be where the problem's tensors are, in memory that the device may touch.
    /// - `counters` must be the address of [`Compiled::counter_bytes`] bytes, and `scratch` of
    ///   [`Compiled::scratch_bytes`], both multiples of 256; any number where there are none. The counters must be 0,
    ///   or have been used as counters only by earlier launches on the same stream, or in the same branch of a graph.
    /// - Calls with the same counters or scratch must not be made at the same time: an operation has several launches,
    ///   and the stream orders launches, not operations. Host threads that share them need a lock around the call.
    /// - All of that memory must live until the work is done. So must this value or a clone of its [`Device`], which
    ///   keeps all that the GPU needs.
    /// - Until the work is done, nothing else may use the outputs, counters or scratch, or change the inputs. A graph
    ///   that captured the launch holds its addresses.
    ///
    /// # Errors
    /// [`PlacementError`] if a tensor is missing or not wanted, if its address is not aligned, or if one that is
    /// written lies over another; or what the driver says. Nothing is launched then.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        at: &[(&'static str, Option<u64>)],
        [counters, scratch]: [u64; 2],
    ) -> Result<(), OperationError> {
        let addresses = self.planned.interface().place(at.iter().copied())?;
        // SAFETY: the caller vouches for tensors, counters and scratch.
        Ok(unsafe { self.planned.launch(stream, addresses, [counters, scratch]) }?)
    }

    /// Launches it on `stream`. Returns at once. Runs that share a workspace must be done one after the other on the
    /// GPU: on one stream, or on streams that wait for each other. Otherwise their results are wrong. The host keeps
    /// their launches apart by itself, because a run borrows the workspace mutably.
    ///
    /// A buffer or a workspace that is dropped before the work is done waits for the device. One that is lent by
    /// [`DeviceBuffer::from_raw`](super::DeviceBuffer::from_raw) does not: whoever made it has promised that it lives.
    ///
    /// # Errors
    /// As for [`Compiled::launch`]; a buffer or a workspace that is too small or of another device, or a buffer that is
    /// written and was given to be read.
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
        // SAFETY: every tensor lies within its buffer, and outputs apart from all others. A buffer of our own
        // that is dropped waits for the work under way, as does a kernel; one of the caller's outlives it, for
        // which the caller vouched.
        Ok(unsafe { self.planned.launch(stream, addresses, Workspace::parts(workspace.address())) }?)
    }
}
