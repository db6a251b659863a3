//! A call of an operation: planned once, and launched over torch's addresses.

use std::cell::RefCell;
use std::sync::Arc;
use std::thread::LocalKey;

use fa3_call::{At, Call, CpuCall, Error, Memory, Place, Tensors, caught};
use fa3_cuda::host::{Compiled, Device, Operation, PlanCache, Stream};
use fa3_cuda::kernels::Spec;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use crate::arguments::{Argument, Arguments};
use crate::buffers::Buffers;
use crate::dlpack::Described;
use crate::error::exception;
use crate::workspaces::{Allocate, Caller, Lent};

/// An operation with its options, which calls share.
pub(crate) struct Planned<C: CpuCall> {
    /// The options.
    pub(crate) numbers: C::Numbers,
    /// The plans of recent calls.
    pub(crate) plans: &'static Plans<C>,
    /// The last call of each thread.
    pub(crate) last: &'static LocalKey<Last<C>>,
}

/// A call with the number of its device.
type Key<C> = (u32, C);

/// A plan, compiled.
type Plan<C> = Arc<Compiled<<C as Call>::Plan>>;

/// The plans of recent calls, by the numbers of their devices.
pub(crate) type Plans<C> = PlanCache<Key<C>, Compiled<<C as Call>::Plan>>;

/// The last call of a thread, with its plan. A model's layers make the same call again, which is compared with the last
/// one faster than it is looked up among all.
pub(crate) type Last<C> = RefCell<Option<(Key<C>, Plan<C>)>>;

