//! Errors of the facade.

use fa3_types::{
    AppendProblemError, CachedProblemError, CombineProblemError, Fp8ProblemError, ProblemError,
    QuantizeProblemError, Scaling, TensorName, UnknownFeature,
};

use crate::CacheError;

#[cfg(feature = "cuda")]
use crate::cuda::{HostError, OperationError};

/// The errors of attention, quantization and reductions.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The problem is invalid; nothing was computed.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// The attention has a feature that the CPU engine does not compute; nothing was computed.
    #[error(transparent)]
    Unknown(#[from] UnknownFeature),
    /// The sequence lists of Q are invalid; nothing was computed.
    #[error("q: {0}")]
    SequencesOfQ(ProblemError),
    /// The sequence lists of K and V are invalid; nothing was computed.
    #[error("k and v: {0}")]
    SequencesOfK(ProblemError),
    /// The sequence lists of new rows are invalid; nothing was computed.
    #[error("new rows: {0}")]
    SequencesOfNewRows(ProblemError),
    /// An array for a result has a wrong shape; nothing was computed.
    #[error("the array for {tensor} has shape {given:?}, expected {expected:?}")]
    OutputShape {
        /// O or LSE.
        tensor: TensorName,
        /// The array's shape.
        given: Vec<usize>,
        /// The result's shape.
        expected: Vec<usize>,
    },
    /// O, LSE, dO, dLSE or the sinks do not have the call's shape, or a part does not have the shape of the first part;
    /// nothing was computed.
    #[error("{tensor} has shape {given:?}, expected {expected:?}")]
    InputShape {
        /// O, LSE, dO, dLSE, the sinks, or O or LSE of a part.
        tensor: TensorName,
        /// The array's shape.
        given: Vec<usize>,
        /// The expected shape.
        expected: Vec<usize>,
    },
    /// A call is not the problem that its builder was given by `for_problem`; nothing was computed.
    #[error("the call is {given}, and it was made for {expected}")]
    OtherProblem {
        /// The call's problem.
        given: String,
        /// The problem that `for_problem` was given.
        expected: String,
    },
    /// A backward pass was given the output of another call; nothing was computed.
    #[error("the output belongs to a call with {given}, this call has {expected}")]
    OtherCall {
        /// A property of the output's call.
        given: String,
        /// The same property of this call.
        expected: String,
    },
    /// The quantization is invalid; nothing was computed.
    #[error(transparent)]
    Quantize(#[from] QuantizeProblemError),
    /// The reduction is invalid; nothing was computed.
    #[error(transparent)]
    Combine(#[from] CombineProblemError),
    /// The LSE of parts is (batch, heads, seqlen), as in [`Output`](crate::Output), in place of (batch, seqlen, heads);
    /// nothing was computed.
    #[error(
        "lse_partial has parts of shape {given:?}, expected (batch, seqlen, heads) {expected:?}: the LSE of Output is \
         (batch, heads, seqlen), which Combine::of takes"
    )]
    LseOrder {
        /// The shape of a part's LSE.
        given: [usize; 3],
        /// The LSE's shape in the order of [`Combine::new`](crate::Combine::new).
        expected: [usize; 3],
    },
    /// The attention is invalid in 8 bits; nothing was computed.
    #[error(transparent)]
    Fp8(#[from] Fp8ProblemError),
    /// The lists of a cache are invalid, or new rows do not fit; nothing was computed, and the cache is unchanged.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// New rows of a cache are invalid; nothing was computed, and the cache is unchanged.
    #[error(transparent)]
    Append(#[from] AppendProblemError),
    /// No kernel takes a quantized tensor with these scales, or none takes these scales with these sequences. The CPU
    /// does.
    #[error("no kernel takes {tensor} with {given} and these sequences")]
    Scales {
        /// Q, K or V.
        tensor: TensorName,
        /// The scaling of the tensor.
        given: Scaling,
    },
    /// The number of positions differs from the number of rows; nothing was computed.
    #[error("{given} positions were given for {batch} sequences of {seqlen} rows")]
    PositionCount {
        /// Number of positions.
        given: usize,
        /// Number of sequences.
        batch: usize,
        /// Number of rows of each sequence.
        seqlen: usize,
    },
    /// Positions were given both by a list and by a first position; nothing was computed.
    #[error("positions were given both as a list and by a first position")]
    TwoPositions,
    /// Positions were given without a rotation; nothing was computed.
    #[error("positions were given without a rotation")]
    PositionsWithoutRotary,
    /// There is no GPU, its kernels do not take the problem, or the driver reports an error.
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
