//! The plan of a varlen table that several forward passes share.

use fa3_types::Problem;

use super::{Plan, PlanError, PlanOptions};
use crate::{DeviceLimits, packed};

/// The varlen table alone, which a kernel writes once for the forward passes of a model's layers. These are planned
/// with [`PlanOptions::given_table`].
///
/// ```
/// use fa3_sched::DeviceLimits;
/// use fa3_sched::forward::{Plan, PlanOptions, TablePlan};
/// use fa3_types::{Dtype, ProblemSpec, SequenceRows};
///
/// let rows = SequenceRows::packed(&[0, 300, 1000])?;
/// let problem = ProblemSpec::packed(Dtype::Bf16, (8, 2), 128, &rows, &rows).causal().validate()?;
/// let (limits, options) = (DeviceLimits::h100_sxm(), PlanOptions::default());
/// let table = TablePlan::with(&problem, &limits, &options)?;
/// let layer = Plan::with(&problem, &limits, &options.given_table())?;
/// assert_eq!(Some(table.table()), layer.table());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct TablePlan {
    table: packed::Plan,
}

impl TablePlan {
    /// The table of a problem's forward pass with these options.
    ///
    /// # Errors
    /// The errors of [`Plan::with`], and [`PlanError::GivenTable`] if the forward pass takes no given table.
    pub fn with(
        problem: &Problem,
        limits: &DeviceLimits,
        options: &PlanOptions,
    ) -> Result<TablePlan, PlanError> {
        let plan = Plan::with(problem, limits, &options.given_table())?;
        plan.table().map(|&table| TablePlan { table }).ok_or(PlanError::GivenTable)
    }

    /// The table.
    pub fn table(&self) -> &packed::Plan {
        &self.table
    }
}
