//! What can go wrong.

use fa3_types::ProblemError;

#[cfg(feature = "cuda")]
use crate::cuda::{ForwardError, HostError};

/// Why attention was not computed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The problem makes no sense; nothing was computed.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// The lists that say where the sequences of Q lie make no sense; nothing was computed.
    #[error("q: {0}")]
    SequencesOfQ(ProblemError),
    /// The same for K and V.
    #[error("k and v: {0}")]
    SequencesOfK(ProblemError),
    /// There is no GPU, its kernels do not take the problem, or the driver says no.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] ForwardError),
}

#[cfg(feature = "cuda")]
impl From<HostError> for Error {
    fn from(error: HostError) -> Error {
        Error::Cuda(error.into())
    }
}
