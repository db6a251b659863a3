//! A call that writes the table of packed sequences, which forward passes share.

use std::num::NonZeroU32;
use std::sync::LazyLock;

use fa3_cuda::host::{Compiled, OperationError, PlanCache};
use fa3_sched::DeviceLimits;
use fa3_sched::forward::{PlanOptions, TablePlan};
use fa3_types::Problem;

use crate::arguments::{Options, Tensors};
use crate::attention::Attention;
use crate::call::{At, Call};
use crate::error::Error;
use pyo3::PyResult;

/// The table of a forward pass.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Table(pub(crate) Attention);

impl Table {
    /// The number of words of the table, which does not depend on the device.
    ///
    /// # Errors
    /// The call is invalid, or takes no table.
    pub(crate) fn words(&self) -> Result<u32, Error> {
        let limits = DeviceLimits::h100_sxm();
        let plan = TablePlan::with(&self.problem()?, &limits, &self.options(limits.sms)?);
        Ok(plan.map_err(OperationError::from)?.table().words())
    }
}

impl Call for Table {
    type Plan = TablePlan;

    fn given(tensors: &Tensors<'_>, options: &Options<'_>) -> PyResult<Table> {
        let attention = Attention::given(tensors, options)?;
        Ok(Table(Attention { table: None, ..attention }))
    }

    fn takes(&self, tensor: &str) -> bool {
        !matches!(tensor, "q" | "k" | "v")
    }

    fn kept() -> &'static PlanCache<(u32, Table), Compiled<TablePlan>> {
        static KEPT: LazyLock<PlanCache<(u32, Table), Compiled<TablePlan>>> =
            LazyLock::new(PlanCache::default);
        &KEPT
    }

    fn problem(&self) -> Result<Problem, Error> {
        self.0.problem()
    }

    fn options(&self, sms: NonZeroU32) -> Result<PlanOptions, Error> {
        self.0.options(sms)
    }

    fn check_for_cpu(&self) -> Result<(), Error> {
        self.0.check_for_cpu()
    }

    /// The CPU needs no table.
    fn compute(&self, _at: &At) -> Result<(), Error> {
        Ok(())
    }
}
