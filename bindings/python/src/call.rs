//! A call of an operation: planned once, and launched over torch's addresses.

use std::hash::Hash;
use std::num::NonZeroU32;

use fa3_cuda::host::{Compiled, Kept, Operation, OperationError, Stream};
use fa3_sched::DeviceLimits;
use pyo3::prelude::*;

use crate::arguments::{Options, Tensors};
use crate::caught::caught;
use crate::cpu;
use crate::devices;
use crate::error::Error;
use crate::place::Place;
use crate::workspaces::{Allocate, Lent};

/// The addresses of a call's tensors, by their names; none of those that are left out.
pub(crate) type At = [(&'static str, Option<u64>)];

/// All that a plan depends on but the device. Calls that are equal share one.
pub(crate) trait Call: Clone + Eq + Hash + Send + Sync + 'static {
    /// The operation's plan.
    type Plan: Operation + 'static;

    /// The call of these tensors and options.
    ///
    /// # Errors
    /// A tensor is missing, or something is of another type.
    fn given(tensors: &Tensors<'_>, options: &Options<'_>) -> PyResult<Self>;

    /// Whether it reads or writes a tensor that is given.
    fn takes(&self, _tensor: &str) -> bool {
        true
    }

    /// The plans of recent calls, by the numbers of their devices.
    fn kept() -> &'static Kept<(u32, Self), Compiled<Self::Plan>>;

    /// The problem, in rows that kernels take.
    ///
    /// # Errors
    /// The call makes no sense.
    fn problem(&self) -> Result<<Self::Plan as Operation>::Problem, Error>;

    /// The options of its plan on a device of so many SMs.
    ///
    /// # Errors
    /// [`Error::SmMargin`].
    fn options(&self, sms: NonZeroU32) -> Result<<Self::Plan as Operation>::Options, Error>;

    /// Checks what only its plan says.
    ///
    /// # Errors
    /// [`Error::TableWords`].
    fn check_plan(&self, _plan: &Self::Plan) -> Result<(), Error> {
        Ok(())
    }

    /// Checks it by the rules of the CPU, where any strides will do.
    ///
    /// # Errors
    /// The call makes no sense.
    fn check_for_cpu(&self) -> Result<(), Error>;

    /// Computes it on the CPU, over the tensors that lie `at`.
    ///
    /// # Errors
    /// The call makes no sense, or an address does not.
    fn compute(&self, at: &At) -> Result<(), Error>;
}

/// Computes a call of these tensors and options in its place, or checks it, and returns it. Other threads of Python go
/// on meanwhile: making a plan may take a second, and the driver may wait for room in the stream.
///
/// # Errors
/// As for [`run`], or a tensor or an option is of no use to the operation.
pub(crate) fn computed<C: Call>(
    py: Python<'_>,
    place: Place,
    (tensors, options): (&Tensors<'_>, &Options<'_>),
    allocate: &Allocate,
) -> PyResult<()> {
    let call = C::given(tensors, options)?;
    options.refuse_others()?;
    let mut at = tensors.at()?;
    at.retain(|(tensor, _)| call.takes(tensor));
    Ok(py.detach(|| run(place, call, &at, allocate))?)
}

/// Computes a call in its place, or checks it as far as that needs no device. It uses the workspace that is kept for
/// the stream, and where that is too small or missing what `allocate` makes.
///
/// # Errors
/// The call makes no sense, the driver says no, `allocate` raises, or there is a bug: no panic gets through.
pub(crate) fn run<C: Call>(place: Place, call: C, at: &At, allocate: &Allocate) -> Result<(), Error> {
    let result = caught(|| run_in(place, call, at, allocate));
    result.unwrap_or_else(|message| Err(Error::Panic { message }))
}

fn run_in<C: Call>(place: Place, call: C, at: &At, allocate: &Allocate) -> Result<(), Error> {
    match place {
        Place::Stream { device, stream } => launch(&(device, call), stream, at, allocate),
        Place::Cpu => cpu::run(|| call.compute(at)),
        Place::CheckedForGpu => {
            // By the limits of an H100.
            let limits = DeviceLimits::h100_sxm();
            call.check_plan(&C::Plan::plan(&call.problem()?, &limits, &call.options(limits.sms)?)?)
        }
        Place::CheckedForCpu => call.check_for_cpu(),
    }
}

fn launch<C: Call>(key: &(u32, C), stream: usize, at: &At, allocate: &Allocate) -> Result<(), Error> {
    let compiled = C::kept().find(key, |(ordinal, call)| {
        let problem = call.problem()?;
        let device = devices::open(*ordinal).map_err(OperationError::from)?;
        let options = call.options(device.limits().sms)?;
        let compiled = Compiled::with(&device, &problem, &options)?;
        call.check_plan(compiled.plan())?;
        Ok::<_, Error>(compiled)
    })?;
    // SAFETY: the Python sources take it from torch. It is the current one of the device, in the primary context as all
    // of torch's, and alive for as long as it is current.
    #[allow(unsafe_code, reason = "torch's streams are plain numbers")]
    let stream = unsafe { Stream::from_raw(compiled.device(), stream) };
    let workspace = Lent::of(&compiled, key.0, &stream, allocate)?;
    // SAFETY: the Python sources take the addresses from torch. They are those of tensors of the problem's shapes,
    // strides and dtypes on that device, the outputs and a given workspace of new ones or of those that the caller gave
    // to be written, the counters of the workspace zeroed on this stream before. They may be freed before the work is
    // done: torch gives their memory to later work of the same stream, or waits for the streams that a caller recorded,
    // as for its own operators; memory of a capture it keeps for as long as the graph. A workspace that is kept is this
    // stream's alone, is held until the last kernel of the call is on the stream, and lives as long as the process. A
    // plan that is dropped leaves its device, which stays open.
    #[allow(unsafe_code, reason = "a kernel gets plain addresses")]
    workspace.with(|parts| unsafe { compiled.launch(&stream, at, parts) })?;
    Ok(())
}
