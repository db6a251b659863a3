//! The reasons why a call is refused, and their Python exceptions.

use fa3_cuda::host::{OperationError, PlacementError};
use fa3_quant::QuantError;
use fa3_types::{Dim, ProblemError};
use pyo3::PyErr;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use rayon::ThreadPoolBuildError;

/// The reason why a call has no result.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Operation(#[from] OperationError),
    #[error("a tensor is {given}, expected one of f32, f16, bf16 and e4m3")]
    Dtype { given: String },
    #[error("there is no {tensor}")]
    NoTensor { tensor: &'static str },
    #[error("{tensor} has {given} dimensions, expected {expected}")]
    Rank { tensor: &'static str, given: usize, expected: usize },
    #[error("{tensor} has stride {given} in {dim}, which is negative")]
    NegativeStride { tensor: &'static str, dim: Dim, given: i64 },
    #[error(transparent)]
    Cpu(#[from] fa3::Error),
    #[error(transparent)]
    Codes(#[from] QuantError),
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
    #[error(transparent)]
    Python(#[from] PyErr),
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

/// A refusal of the driver or the system, or a panic, becomes a `RuntimeError`. An error that the caller can correct
/// becomes a `ValueError`. An exception of Python stays the same exception.
impl From<Error> for PyErr {
    fn from(error: Error) -> PyErr {
        let sentence = in_torchs_words(&error.to_string());
        match error {
            Error::Threads(_) | Error::Panic { .. } | Error::Operation(OperationError::Host(_)) => {
                PyRuntimeError::new_err(sentence)
            }
            Error::Python(error) => error,
            Error::Operation(_)
            | Error::Dtype { .. }
            | Error::NoTensor { .. }
            | Error::Rank { .. }
            | Error::NegativeStride { .. }
            | Error::Cpu(_)
            | Error::Codes(_)
            | Error::CacheRows { .. }
            | Error::NegativeMargin { .. }
            | Error::SmMargin { .. }
            | Error::TableWords { .. } => PyValueError::new_err(sentence),
        }
    }
}

/// The sentence with torch's names for the types of elements.
pub(crate) fn in_torchs_words(sentence: &str) -> String {
    let pieces = sentence.split_inclusive(|c: char| !c.is_ascii_alphanumeric());
    let renamed = pieces.map(|piece| {
        let word = piece.trim_end_matches(|c: char| !c.is_ascii_alphanumeric());
        let name = match word {
            "f32" => "torch.float32",
            "f16" => "torch.float16",
            "bf16" => "torch.bfloat16",
            "e4m3" => "torch.float8_e4m3fn",
            "i32" => "torch.int32",
            other => other,
        };
        [name, &piece[word.len()..]].concat()
    });
    renamed.collect()
}
