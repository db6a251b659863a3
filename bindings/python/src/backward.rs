//! The backward pass: a call as it comes from Python, and what was made of earlier ones.

use std::num::NonZeroU32;
use std::sync::LazyLock;

use fa3_cuda::host::{Backward, BackwardError, Device, Stream};
use fa3_sched::DeviceLimits;
use fa3_sched::backward::{Plan, PlanOptions};
use fa3_types::{
    BackwardAddresses, BackwardPlacement, BackwardProblem, BackwardSpec, ProblemError, TensorDesc,
};

use crate::call;
use crate::error::Error;
use crate::kept::Kept;
use crate::plans::{open, without};
use crate::workspaces::{self, Allocate, Lent};

/// What was made of the calls so far.
static MADE: LazyLock<Kept<Call, Made>> = LazyLock::new(Kept::default);

/// A backward pass and its device.
struct Made {
    device: Device,
    backward: Backward,
}

/// Everything that a plan depends on. Calls that are equal share one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Call {
    forward: call::Call,
    dout: TensorDesc,
    deterministic: bool,
}

impl Call {
    /// Of this forward pass, for a gradient of O that looks like this.
    pub(crate) fn new(forward: call::Call, dout: TensorDesc, deterministic: bool) -> Call {
        Call { forward, dout, deterministic }
    }

    /// The forward pass.
    pub(crate) fn forward(&self) -> &call::Call {
        &self.forward
    }

    /// The gradient of O.
    pub(crate) fn dout(&self) -> &TensorDesc {
        &self.dout
    }

    /// The problem, with contiguous O, dQ, dK and dV, in rows that kernels take.
    ///
    /// # Errors
    /// What is wrong with it.
    fn problem(&self) -> Result<BackwardProblem, ProblemError> {
        let mut spec = BackwardSpec::contiguous(self.forward.spec()?);
        spec.dout = self.dout;
        let problem = spec.validate()?;
        problem.check_rows()?;
        Ok(problem)
    }

    /// What a plan on a device of so many SMs must keep to.
    ///
    /// # Errors
    /// [`Error::SmMargin`].
    fn options(&self, sms: NonZeroU32) -> Result<PlanOptions, Error> {
        let mut options = PlanOptions::default().sms(without(sms, self.forward.sm_margin())?);
        options.deterministic = self.deterministic;
        Ok(options)
    }
}

/// Puts the backward pass of `call` on `stream`, over the tensors that lie `at`. It uses the workspace that is kept
/// for the stream, or where there is none one that `allocate` makes, which the caller keeps until then.
///
/// # Errors
/// What is wrong with the call, what the driver says, or what `allocate` raises.
pub(crate) fn launch(
    call: &Call,
    stream: usize,
    at: BackwardAddresses,
    allocate: &Allocate,
) -> Result<Lent, Error> {
    let made = MADE.find(call, make)?;
    let Made { device, backward } = &*made;
    let placement = BackwardPlacement::new(backward.plan().problem(), at).map_err(BackwardError::from)?;
    // SAFETY: the Python sources take it from torch. It is the current one of the device, in the primary context as all
    // of torch's, and alive for as long as it is current.
    #[allow(unsafe_code, reason = "torch's streams are plain numbers")]
    let stream = unsafe { Stream::from_raw(device, stream) };
    let needed = backward.workspace_bytes();
    let workspace = match workspaces::find(call.forward.device(), device, &stream, needed)? {
        Some(address) => Lent::at(address),
        None => Lent::allocated(allocate, needed, backward.counter_bytes())?,
    };
    // SAFETY: the Python sources take the addresses from torch. They are those of tensors of the problem's shapes,
    // strides and dtypes on that device, dq, dk, dv and a given workspace of new ones, its counters zeroed on this
    // stream before. They may be freed before the work is done: torch gives their memory to later work of the same
    // stream, or waits for the streams that a caller recorded, as for its own operators; memory of a capture it keeps
    // for as long as the graph. A workspace that is kept is this stream's alone and lives as long as the process. A
    // plan that is dropped leaves its device, which stays open.
    #[allow(unsafe_code, reason = "a kernel gets plain addresses")]
    unsafe { backward.launch(&stream, &placement, workspace.address()) }?;
    Ok(workspace)
}

/// Checks a call as far as that needs no device, with the limits of an H100.
///
/// # Errors
/// What is wrong with it.
pub(crate) fn check(call: &Call) -> Result<(), Error> {
    let problem = call.problem().map_err(BackwardError::from)?;
    let limits = DeviceLimits::h100_sxm();
    let options = call.options(limits.sms)?;
    Plan::with(&problem, &limits, &options).map_err(BackwardError::from)?;
    Ok(())
}

fn make(call: &Call) -> Result<Made, Error> {
    let problem = call.problem().map_err(BackwardError::from)?;
    let device = open(call.forward.device())?;
    let backward = Backward::with(&device, &problem, &call.options(device.limits().sms)?)?;
    Ok(Made { device, backward })
}
