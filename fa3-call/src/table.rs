//! A call that writes the table of packed sequences, which forward passes share.

use std::num::NonZeroU32;

use fa3_cuda::host::OperationError;
use fa3_sched::DeviceLimits;
use fa3_sched::forward::{PlanOptions, TablePlan};
use fa3_types::Problem;

use crate::attention::{Attention, Numbers, Pass};
use crate::call::Call;
use crate::error::Error;
use crate::options::Options;
use crate::tensors::Tensors;

/// A call that writes the table for this forward pass.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Table(pub Attention);

impl Call for Table {
    type Plan = TablePlan;
    type Numbers = Numbers;

    fn numbers(options: &Options<'_>) -> Result<Numbers, Error> {
        Attention::numbers(options)
    }

    fn given(tensors: &mut Tensors<'_>, numbers: &Numbers) -> Result<Table, Error> {
        let attention = Attention::of(tensors, numbers, Pass::Forward)?;
        Ok(Table(Attention { table: None, ..attention }))
    }

    /// The number of words of the table. It is the same on every device.
    fn words(&self) -> Result<Option<u32>, Error> {
        let limits = DeviceLimits::h100_sxm();
        let plan = TablePlan::with(&self.problem()?, &limits, &self.options(limits.sms)?);
        Ok(Some(plan.map_err(OperationError::from)?.table().words()))
    }

    fn takes(&self, tensor: &str) -> bool {
        !matches!(tensor, "q" | "k" | "v")
    }

    fn problem(&self) -> Result<Problem, Error> {
        self.0.problem()
    }

    fn options(&self, sms: NonZeroU32) -> Result<PlanOptions, Error> {
        self.0.options(sms)
    }
}
