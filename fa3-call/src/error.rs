//! The reasons why a call has no result.

use std::error::Error as StdError;

use fa3_cuda::host::{OperationError, PlacementError};
use fa3_quant::QuantError;
use fa3_types::{Dim, ProblemError, ScoreError};
use rayon::ThreadPoolBuildError;

/// The reason why a call has no result.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub enum Error {
    #[error(transparent)]
    Operation(#[from] OperationError),
    #[error("a tensor is {given}, expected one of f32, f16, bf16 and e4m3")]
    Dtype { given: String },
    #[error("there is no {tensor}")]
    NoTensor { tensor: &'static str },
    #[error("{tensor} has {given} dimensions, expected {expected}")]
    Rank { tensor: &'static str, given: usize, expected: usize },
    #[error("{tensor} has {dims} dimensions and {strides} strides")]
    Dims { tensor: &'static str, dims: usize, strides: usize },
    #[error("{tensor} is {found}, expected {expected}")]
    Tensor { tensor: &'static str, found: String, expected: String },
    #[error("{tensor} has stride {given} in {dim}, which is negative")]
    NegativeStride { tensor: &'static str, dim: Dim, given: i64 },
    #[error("q has {of_q} sequences and k {of_k}, expected as many")]
    Sequences { of_q: usize, of_k: usize },
    #[error("cu_seqlens_k_new is of {given} sequences, expected {expected}")]
    NewSequences { given: usize, expected: usize },
    #[error(transparent)]
    Cpu(#[from] fa3::Error),
    #[error(transparent)]
    Codes(#[from] QuantError),
    #[error(transparent)]
    Score(#[from] ScoreError),
    #[error("sequences of a cache have {capacity} rows, 2^31 or more")]
    CacheRows { capacity: usize },
    #[error("{message}. This is a bug of fa3: it should have computed this, or have said why not")]
    Panic { message: String },
    #[error("there are no threads to compute with: {0}")]
    Threads(#[from] ThreadPoolBuildError),
    #[error("sm_margin {margin} is negative")]
    NegativeMargin { margin: i64 },
    #[error("sm_margin {margin} is outside 0 to {limit}: the device has {sms} sms", limit = sms - 1)]
    SmMargin { margin: i64, sms: u32 },
    #[error("scheduler_metadata has {given} numbers, a call of these tensors takes {needed}")]
    TableWords { given: u32, needed: u32 },
    #[error("{given} is too large or too small a number")]
    Number { given: String },
    #[error("there is no operation {name}")]
    NoOperation { name: String },
    #[error("the operation has no tensor {name}")]
    UnknownTensor { name: String },
    #[error("the operation has no option {name}")]
    UnknownOption { name: String },
    /// An error of the caller's own, such as an exception.
    #[error(transparent)]
    Caller(Box<dyn StdError + Send + Sync>),
}

/// Who can do something about an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The caller: there is no operation, tensor or option of this name.
    Name,
    /// The caller: a tensor, an option or an address is invalid.
    Argument,
    /// The caller, by another implementation: the call is valid, but no kernel computes it.
    Unsupported,
    /// The machine's owner: the driver or the system refuses.
    Machine,
    /// We: a panic is a bug.
    Bug,
}

impl Error {
    /// Who can do something about the error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::NoOperation { .. } | Error::UnknownTensor { .. } | Error::UnknownOption { .. } => {
                ErrorKind::Name
            }
            Error::Threads(_) | Error::Operation(OperationError::Host(_)) => ErrorKind::Machine,
            Error::Panic { .. } => ErrorKind::Bug,
            Error::Operation(error) if error.is_of_plan() => ErrorKind::Unsupported,
            Error::Cpu(fa3::Error::Unknown(_)) => ErrorKind::Unsupported,
            Error::Operation(_)
            | Error::Dtype { .. }
            | Error::NoTensor { .. }
            | Error::Rank { .. }
            | Error::Dims { .. }
            | Error::Tensor { .. }
            | Error::NegativeStride { .. }
            | Error::Sequences { .. }
            | Error::NewSequences { .. }
            | Error::Cpu(_)
            | Error::Codes(_)
            | Error::Score(_)
            | Error::CacheRows { .. }
            | Error::NegativeMargin { .. }
            | Error::SmMargin { .. }
            | Error::TableWords { .. }
            | Error::Number { .. }
            | Error::Caller(_) => ErrorKind::Argument,
        }
    }
}

impl From<ProblemError> for Error {
    fn from(error: ProblemError) -> Error {
        Error::Operation(error.into())
    }
}

impl From<PlacementError> for Error {
    fn from(error: PlacementError) -> Error {
        Error::Operation(error.into())
    }
}
