//! A call of an operation.

use std::hash::Hash;
use std::num::NonZeroU32;

use fa3_cuda::host::{Compiled, Operation, OperationError};
use fa3_sched::DeviceLimits;

use crate::devices;
use crate::error::Error;
use crate::options::Options;
use crate::tensors::Tensors;

/// The addresses of a call's tensors, by their names. Tensors that are left out have no entry.
pub type At = [(&'static str, Option<u64>)];

/// A call: everything that its plan depends on, except for the device. Equal calls share a plan.
pub trait Call: Clone + Eq + Hash + Send + Sync + 'static {
    /// The operation's plan.
    type Plan: Operation + Send + Sync + 'static;

    /// Options of the operation.
    type Numbers: Send + Sync + 'static;

    /// The operation's options, by their names.
    ///
    /// # Errors
    /// An option is of another type.
    fn numbers(options: &Options<'_>) -> Result<Self::Numbers, Error>;

    /// Makes the call from these tensors and options.
    ///
    /// # Errors
    /// A tensor is missing or invalid.
    fn given(tensors: &mut Tensors<'_>, numbers: &Self::Numbers) -> Result<Self, Error>;

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

    /// Plans and compiles the call for a GPU.
    ///
    /// # Errors
    /// The call is invalid, no kernel computes it, or the driver reports an error.
    fn compile(&self, ordinal: u32) -> Result<Compiled<Self::Plan>, Error> {
        let problem = self.problem()?;
        let device = devices::open_device(ordinal).map_err(OperationError::from)?;
        let compiled = Compiled::with(&device, &problem, &self.options(device.limits().sms)?)?;
        self.check_plan(compiled.plan())?;
        Ok(compiled)
    }

    /// Plans the call for a GPU with these limits.
    ///
    /// # Errors
    /// The call is invalid, or no kernel computes it.
    fn plan(&self, limits: &DeviceLimits) -> Result<Self::Plan, Error> {
        let plan = Self::Plan::plan(&self.problem()?, limits, &self.options(limits.sms)?)?;
        self.check_plan(&plan)?;
        Ok(plan)
    }

    /// Checks the call by the rules of an H100.
    ///
    /// # Errors
    /// The call is invalid, or no kernel computes it.
    fn check_for_gpu(&self) -> Result<(), Error> {
        self.plan(&DeviceLimits::h100_sxm()).map(drop)
    }
}
