// The examples of the README open a GPU, which only the feature `cuda` can do.
#![cfg_attr(any(feature = "cuda", not(doctest)), doc = include_str!("../README.md"))]
//!
//! # Where to begin
//!
//! - [`Attention`]: a call, its [`Output`], its [`Gradients`]; [`Device`]: the place where it is computed.
//! - [`CachedAttention`] over a [`KvCache`] or a [`CacheView`]; [`NewRows`] that are appended first.
//! - [`SparseAttention`] over listed rows of a [`ListedCache`].
//! - [`Quantize`] and [`Fp8`]: 8 bits. [`Combine`]: a reduction of partial results.
//! - [`problem`]: computations as plain data. `fa3::cuda`: tensors in a GPU's memory.
#![forbid(unsafe_code)]

mod attention;
mod backward;
mod cache;
mod combine;
mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod device;
mod error;
mod fp8;
mod gradients;
mod output;
pub mod problem;
mod quantize;
mod results;
mod scalar;
mod scales;
mod scores;
mod sparse;

pub use attention::Attention;
pub use cache::{CacheError, CacheView, CacheViewMut, CachedAttention, KvCache, NewRows};
pub use combine::{Combine, Combined};
pub use device::Device;
pub use error::Error;
pub use fp8::Fp8;
pub use gradients::{Gradients, OutputGradients};
pub use output::Output;
pub use quantize::{Quantize, Quantized};
pub use scalar::Scalar;
pub use sparse::{ListedCache, SparseAttention};

pub use fa3_quant::{E4m3, QuantError, Rope, RopeStyle, RopeTable};
pub use fa3_types::{LseForm, Mask, Scaling, ScoreError, ScoreFunction, ScoreTable, ScoreValue};
pub use {half, ndarray};
