//! Errors of the facade.

use fa3_types::{
    AppendProblemError, CachedProblemError, CombineProblemError, Fp8ProblemError, ProblemError,
    QuantizeProblemError, Scaling, TensorName, UnknownFeature,
};

use crate::CacheError;

#[cfg(feature = "cuda")]
use crate::cuda::{HostError, OperationError};

/// Why attention, a quantization or a merge was not computed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The problem makes no sense; nothing was computed.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// The attention has a feature that the CPU engine does not compute; nothing was computed.
    #[error(transparent)]
    Unknown(#[from] UnknownFeature),
    /// The lists that say where the sequences of Q lie make no sense; nothing was computed.
    #[error("q: {0}")]
    SequencesOfQ(ProblemError),
    /// The same for K and V.
    #[error("k and v: {0}")]
    SequencesOfK(ProblemError),
    /// The same for new rows of a cache.
    #[error("new rows: {0}")]
    SequencesOfNewRows(ProblemError),
    /// An array that a result was to go into has another shape; nothing was computed.
    #[error("the array for {tensor} has shape {given:?}, expected {expected:?}")]
    OutputShape {
        /// O or LSE.
        tensor: TensorName,
        /// The array's shape.
        given: Vec<usize>,
        /// The result's shape.
        expected: Vec<usize>,
    },
    /// O, LSE, the gradient of one of them or the sinks have another shape than the attention call says, or a part
    /// another one than the first part; nothing was computed.
    #[error("{tensor} has shape {given:?}, expected {expected:?}")]
    InputShape {
        /// O, LSE, dO, dLSE, the sinks, or O or LSE of a part.
        tensor: TensorName,
        /// The array's shape.
        given: Vec<usize>,
        /// What it must be.
        expected: Vec<usize>,
    },
    /// The output of another call was given to a backward pass; nothing was computed.
    #[error("the output is that of a call with {given}, this call has {expected}")]
    OtherCall {
        /// A part of the call that the output is of.
        given: String,
        /// The same part of this call.
        expected: String,
    },
    /// The quantization makes no sense; nothing was computed.
    #[error(transparent)]
    Quantize(#[from] QuantizeProblemError),
    /// The merge makes no sense; nothing was computed.
    #[error(transparent)]
    Combine(#[from] CombineProblemError),
    /// The LSE of parts has the order of [`Output`](crate::Output), which is another one; nothing was computed.
    #[error(
        "lse_partial has parts of shape {given:?}, expected (batch, seqlen, heads) {expected:?}: the LSE of Output is \
         (batch, heads, seqlen), which Combine::of takes"
    )]
    LseOrder {
        /// The shape of a part's LSE.
        given: [usize; 3],
        /// Its shape in the order of [`Combine::new`](crate::Combine::new).
        expected: [usize; 3],
    },
    /// The attention makes no sense in 8 bits; nothing was computed.
    #[error(transparent)]
    Fp8(#[from] Fp8ProblemError),
    /// The lists of a cache make no sense, or new rows do not fit; nothing was computed, and the cache is as it was.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// New rows of a cache make no sense; nothing was computed, and the cache is as it was.
    #[error(transparent)]
    Append(#[from] AppendProblemError),
    /// No kernel takes such scales of a quantized tensor, or not with these sequences; a CPU does.
    #[error("no kernel takes {tensor} with {given}, or not of these sequences")]
    Scales {
        /// Q, K or V.
        tensor: TensorName,
        /// Its scales.
        given: Scaling,
    },
    /// There are not as many positions as rows; nothing was computed.
    #[error("{given} positions were given for {batch} sequences of {seqlen} rows")]
    PositionCount {
        /// Positions.
        given: usize,
        /// Sequences.
        batch: usize,
        /// Rows of each of them.
        seqlen: usize,
    },
    /// Rows are at the positions of a list and at successive ones; nothing was computed.
    #[error("positions were given as a list and by the first of them")]
    TwoPositions,
    /// Nothing rotates by the positions; nothing was computed.
    #[error("positions were given without a rotation")]
    PositionsWithoutRotary,
    /// There is no GPU, its kernels do not take the problem, or the driver says no.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] OperationError),
}

impl From<CachedProblemError> for Error {
    fn from(error: CachedProblemError) -> Error {
        match error {
            CachedProblemError::Attention(error) => error.into(),
            CachedProblemError::Append(error) => error.into(),
        }
    }
}

#[cfg(feature = "cuda")]
impl From<HostError> for Error {
    fn from(error: HostError) -> Error {
        Error::Cuda(error.into())
    }
}
