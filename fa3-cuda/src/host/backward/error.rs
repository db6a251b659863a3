//! Why there is no backward pass.

use fa3_sched::backward::PlanError;
use fa3_types::{ProblemError, TensorName};

use crate::host::HostError;
use crate::host::unfit::Unfit;

/// Why a backward pass was not made or not run.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum BackwardError {
    /// The problem makes no sense, or its tensors lie where they cannot.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// No kernels compute the problem.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// What the driver says.
    #[error(transparent)]
    Host(#[from] HostError),
    /// A tensor does not fit into its memory.
    #[error("{tensor} takes {needed} bytes, its memory has {given}")]
    #[allow(missing_docs, reason = "the message names its fields")]
    BufferSize { tensor: TensorName, given: usize, needed: u64 },
    /// The workspace is too small.
    #[error("the workspace has {given} bytes, {needed} are needed")]
    #[allow(missing_docs, reason = "the message names its fields")]
    WorkspaceSize { given: usize, needed: usize },
    /// Memory or a stream that the kernels cannot use.
    #[error("tensors and stream are not all of the device that the plan was made for")]
    OtherDevice,
}

impl From<Unfit> for BackwardError {
    fn from(error: Unfit) -> BackwardError {
        match error {
            Unfit::OtherDevice => BackwardError::OtherDevice,
            Unfit::WorkspaceSize { given, needed } => BackwardError::WorkspaceSize { given, needed },
            Unfit::BufferSize { tensor, given, needed } => {
                BackwardError::BufferSize { tensor, given, needed }
            }
        }
    }
}