/// The sizes of tensors in bytes, by their names.
type Bytes = [(&'static str, u64)];

/// Plans a call for a device, and returns the kernels that it launches.
pub(crate) type Planning = Box<dyn FnOnce(&Device) -> Result<Vec<Spec>, Error> + Send>;

/// A computation over tensors.
pub(crate) trait Compute: Send + Sync {
    /// Plans a call with these tensors, which are tuples, for a device that is opened later.
    ///
    /// # Errors
    /// A tensor is missing or invalid, or the operation does not know it.
    fn planning(&self, tensors: &Bound<'_, PyDict>) -> PyResult<Planning>;

    /// Computes a call with these tensors in its place, or checks it. Meanwhile other Python threads run, because
    /// making a plan may take a second, and the driver may wait for room in the stream. Returns [`Call::words`].
    ///
    /// # Errors
    /// The call is invalid, the driver reports an error, `allocate` raises, or the operation does not know a tensor.
    fn compute(
        &self,
        py: Python<'_>,
        place: Place,
        given: &[Argument<'_, '_>],
        allocate: &Allocate,
    ) -> PyResult<Option<u32>>;

    /// Computes a call of another caller than Python with these tensors, in their place.
    ///
    /// # Errors
    /// The call is invalid, a tensor is too small, or the driver or the caller reports an error.
    fn compute_for(&self, caller: &dyn Caller, given: &mut Buffers<'_>) -> Result<(), Error>;
}

impl<C: CpuCall> Compute for Planned<C> {
    fn planning(&self, tensors: &Bound<'_, PyDict>) -> PyResult<Planning> {
        let names = Names::of(tensors)?;
        let given = names.arguments()?;
        let mut arguments = Arguments::new(Place::CheckedForGpu, &given);
        let call = C::given(&mut Tensors::new(&mut arguments), &self.numbers).map_err(exception)?;
        Ok(Box::new(move |device| Ok(call.plan(&device.limits())?.kernels())))
    }

    fn compute(
        &self,
        py: Python<'_>,
        place: Place,
        given: &[Argument<'_, '_>],
        allocate: &Allocate,
    ) -> PyResult<Option<u32>> {
        let mut arguments = Arguments::new(place, given);
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
            py.detach(|| self.run(place, call, &at, &[], allocate)).map_err(exception)?;
        }
        Ok(words)
    }

    fn compute_for(&self, caller: &dyn Caller, given: &mut Buffers<'_>) -> Result<(), Error> {
        let mut tensors = Tensors::new(given);
        let call = C::given(&mut tensors, &self.numbers)?;
        let mut at = tensors.at()?;
        at.retain(|(tensor, _)| call.takes(tensor));
        let bytes = given.bytes(&at)?;
        self.run(given.place, call, &at, &bytes, caller)
    }
}

/// The tensors of a dict that are not None, with their names.
pub(crate) struct Names<'py>(Vec<(Bound<'py, PyString>, Bound<'py, PyAny>)>);

impl<'py> Names<'py> {
    /// The tensors of a dict.
    ///
    /// # Errors
    /// A name is no string.
    pub(crate) fn of(tensors: &Bound<'py, PyDict>) -> PyResult<Names<'py>> {
        let given = tensors.iter().filter(|(_, tensor)| !tensor.is_none());
        given.map(|(name, x)| Ok((name.cast_into::<PyString>()?, x))).collect::<PyResult<_>>().map(Names)
    }

    /// The tensors, as torch describes them.
    ///
    /// # Errors
    /// A name is no valid text.
    pub(crate) fn arguments(&self) -> PyResult<Vec<Argument<'_, 'py>>> {
        let mut given = Vec::with_capacity(self.0.len());
        for (name, x) in &self.0 {
            given.push(Argument { name: name.to_str()?, tensor: x.clone(), described: Described::of(x) });
        }
        Ok(given)
    }
}

impl<C: CpuCall> Planned<C> {
    /// Computes a call on its device, or checks it if the place is no device. Uses the stream's cached workspace, or
    /// one from the caller if the cached workspace is too small or missing. Tensors with an entry in `bytes` span that
    /// many bytes.
    ///
    /// # Errors
    /// The call is invalid, a tensor is too small, the driver or the caller reports an error, or a bug panicked: no
    /// panic gets through.
    fn run(&self, place: Place, call: C, at: &At, bytes: &Bytes, caller: &dyn Caller) -> Result<(), Error> {
        let result = caught(|| match place {
            Place::Stream { device, stream } => self.launch((device, call), stream, at, bytes, caller),
            // SAFETY: the Python sources take the addresses from tensors of the call's shapes, strides and dtypes,
            // which they hold until the call is over, and so do XLA and tvm-ffi's callers. Outputs are new tensors, or
            // tensors that the caller passed as outputs. As with torch's own operators, the caller must not use the
            // outputs or write to the inputs meanwhile.
            #[allow(unsafe_code, reason = "torch's tensors are plain addresses")]
            Place::Cpu => caller.compute(Box::new(|| call.compute(&unsafe { Memory::new(at, bytes) }))),
            Place::CheckedForGpu => call.check_for_gpu(),
            Place::CheckedForCpu => call.check_for_cpu(),
        });
        result.unwrap_or_else(|message| Err(Error::Panic { message }))
    }

    /// The plan of a call.
    ///
    /// # Errors
    /// The call is invalid, or the driver reports an error.
    fn plan(&self, key: Key<C>) -> Result<Plan<C>, Error> {
        let is_last = |(last, plan): &(Key<C>, Plan<C>)| (*last == key).then(|| Arc::clone(plan));
        if let Some(plan) = self.last.with_borrow(|last| last.as_ref().and_then(is_last)) {
            return Ok(plan);
        }
        let plan = self.plans.find(&key, |(ordinal, call)| call.compile(*ordinal))?;
        self.last.set(Some((key, Arc::clone(&plan))));
        Ok(plan)
    }

    fn launch(
        &self,
        key: Key<C>,
        stream: usize,
        at: &At,
        bytes: &Bytes,
        caller: &dyn Caller,
    ) -> Result<(), Error> {
        let ordinal = key.0;
        let compiled = self.plan(key)?;
        compiled.check_sizes(bytes)?;
        // SAFETY: the Python sources take the stream from torch. It is the current stream of the device, in the primary
        // context like all streams of torch and of XLA, and alive as long as it is current. XLA's and tvm-ffi's are
        // alive during the call.
        #[allow(unsafe_code, reason = "torch's streams are plain numbers")]
        let stream = unsafe { Stream::from_raw(compiled.device(), stream) };
        let workspace = Lent::of(&compiled, ordinal, &stream, caller)?;
        // SAFETY: the Python sources take the addresses from torch tensors on this device, with the problem's shapes,
        // strides and dtypes. Outputs are new tensors, or the tensors that the caller passed as outputs. A given
        // workspace is a new tensor, and its counters have been zeroed on this stream. Tensors may be freed before the
        // work is done, as with torch's own operators: torch gives their memory to later work of the same stream, or
        // waits for the streams that a caller recorded. Torch keeps the memory of a capture as long as the graph. XLA's
        // buffers and tvm-ffi's tensors are on the device, too, and free for later work of the stream when it is over.
        // A cached workspace belongs to this stream alone, is held until the last kernel of the call is on the stream,
        // and lives as long as the process. If a plan is dropped, its device stays open.
        #[allow(unsafe_code, reason = "a kernel gets plain addresses")]
        workspace.with(|parts| unsafe { compiled.launch(&stream, at, parts) })?;
        Ok(())
    }
}
