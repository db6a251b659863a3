//! Why there are no codes.

use std::path::PathBuf;

use fa3::QuantError;
use fa3::problem::QuantizeProblemError;

use crate::args::json::NotAlone;
use crate::run::{self, error::extents};
use crate::threads::ThreadsError;

/// Everything that `fa3 quantize` refuses. One sentence each, with the names and the numbers.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub(crate) enum Error {
    /// What every verb that reads and writes files refuses.
    #[error(transparent)]
    File(#[from] run::error::Error),
    #[error(transparent)]
    Threads(#[from] ThreadsError),
    #[error(transparent)]
    Json(#[from] NotAlone),
    #[error("output {} is named .npy, but codes and scales go into one safetensors file", path.display())]
    NpyOutput { path: PathBuf },
    #[error("{tensor} is F32, expected F16 or BF16; --dtype bf16 or --dtype f16 rounds it")]
    Single { tensor: String },
    #[error("{tensor} has shape {}, expected (batch, seqlen, heads, head_dim)", extents(given))]
    Rank { tensor: String, given: Vec<usize> },
    #[error("{tensor} of shape {} has no elements", extents(given))]
    Empty { tensor: String, given: Vec<usize> },
    #[error(transparent)]
    Rope(#[from] QuantError),
    #[error("{tensor}: {source}")]
    Problem { tensor: String, source: QuantizeProblemError },
    /// Of the device.
    #[error(transparent)]
    Compute(fa3::Error),
}

/// No way to pair entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected interleaved or halves")]
pub(crate) struct NotAStyle;
