//! Plans of an append to a KV cache and the attention over that cache.

use std::fmt;

use fa3_types::CachedProblem;

use crate::{DeviceLimits, append, forward};

/// Reasons why no kernels compute the problem.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// No kernel appends the rows.
    #[error(transparent)]
    Append(#[from] append::PlanError),
    /// No kernel computes the attention.
    #[error(transparent)]
    Forward(#[from] forward::PlanError),
}

/// Plan of an append to a KV cache and the attention over that cache.
#[derive(Clone, Debug)]
pub struct Plan {
    append: append::Plan,
    forward: forward::Plan,
}

impl Plan {
    /// Plans the append, and the attention with these options.
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

    /// The plan of the append and of the rotation of queries.
    pub fn append(&self) -> &append::Plan {
        &self.append
    }

    /// The plan of the attention after the append.
    pub fn forward(&self) -> &forward::Plan {
        &self.forward
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\n{}", self.append, self.forward)
    }
}
