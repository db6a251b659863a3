//! A call of an operation: planned once, and launched over torch's addresses.

use std::cell::RefCell;
use std::hash::Hash;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::thread::LocalKey;

use fa3_cuda::host::{Compiled, Operation, OperationError, PlanCache, Stream};
use fa3_cuda::kernels::Spec;
use fa3_sched::DeviceLimits;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use crate::arguments::{Options, Tensors};
use crate::caught::caught;
use crate::cpu;
use crate::devices;
use crate::error::Error;
use crate::place::Place;
use crate::workspaces::{Allocate, Lent};

/// The addresses of a call's tensors, by their names. Tensors that are left out have no entry.
pub(crate) type At = [(&'static str, Option<u64>)];

/// A call: everything that its plan depends on, except for the device. Equal calls share a plan.
pub(crate) trait Call: Clone + Eq + Hash + Send + Sync + 'static {
    /// The operation's plan.
    type Plan: Operation + Send + Sync + 'static;

    /// Options of the operation.
    type Numbers: Send + Sync + 'static;

    /// The operation's options, by their names.
    ///
    /// # Errors
    /// An option is of another type.
    fn numbers(options: &Options<'_>) -> PyResult<Self::Numbers>;

    /// Makes the call from these tensors and options.
    ///
    /// # Errors
    /// A tensor is missing or invalid.
    fn given(tensors: &mut Tensors<'_, '_>, numbers: &Self::Numbers) -> PyResult<Self>;

    /// Whether the call reads or writes a given tensor.
    fn takes(&self, _tensor: &str) -> bool {
        true
    }

    /// The number of words of the table that the call writes, or would write if the tensor were given.
    ///
    /// # Errors
    /// The call is invalid.
    fn words(&self) -> Result<Option<u32>, Error> {
        Ok(None)
    }

    /// The problem, as kernels take it.
    ///
    /// # Errors
    /// The call is invalid.
    fn problem(&self) -> Result<<Self::Plan as Operation>::Problem, Error>;

    /// The options of the call's plan, on a device of `sms` SMs.
    ///
    /// # Errors
    /// [`Error::SmMargin`].
    fn options(&self, sms: NonZeroU32) -> Result<<Self::Plan as Operation>::Options, Error>;

    /// Checks sizes that only the plan knows.
    ///
    /// # Errors
    /// [`Error::TableWords`].
    fn check_plan(&self, _plan: &Self::Plan) -> Result<(), Error> {
        Ok(())
    }

    /// Checks the call by the rules of the CPU, which takes any strides.
    ///
    /// # Errors
    /// The call is invalid.
    fn check_for_cpu(&self) -> Result<(), Error>;

    /// Computes the call on the CPU, over the tensors at the addresses `at`.
    ///
    /// # Errors
    /// The call or an address is invalid.
    fn compute(&self, at: &At) -> Result<(), Error>;
}

/// An operation with its options, which calls share.
pub(crate) struct Planned<C: Call> {
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

/// Plans a call for a device with these limits, and returns the kernels that it launches.
pub(crate) type Planning = Box<dyn FnOnce(&DeviceLimits) -> Result<Vec<Spec>, Error> + Send>;

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
        place: Place,
        tensors: &Bound<'_, PyDict>,
        allocate: &Allocate,
    ) -> PyResult<Option<u32>>;
}

impl<C: Call> Compute for Planned<C> {
    fn planning(&self, tensors: &Bound<'_, PyDict>) -> PyResult<Planning> {
        let call = {
            let given = named(tensors)?;
            C::given(&mut Tensors::new(Place::CheckedForGpu, with_names(&given)?), &self.numbers)?
        };
        Ok(Box::new(move |limits| {
            let plan = C::Plan::plan(&call.problem()?, limits, &call.options(limits.sms)?)?;
            call.check_plan(&plan)?;
            Ok(plan.kernels())
        }))
    }

    fn compute(
        &self,
        place: Place,
        tensors: &Bound<'_, PyDict>,
        allocate: &Allocate,
    ) -> PyResult<Option<u32>> {
        let py = tensors.py();
        let given = named(tensors)?;
        let mut tensors = Tensors::new(place, with_names(&given)?);
        let call = C::given(&mut tensors, &self.numbers)?;
        let mut at = tensors.at()?;
        let words = if matches!(place, Place::Cpu) { None } else { call.words()? };
        if words.is_none() || tensors.are_with("table") {
            at.retain(|(tensor, _)| call.takes(tensor));
            // The copies of tensors live until `run` returns.
            py.detach(|| self.run(place, call, &at, allocate))?;
        }
        Ok(words)
    }
}

/// The tensors of a dict that are not None, with their names.
fn named<'py>(tensors: &Bound<'py, PyDict>) -> PyResult<Vec<(Bound<'py, PyString>, Bound<'py, PyAny>)>> {
    let given = tensors.iter().filter(|(_, tensor)| !tensor.is_none());
    given.map(|(name, x)| Ok((name.cast_into::<PyString>()?, x))).collect()
}

/// The same tensors, with their names as text.
fn with_names<'a, 'py>(
    given: &'a [(Bound<'py, PyString>, Bound<'py, PyAny>)],
) -> PyResult<Vec<(&'a str, &'a Bound<'py, PyAny>)>> {
    given.iter().map(|(name, x)| Ok((name.to_str()?, x))).collect()
}

impl<C: Call> Planned<C> {
    /// Computes a call on its device, or checks it if the place is no device. Uses the stream's cached workspace, or one
    /// from `allocate` if the cached workspace is too small or missing.
    ///
    /// # Errors
    /// The call is invalid, the driver reports an error, `allocate` raises, or a bug panicked: no panic gets through.
    fn run(&self, place: Place, call: C, at: &At, allocate: &Allocate) -> Result<(), Error> {
        let result = caught(|| match place {
            Place::Stream { device, stream } => self.launch((device, call), stream, at, allocate),
            Place::Cpu => cpu::run(|| call.compute(at)),
            Place::CheckedForGpu => {
                // The check uses the limits of an H100.
                let limits = DeviceLimits::h100_sxm();
                call.check_plan(&C::Plan::plan(&call.problem()?, &limits, &call.options(limits.sms)?)?)
            }
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
        let plan = self.plans.find(&key, |(ordinal, call)| {
            let problem = call.problem()?;
            let device = devices::open(*ordinal).map_err(OperationError::from)?;
            let options = call.options(device.limits().sms)?;
            let compiled = Compiled::with(&device, &problem, &options)?;
            call.check_plan(compiled.plan())?;
            Ok::<_, Error>(compiled)
        })?;
        self.last.set(Some((key, Arc::clone(&plan))));
        Ok(plan)
    }

    fn launch(&self, key: Key<C>, stream: usize, at: &At, allocate: &Allocate) -> Result<(), Error> {
        let ordinal = key.0;
        let compiled = self.plan(key)?;
        // SAFETY: the Python sources take the stream from torch. It is the current stream of the device, in the primary
        // context like all streams of torch, and alive as long as it is current.
        #[allow(unsafe_code, reason = "torch's streams are plain numbers")]
        let stream = unsafe { Stream::from_raw(compiled.device(), stream) };
        let workspace = Lent::of(&compiled, ordinal, &stream, allocate)?;
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
}
