//! Devices and made plans, kept for the next call.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::{LazyLock, Mutex};

use fa3_cuda::host::{Device, Forward, ForwardError, HostError, Stream};
use fa3_sched::DeviceLimits;
use fa3_sched::forward::{Plan, PlanOptions};
use fa3_types::{Addresses, Placement};

use crate::call::Call;
use crate::error::Error;
use crate::kept::{Kept, lock};
use crate::workspaces::{self, Allocate, Lent};

/// Devices by their numbers, open until the process ends, with all kernels that were compiled for them.
static DEVICES: LazyLock<Mutex<HashMap<u32, Device>>> = LazyLock::new(Mutex::default);

/// What was made of the calls so far.
static PLANS: LazyLock<Kept<Call, Made>> = LazyLock::new(Kept::default);

/// A forward pass and its device.
struct Made {
    device: Device,
    forward: Forward,
}

/// Puts the forward pass of `call` on `stream`, over the tensors that lie `at`. It uses the workspace that is kept
/// for the stream, or where there is none one that `allocate` makes, which the caller keeps until then.
///
/// # Errors
/// What is wrong with the call, what the driver says, or what `allocate` raises.
pub(crate) fn launch(call: &Call, stream: usize, at: Addresses, allocate: &Allocate) -> Result<Lent, Error> {
    let made = PLANS.find(call, make)?;
    let Made { device, forward } = &*made;
    let placement = Placement::new(forward.plan().problem(), at)?;
    // SAFETY: the Python sources take it from torch. It is the current one of the device, in the primary context as all
    // of torch's, and alive for as long as it is current.
    #[allow(unsafe_code, reason = "torch's streams are plain numbers")]
    let stream = unsafe { Stream::from_raw(device, stream) };
    let needed = forward.workspace_bytes();
    let workspace = match workspaces::find(call.device(), device, &stream, needed)? {
        Some(address) => Lent::at(address),
        None => Lent::allocated(allocate, needed, forward.counter_bytes())?,
    };
    // SAFETY: the Python sources take the addresses from torch. They are those of tensors of the problem's shapes,
    // strides and dtypes on that device, o, lse and a given workspace of new ones, the counters of the workspace zeroed
    // on this stream before. They may be freed before the work is done: torch gives their memory to later work of the
    // same stream, or waits for the streams that a caller recorded, as for its own operators; memory of a capture it
    // keeps for as long as the graph. A workspace that is kept is this stream's alone and lives as long as the process.
    // A plan that is dropped leaves its device, which stays open.
    #[allow(unsafe_code, reason = "a kernel gets plain addresses")]
    unsafe { forward.launch(&stream, &placement, workspace.address()) }?;
    Ok(workspace)
}

/// Checks a call as far as that needs no device, with the limits of an H100.
///
/// # Errors
/// What is wrong with it.
pub(crate) fn check(call: &Call) -> Result<(), Error> {
    let problem = call.problem()?;
    let limits = DeviceLimits::h100_sxm();
    let options = PlanOptions::default().sms(without(limits.sms, call.sm_margin())?);
    Plan::with(&problem, &limits, &options).map_err(ForwardError::from)?;
    Ok(())
}

fn make(call: &Call) -> Result<Made, Error> {
    let problem = call.problem()?;
    let device = open(call.device())?;
    let sms = without(device.limits().sms, call.sm_margin())?;
    let forward = Forward::with(&device, &problem, &PlanOptions::default().sms(sms))?;
    Ok(Made { device, forward })
}

/// The device, opened once.
///
/// # Errors
/// What the driver says.
pub(crate) fn open(ordinal: u32) -> Result<Device, HostError> {
    let mut devices = lock(&DEVICES);
    if let Some(device) = devices.get(&ordinal) {
        return Ok(device.clone());
    }
    let device = Device::open(ordinal)?;
    devices.insert(ordinal, device.clone());
    Ok(device)
}

/// The SMs of a device of which `margin` are left to others.
///
/// # Errors
/// [`Error::SmMargin`] if it is not a number of SMs that leaves one.
pub(crate) fn without(sms: NonZeroU32, margin: i64) -> Result<NonZeroU32, Error> {
    let left =
        u32::try_from(margin).ok().and_then(|margin| sms.get().checked_sub(margin)).and_then(NonZeroU32::new);
    left.ok_or(Error::SmMargin { margin, sms: sms.get() })
}
