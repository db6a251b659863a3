//! Why there are no codes.

use std::path::PathBuf;

use fa3::problem::QuantizeProblemError;

use crate::run::text::extents;

/// Refusals of `fa3 quantize` alone. One sentence each, with the names and the numbers.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
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

/// No way to pair entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected interleaved or halves")]
pub(crate) struct NotAStyle;
