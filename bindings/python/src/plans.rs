//! Devices and made plans, kept for the next call.

use std::collections::HashMap;
use std::hash::Hash;
use std::num::NonZeroU32;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use fa3_cuda::host::{Device, Forward, ForwardError, HostError, Stream};
use fa3_sched::forward::PlanOptions;
use fa3_types::{Addresses, Placement};

use crate::call::Call;
use crate::error::Error;
use crate::kept::Kept;
use crate::workspaces;

/// As many plans are kept. A program whose lengths never repeat makes them all the time, but does not grow.
const KEPT: usize = 4096;

/// Devices by their numbers, open until the process ends, with all kernels that were compiled for them.
static DEVICES: LazyLock<Mutex<HashMap<u32, Device>>> = LazyLock::new(Mutex::default);

/// What was made of the calls so far. Locked for a moment only, never while a plan is made.
static PLANS: LazyLock<Mutex<Kept<Call, Arc<Made>>>> = LazyLock::new(|| Mutex::new(Kept::new(KEPT)));

/// A forward pass and its device.
struct Made {
    device: Device,
    forward: Forward,
}

/// What became of a call.
pub(crate) enum Launched {
    /// It is on the stream.
    Yes,
    /// Nothing was done: it takes a workspace, which must be given.
    WithoutWorkspace(Missing),
}

impl Launched {
    /// The workspace that must be given; none if it is on the stream.
    pub(crate) fn missing(self) -> Option<Missing> {
        match self {
            Launched::Yes => None,
            Launched::WithoutWorkspace(missing) => Some(missing),
        }
    }
}

/// A workspace: its bytes, and how many of them, from the first on, must be 0.
pub(crate) type Missing = (usize, usize);

/// Puts the forward pass of `call` on `stream`, over the tensors that lie `at`. It uses `workspace`, (address, bytes),
/// or if none is given the one kept for the stream.
///
/// # Errors
/// What is wrong with the call, a workspace that is too small, or what the driver says.
pub(crate) fn launch(
    call: &Call,
    stream: usize,
    at: Addresses,
    workspace: Option<(u64, usize)>,
) -> Result<Launched, Error> {
    let made = find(&PLANS, call, make)?;
    let Made { device, forward } = &*made;
    let placement = Placement::new(forward.plan().problem(), at)?;
    // SAFETY: the Python sources take it from torch. It is the current one of the device, in the primary context as all
    // of torch's, and alive for as long as it is current.
    #[allow(unsafe_code, reason = "torch's streams are plain numbers")]
    let stream = unsafe { Stream::from_raw(device, stream) };
    let needed = forward.workspace_bytes();
    let workspace = match workspace {
        Some((_, given)) if given < needed => {
            return Err(ForwardError::WorkspaceSize { given, needed }.into());
        }
        Some((address, _)) => address,
        None => match workspaces::find(call.device(), device, &stream, needed)? {
            Some(address) => address,
            None => return Ok(Launched::WithoutWorkspace((needed, forward.counter_bytes()))),
        },
    };
    // SAFETY: the Python sources take the addresses from torch. They are those of tensors of the problem's shapes,
    // strides and dtypes on that device, o, lse and a given workspace of new ones, the counters of the workspace zeroed
    // on this stream before. They may be freed before the work is done: torch gives their memory to later work of the
    // same stream, or waits for the streams that a caller recorded, as for its own operators; memory of a capture it
    // keeps for as long as the graph. A workspace that is kept is this stream's alone and lives as long as the process.
    // A plan that is dropped leaves its device, which stays open.
    #[allow(unsafe_code, reason = "a kernel gets plain addresses")]
    unsafe { forward.launch(&stream, &placement, workspace) }?;
    Ok(Launched::Yes)
}

/// What is kept for `call`, made before or now.
///
/// # Errors
/// Those of making it.
pub(crate) fn find<C: Clone + Eq + Hash, M>(
    kept: &Mutex<Kept<C, Arc<M>>>,
    call: &C,
    make: fn(&C) -> Result<M, Error>,
) -> Result<Arc<M>, Error> {
    if let Some(made) = lock(kept).get(call) {
        return Ok(Arc::clone(made));
    }
    let made = Arc::new(make(call)?);
    // If another thread made the same meanwhile, either will do.
    lock(kept).insert(call.clone(), Arc::clone(&made));
    Ok(made)
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

/// What a mutex protects.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What a panic left behind is a map of what was put there before.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
