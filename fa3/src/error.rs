//! What can go wrong.

use fa3_types::ProblemError;

/// Why attention was not computed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The problem makes no sense; nothing was computed.
    #[error(transparent)]
    Problem(#[from] ProblemError),
}
