//! Why there is no forward pass.

use fa3_sched::forward::PlanError;
use fa3_types::{Dtype, ProblemError, TensorName};

use crate::host::HostError;
use crate::host::unfit::Unfit;

/// Why a forward pass was not made or not run.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ForwardError {
    /// The problem makes no sense, or its tensors lie where they cannot.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// No kernel computes the problem.
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
    /// Memory of elements that are not the problem's, where its type says of which it is (feature `cudarc`).
    #[error("q, k, v and o are of {given}, the problem is of {expected}")]
    #[allow(missing_docs, reason = "the message names its fields")]
    Element { given: Dtype, expected: Dtype },
    /// Memory or a stream that the kernel cannot use.
    #[error("tensors and stream are not all of the device that the plan was made for")]
    OtherDevice,
}

impl From<Unfit> for ForwardError {
    fn from(error: Unfit) -> ForwardError {
        match error {
            Unfit::OtherDevice => ForwardError::OtherDevice,
            Unfit::WorkspaceSize { given, needed } => ForwardError::WorkspaceSize { given, needed },
            Unfit::BufferSize { tensor, given, needed } => ForwardError::BufferSize { tensor, given, needed },
        }
    }
}
