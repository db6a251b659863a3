#![doc = include_str!("../README.md")]
//!
//! # Modules
//!
//! * [`oracle`]: the equations above in f64, row by row, for every [`fa3_types::KnownProblem`]. It shares no
//!   algorithm with the code that it judges: no tiles, no online softmax, no schedule, no quantizer.
//! * [`standard`]: plain attention with scores and probabilities rounded to the input's precision, as a
//!   framework computes it without a fused kernel: the baseline of the error law.
//! * [`tiled`]: Algorithms 1, 2, 3 and 4 of the FlashAttention-3 paper (arXiv 2407.08608) as executable
//!   pseudocode, with the tile sizes of your choice and the kernels' rounding points.
//! * [`norms`] and [`law`]: the distance of a result from another, and the allowed distance. [`rows`]: the law on
//!   selected rows, for a problem that is too large for judging all rows.
//! * [`combine`]: the reduction of partial results.
//! * [`plain`]: expected values and errors of sums, softmax, transposes and products of matrices.
#![forbid(unsafe_code)]

mod append;
mod cache;
mod inputs;
mod lists;
mod output;
mod precision;
mod sink;

pub mod combine;
pub mod law;
pub mod norms;
pub mod oracle;
pub mod plain;
pub mod row_gradients;
pub mod rows;
pub mod standard;
pub mod tiled;

pub use append::{AppendedTo, RotatedRows, with_scales};
pub use cache::{CachedRows, PageTable};
pub use inputs::{Element, InputError, Inputs, OutputGradients};
pub use lists::KeyLists;
pub use output::{Forward, Gradients};
pub use precision::Precision;

// Other crates whose types are in the interface.
pub use {half, ndarray};
