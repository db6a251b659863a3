//! A call of an operation: planned once, and launched over torch's addresses.

use fa3_call::{At, Call, Error, Memory, Place, Tensors, caught};
use fa3_cuda::host::{Compiled, PlanCache, Stream};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use crate::arguments::Arguments;
use crate::error::exception;
use crate::threads;
use crate::workspaces::{Allocate, Lent};

/// An operation with its options, which calls share.
pub(crate) struct Planned<C: Call> {
    /// The options.
    pub(crate) numbers: C::Numbers,
    /// The plans of recent calls, by the numbers of their devices.
    pub(crate) plans: &'static Plans<C>,
}

/// The plans of recent calls, by the numbers of their devices.
pub(crate) type Plans<C> = PlanCache<(u32, C), Compiled<<C as Call>::Plan>>;

/// A computation over tensors.
pub(crate) trait Compute: Send + Sync {
    /// Computes a call with these tensors in its place, or checks it. Meanwhile other Python threads run, because
    /// making a plan may take a second, and the driver may wait for room in the stream. Returns [`Call::words`].
    ///
    /// # Errors
    /// The errors of [`run`], or the operation does not know a tensor.
    fn compute(
        &self,
        place: Place,
        tensors: &Bound<'_, PyDict>,
        allocate: &Allocate,
    ) -> PyResult<Option<u32>>;
}

impl<C: Call> Compute for Planned<C> {
    fn compute(
        &self,
        place: Place,
        tensors: &Bound<'_, PyDict>,
        allocate: &Allocate,
    ) -> PyResult<Option<u32>> {
        let py = tensors.py();
        let given = tensors.iter().filter(|(_, tensor)| !tensor.is_none());
        let given: Vec<_> =
            given.map(|(name, x)| Ok((name.cast_into::<PyString>()?, x))).collect::<PyResult<_>>()?;
        let by_names = given.iter().map(|(name, x)| Ok((name.to_str()?, x))).collect::<PyResult<_>>()?;
        let mut arguments = Arguments::new(place, by_names);
        let mut tensors = Tensors::new(&mut arguments);
        // The call is large: `map_err` would move it once more.
        let call = match C::given(&mut tensors, &self.numbers) {
            Ok(call) => call,
            Err(error) => return Err(exception(error)),
        };
        let mut at = tensors.at().map_err(exception)?;
        let words = if matches!(place, Place::Cpu) { None } else { call.words().map_err(exception)? };
        if words.is_none() || arguments.find("table").is_some() {
            at.retain(|(tensor, _)| call.takes(tensor));
            // The copies of tensors live until `run` returns.
            py.detach(|| run(place, call, &at, self.plans, allocate)).map_err(exception)?;
        }
        Ok(words)
    }
}

/// Computes a call on its device, or checks it if the place is no device. Uses the stream's cached workspace, or one
/// from `allocate` if the cached workspace is too small or missing.
///
/// # Errors
/// The call is invalid, the driver reports an error, `allocate` raises, or a bug panicked: no panic gets through.
fn run<C: Call>(place: Place, call: C, at: &At, plans: &Plans<C>, allocate: &Allocate) -> Result<(), Error> {
    let result = caught(|| run_in(place, call, at, plans, allocate));
    result.unwrap_or_else(|message| Err(Error::Panic { message }))
}

fn run_in<C: Call>(
    place: Place,
    call: C,
    at: &At,
    plans: &Plans<C>,
    allocate: &Allocate,
) -> Result<(), Error> {
    match place {
        Place::Stream { device, stream } => launch(&(device, call), stream, at, plans, allocate),
        // SAFETY: the Python sources take the addresses from tensors of the call's shapes, strides and dtypes, which
        // they hold until the call is over. Outputs are new tensors, or tensors that the caller passed as outputs. As
        // with torch's own operators, the caller must not use the outputs or write to the inputs meanwhile.
        #[allow(unsafe_code, reason = "torch's tensors are plain addresses")]
        Place::Cpu => threads::run(|| call.compute(&unsafe { Memory::new(at, &[]) })),
        Place::CheckedForGpu => call.check_for_gpu(),
        Place::CheckedForCpu => call.check_for_cpu(),
    }
}

fn launch<C: Call>(
    key: &(u32, C),
    stream: usize,
    at: &At,
    plans: &Plans<C>,
    allocate: &Allocate,
) -> Result<(), Error> {
    let compiled = plans.find(key, |(ordinal, call)| call.compile(*ordinal))?;
    // SAFETY: the Python sources take the stream from torch. It is the current stream of the device, in the primary
    // context like all streams of torch, and alive as long as it is current.
    #[allow(unsafe_code, reason = "torch's streams are plain numbers")]
    let stream = unsafe { Stream::from_raw(compiled.device(), stream) };
    let workspace = Lent::of(&compiled, key.0, &stream, allocate)?;
    // SAFETY: the Python sources take the addresses from torch tensors on this device, with the problem's shapes,
    // strides and dtypes. Outputs are new tensors, or the tensors that the caller passed as outputs. A given workspace
    // is a new tensor, and its counters have been zeroed on this stream. Tensors may be freed before the work is done,
    // as with torch's own operators: torch gives their memory to later work of the same stream, or waits for the
    // streams that a caller recorded. Torch keeps the memory of a capture as long as the graph. A cached workspace
    // belongs to this stream alone, is held until the last kernel of the call is on the stream, and lives as long as
    // the process. If a plan is dropped, its device stays open.
    #[allow(unsafe_code, reason = "a kernel gets plain addresses")]
    workspace.with(|parts| unsafe { compiled.launch(&stream, at, parts) })?;
    Ok(())
}
