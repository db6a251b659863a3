//! Why there are no codes.

use fa3_sched::TooManyTiles;
use fa3_types::{ProblemError, QuantizeProblemError, TensorName};

use crate::host::HostError;
use crate::host::unfit::Unfit;

/// Why a quantization was not made or not run.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum QuantizeError {
    /// The problem makes no sense, or its tensors lie where they cannot.
    #[error(transparent)]
    Problem(#[from] QuantizeProblemError),
    /// The tensor is too large.
    #[error(transparent)]
    Tiles(#[from] TooManyTiles),
    /// What the driver says.
    #[error(transparent)]
    Host(#[from] HostError),
    /// A tensor does not fit into its memory.
    #[error("{tensor} takes {needed} bytes, its memory has {given}")]
    #[allow(missing_docs, reason = "the message names its fields")]
    BufferSize { tensor: TensorName, given: usize, needed: u64 },
    /// The workspace is too small.
    #[error("the workspace has {given} bytes, quantization needs {needed}")]
    #[allow(missing_docs, reason = "the message names its fields")]
    WorkspaceSize { given: usize, needed: usize },
    /// Memory or a stream that the kernel cannot use.
    #[error("tensors and stream are not all of the device that the plan was made for")]
    OtherDevice,
}

impl From<ProblemError> for QuantizeError {
    fn from(error: ProblemError) -> QuantizeError {
        QuantizeError::Problem(error.into())
    }
}

impl From<Unfit> for QuantizeError {
    fn from(error: Unfit) -> QuantizeError {
        match error {
            Unfit::OtherDevice => QuantizeError::OtherDevice,
            Unfit::WorkspaceSize { given, needed } => QuantizeError::WorkspaceSize { given, needed },
            Unfit::BufferSize { tensor, given, needed } => {
                QuantizeError::BufferSize { tensor, given, needed }
            }
        }
    }
}
