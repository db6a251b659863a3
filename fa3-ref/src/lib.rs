//! The oracle that judges every other implementation of attention in this workspace.
//!
//! ```text
//! S  = softmax_scale · Q Kᵀ     X  = mask(cap(S))     P = softmax(X)     O = P V     LSE = ln Σ exp(X)
//! dV = Pᵀ dO     dP = dO Vᵀ     dS = P ∘ (dP − rowsum(dO ∘ O)) ∘ cap'(S)
//! dQ = softmax_scale · dS K     dK = softmax_scale · dSᵀ Q
//! ```
//!
//! If a head has a sink, it is the logit of one more key, whose value is 0.
//!
//! * [`oracle`]: these equations in f64, row by row, for every [`fa3_types::KnownProblem`]. It shares no algorithm with
//!   the code that it judges: no tiles, no online softmax, no schedule, no quantizer.
//! * [`standard`]: plain attention with scores and probabilities rounded to the input's precision, as a
//!   framework computes it without a fused kernel: the baseline of the error law.
//! * [`tiled`]: Algorithms 1, 2, 3 and 4 of the FlashAttention-3 paper (arXiv 2407.08608) as executable
//!   pseudocode, with the tile sizes of your choice and the kernels' rounding points.
//! * [`norms`] and [`law`]: the distance of a result from another, and the allowed distance. [`rows`]: the law on
//!   selected rows of a problem too large for all of them.
//! * [`combine`]: the reduction of partial results.
//! * [`plain`]: expected values and errors of sums, softmax, transposes and products of matrices.
//!
//! Arrays are types of `ndarray` 0.17, 16-bit floats types of `half` 2, which this crate re-exports.
//!
//! ```
//! use fa3_ref::ndarray::Array4;
//! use fa3_ref::{Inputs, Precision, law::ForwardLaw, tiled};
//! use fa3_types::{Dtype, ProblemSpec, Shape};
//!
//! let shape = Shape { batch: 1, seqlen: 48, heads: 2, head_dim: 16 };
//! let problem = ProblemSpec::dense(Dtype::F32, shape, shape).causal().known()?;
//! let x = Array4::from_shape_fn(shape.dims(), |(_, s, h, d)| ((s * 7 + h * 5 + d * 3) % 11) as f32 - 5.0);
//! let inputs = Inputs::new(&problem, x.view(), x.view(), x.view())?;
//!
//! let tiles = tiled::Tiles::new(16, 32)?;
//! let flash = tiled::forward(&inputs, tiled::Algorithm::TwoStage, tiles, Precision::F32);
//! ForwardLaw::new(&inputs, Precision::F32).check(&flash, "cargo test --doc -p fa3-ref")?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod append;
mod cache;
mod inputs;
mod output;
mod precision;
mod sink;

pub mod combine;
pub mod law;
pub mod norms;
pub mod oracle;
pub mod plain;
pub mod rows;
pub mod standard;
pub mod tiled;

pub use append::{AppendedTo, RotatedRows, with_scales};
pub use cache::{CachedRows, PageTable};
pub use inputs::{Element, InputError, Inputs, OutputGradients};
pub use output::{Forward, Gradients};
pub use precision::Precision;

// Other crates in the interface.
pub use {half, ndarray};

/// The README's Rust code, as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
