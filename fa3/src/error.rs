//! What can go wrong.

use fa3_types::ProblemError;

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
}
