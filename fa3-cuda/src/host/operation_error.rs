//! The errors of making and running an operation.

use fa3_sched::{TooManyTiles, append, backward, cached, forward, quantize};
use fa3_types::{
    AppendProblemError, CachedProblemError, CombineProblemError, Fp8ProblemError, ProblemError,
    QuantizeProblemError,
};

use super::{HostError, PlacementError};

/// The errors of making and running an operation.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum OperationError {
    /// An invalid attention problem.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// An invalid quantization.
    #[error(transparent)]
    Quantize(#[from] QuantizeProblemError),
    /// An invalid reduction.
    #[error(transparent)]
    Combine(#[from] CombineProblemError),
    /// An attention problem that is invalid in 8 bits.
    #[error(transparent)]
    Fp8(#[from] Fp8ProblemError),
    /// Invalid rows to append.
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
    /// The tensor is too large for a reduction.
    #[error(transparent)]
    Tiles(#[from] TooManyTiles),
    /// No kernel appends the rows.
    #[error(transparent)]
    AppendPlan(#[from] append::PlanError),
    /// A tensor's address is invalid.
    #[error(transparent)]
    Placement(#[from] PlacementError),
    /// An error of the driver or of the device.
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
    /// Whether the problem is valid, but no kernel computes it.
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
