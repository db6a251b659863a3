//! Errors of `fa3 quantize`.

use std::path::PathBuf;

use fa3::problem::QuantizeProblemError;

use crate::run::text::extents;

/// Errors that only `fa3 quantize` has. Each message is one sentence with names and numbers.
#[derive(Debug, thiserror::Error)]
pub(crate) enum QuantizeRefusal {
    #[error("output {} is named .npy, but codes and scales go into one safetensors file", path.display())]
    NpyOutput { path: PathBuf },
    #[error("{tensor} is F32, expected F16 or BF16; --dtype bf16 or --dtype f16 rounds it")]
    Single { tensor: String },
    #[error("{tensor} of shape {} has no elements", extents(given))]
    Empty { tensor: String, given: Vec<usize> },
    #[error("{tensor}: {source}")]
    Problem { tensor: String, source: QuantizeProblemError },
}
