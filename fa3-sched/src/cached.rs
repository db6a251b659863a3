//! Plans of attention over a cache that gets rows before: that of the append, and that of the attention.

use std::fmt;

use fa3_types::CachedProblem;

use crate::{DeviceLimits, append, forward};

/// Why no kernels compute it.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// No kernel appends the rows.
    #[error(transparent)]
    Append(#[from] append::PlanError),
    /// No kernel computes the attention.
    #[error(transparent)]
    Forward(#[from] forward::PlanError),
}

/// How attention over a cache that gets rows before is computed on a device.
#[derive(Clone, Debug)]
pub struct Plan {
    append: append::Plan,
    forward: forward::Plan,
}

impl Plan {
    /// Decides what the options of the attention leave open.
    ///
    /// # Errors
    /// [`PlanError`].
    pub fn with(
        problem: &CachedProblem,
        limits: &DeviceLimits,
        options: &forward::PlanOptions,
    ) -> Result<Plan, PlanError> {
        Ok(Plan {
            append: append::Plan::new(problem.append())?,
            forward: forward::Plan::with(problem.attention(), limits, options)?,
        })
    }

    /// How rows are appended and queries rotated.
    pub fn append(&self) -> &append::Plan {
        &self.append
    }

    /// The attention afterwards.
    pub fn forward(&self) -> &forward::Plan {
        &self.forward
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\n{}", self.append, self.forward)
    }
}
