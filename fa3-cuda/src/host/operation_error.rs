//! Why an operation was not made or not run.

use fa3_sched::{TooManyTiles, append, backward, cached, forward, quantize};
use fa3_types::{
    AppendProblemError, CachedProblemError, CombineProblemError, Fp8ProblemError, ProblemError,
    QuantizeProblemError,
};

use super::{HostError, PlacementError};

/// Why an operation was not made or not run.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum OperationError {
    /// Attention that makes no sense.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// Quantization that makes no sense.
    #[error(transparent)]
    Quantize(#[from] QuantizeProblemError),
    /// A merge that makes no sense.
    #[error(transparent)]
    Combine(#[from] CombineProblemError),
    /// Attention that makes no sense in 8 bits.
    #[error(transparent)]
    Fp8(#[from] Fp8ProblemError),
    /// Rows to append that make no sense.
    #[error(transparent)]
    Append(#[from] AppendProblemError),
    /// No kernel computes the forward pass.
    #[error(transparent)]
    Forward(#[from] forward::PlanError),
    /// No kernels compute the backward pass.
    #[error(transparent)]
    Backward(#[from] backward::PlanError),
    /// No kernel quantizes the tensor.
    #[error(transparent)]
    QuantizePlan(#[from] quantize::PlanError),
    /// The tensor is too large to be merged.
    #[error(transparent)]
    Tiles(#[from] TooManyTiles),
    /// No kernel appends the rows.
    #[error(transparent)]
    AppendPlan(#[from] append::PlanError),
    /// Tensors lie where they cannot.
    #[error(transparent)]
    Placement(#[from] PlacementError),
    /// The driver says no.
    #[error(transparent)]
    Host(#[from] HostError),
}

impl From<CachedProblemError> for OperationError {
    fn from(error: CachedProblemError) -> OperationError {
        match error {
            CachedProblemError::Attention(error) => error.into(),
            CachedProblemError::Append(error) => error.into(),
        }
    }
}

impl From<cached::PlanError> for OperationError {
    fn from(error: cached::PlanError) -> OperationError {
        match error {
            cached::PlanError::Append(error) => error.into(),
            cached::PlanError::Forward(error) => error.into(),
        }
    }
}

impl OperationError {
    /// Whether no kernel computes the problem, though it makes sense.
    pub fn is_of_plan(&self) -> bool {
        matches!(
            self,
            OperationError::Forward(_)
                | OperationError::Backward(_)
                | OperationError::QuantizePlan(_)
                | OperationError::Tiles(_)
                | OperationError::AppendPlan(_)
        )
    }
}
