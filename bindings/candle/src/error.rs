//! The reasons why a call is refused.

use candle_core::{DType, DeviceLocation, Shape};
use fa3::problem::{ProblemError, TensorName};

/// The reasons why a call is refused. Candle's functions return them as a [`candle_core::Error`] with the same
/// sentence.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("alibi_slopes of shape {shape:?} are given, and there is no attention with alibi slopes")]
    AlibiSlopes { shape: Shape },
    #[error("mm_prefix_ranges of shape {shape:?} are given, and there is no attention with them")]
    PrefixRanges { shape: Shape },
    #[error("{tensor} has shape {shape:?}, expected (blocks, {page_rows}, heads, head_dim)")]
    Pages { tensor: TensorName, shape: Shape, page_rows: usize },
    #[error("sink has shape {shape:?}, expected ({heads}), one number for each head of q")]
    Sink { shape: Shape, heads: usize },
    #[error("attention over a cache has no gradients")]
    CachedGradients,
    #[error("{tensor} has shape {shape:?}, expected (batch, seqlen, heads, head_dim)")]
    Dense { tensor: TensorName, shape: Shape },
    #[error("{tensor} has shape {shape:?}, expected (total, heads, head_dim) of packed sequences")]
    Packed { tensor: TensorName, shape: Shape },
    #[error("{tensor} is {given:?}, expected one of F16, BF16 and F32")]
    Dtype { tensor: TensorName, given: DType },
    #[error("{list} has shape {shape:?}, expected {expected}")]
    ListShape { list: &'static str, shape: Shape, expected: String },
    #[error("{list} is {given:?}, expected U32 or I32")]
    ListDtype { list: &'static str, given: DType },
    #[error("{list} is on {given:?}, and q is on {expected:?}")]
    ListDevice { list: &'static str, given: DeviceLocation, expected: DeviceLocation },
    #[error("{list} has {given} at entry {index}, more than {}", i32::MAX)]
    ListEntry { list: &'static str, index: usize, given: u32 },
    #[error("sequence {index} of {tensor} has {rows} rows, more than max_seqlen {max}")]
    MaxSeqlen { tensor: TensorName, index: usize, rows: i32, max: usize },
    #[error(
        "there is no attention on {given:?}, only on the CPU and, with the feature `cuda`, on a GPU of NVIDIA"
    )]
    Device { given: DeviceLocation },
    #[error(transparent)]
    Attention(#[from] fa3::Error),
}

impl From<ProblemError> for Error {
    fn from(error: ProblemError) -> Error {
        Error::Attention(error.into())
    }
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> candle_core::Error {
        candle_core::Error::wrap(error)
    }
}
