//! Why a call is refused, and which exception says so.

use fa3_cuda::host::{BackwardError, ForwardError, HostError, QuantizeError};
use fa3_quant::QuantError;
use fa3_types::ProblemError;
use pyo3::PyErr;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use rayon::ThreadPoolBuildError;

/// Why there is no result.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Forward(#[from] ForwardError),
    #[error(transparent)]
    Backward(#[from] BackwardError),
    #[error(transparent)]
    Quantize(#[from] QuantizeError),
    #[error("a tensor is {given}, expected one of f32, f16, bf16 and e4m3")]
    Dtype { given: String },
    #[error(transparent)]
    Cpu(#[from] fa3::Error),
    #[error(transparent)]
    Codes(#[from] QuantError),
    #[error("there are no threads to compute with: {0}")]
    Threads(#[from] ThreadPoolBuildError),
    #[error("sm_margin {margin} is negative")]
    NegativeMargin { margin: i64 },
    #[error("sm_margin {margin} is outside 0 to {limit}: the device has {sms} sms", limit = sms - 1)]
    SmMargin { margin: i64, sms: u32 },
    #[error(transparent)]
    Python(#[from] PyErr),
}

impl From<ProblemError> for Error {
    fn from(error: ProblemError) -> Error {
        Error::Forward(error.into())
    }
}

impl From<HostError> for Error {
    fn from(error: HostError) -> Error {
        Error::Forward(error.into())
    }
}

/// What the driver or the system says is a `RuntimeError`, what the caller can mend a `ValueError`, and what Python
/// raised stays it.
impl From<Error> for PyErr {
    fn from(error: Error) -> PyErr {
        let sentence = error.to_string();
        match error {
            Error::Threads(_)
            | Error::Forward(ForwardError::Host(_))
            | Error::Backward(BackwardError::Host(_))
            | Error::Quantize(QuantizeError::Host(_)) => PyRuntimeError::new_err(sentence),
            Error::Python(error) => error,
            Error::Forward(_)
            | Error::Backward(_)
            | Error::Quantize(_)
            | Error::Dtype { .. }
            | Error::Cpu(_)
            | Error::Codes(_)
            | Error::NegativeMargin { .. }
            | Error::SmMargin { .. } => PyValueError::new_err(sentence),
        }
    }
}
