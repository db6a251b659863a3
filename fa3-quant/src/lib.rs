//! FP8 for attention on Hopper, on the CPU and bit by bit.
//!
//! ```text
//! x ≈ scale · e4m3(x / scale)      scale = amax / 448, one for each block of rows
//! Q Kᵀ = (Q M)(K M)ᵀ               M = diag(±1) · Hadamard, orthogonal
//! O    ≈ (Σ_j e4m3(2⁸ · 2^(s_j − m)) · V_j) · scale_V / Σ_j 2⁸ · 2^(s_j − m)
//! ```
//!
//! The first two lines are the block quantization and the incoherent processing of FlashAttention-3 (arXiv 2407.08608,
//! §3.3), the third is what its FP8 kernel computes. This crate has
//!
//! - the number format ([`E4m3`]) and the scales ([`Granularity`], [`Quantized`]);
//! - the random orthogonal transform ([`Incoherent`]), rotary embedding ([`Rope`]), and both with quantization in one
//!   pass over memory ([`Preparation`]);
//! - [`Fp8Attention`], which emulates the kernel with the arithmetic of Hopper's tensor cores ([`Accumulation`]), and
//!   [`StandardFp8`], the baseline that the paper compares it with;
//! - [`layout`], the assignment of fragment elements to registers and threads.
//!
//! Arrays are types of `ndarray` 0.17: depend on it to call this crate.
//!
//! ```
//! use fa3_quant::ndarray::Array4;
//! use fa3_quant::{Fp8Attention, Granularity, Incoherent, Preparation};
//! use fa3_types::{Dtype, ProblemSpec, Shape};
//!
//! let shape = Shape { batch: 1, seqlen: 64, heads: 2, head_dim: 32 };
//! let problem = ProblemSpec::dense(Dtype::E4m3, shape, shape).causal().known()?;
//! let wave = |phase: usize| {
//!     Array4::from_shape_fn(shape.dims(), |(_, s, h, d)| ((s * 7 + h * 5 + d * 3 + phase) as f32).sin())
//! };
//!
//! let mixed = Incoherent::new(32, 1);
//! let blocks = Granularity::Block { rows: 128 };
//! let qk = Preparation::new(blocks).incoherent(&mixed);
//! let q = qk.quantize(wave(0).view(), problem.rows_q())?;
//! let k = qk.quantize(wave(1).view(), problem.rows_k())?;
//! let v = Preparation::new(blocks).quantize(wave(2).view(), problem.rows_k())?;
//!
//! let output = Fp8Attention::default().forward(&problem, &q, &k, &v)?;
//! // The first row of a causal problem sees the first key only, so O is V up to the error of 8 bits.
//! assert!((output.o[[0, 0, 0, 5]] - wave(2)[[0, 0, 0, 5]]).abs() < 1.0 / 16.0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

// The number format, its scales, and quantized tensors.
mod e4m3;
mod scale;

mod channels;
mod quantize;

// Transformations of Q and K before quantization.
mod hadamard;
mod rope;

mod fused;

// The tensor core's arithmetic, and attention with this arithmetic.
mod accumulate;
mod key_block;
mod tiles;

mod emulate;
mod standard;

// The fragment layouts are a module of their own.
pub mod layout;

// Sinks, added to O and LSE afterwards.
mod sinks;

mod error;
mod head;
#[cfg(test)]
mod testing;

pub use accumulate::{Accumulation, Operand, Row, rounded_row_sum_loss};
pub use channels::Channels;
pub use e4m3::E4m3;
pub use emulate::Fp8Attention;
pub use error::QuantError;
pub use fa3_types::{Granularity, RopeStyle};
pub use fused::{Preparation, Rotation, RowPositions};
pub use hadamard::Incoherent;
pub use quantize::{Quantized, RowIndex};
pub use rope::{Rope, RopeTable};
pub use scale::Scales;
pub use sinks::add_sinks;
pub use standard::StandardFp8;
pub use tiles::Output;

// Other crates in the interface.
pub use ndarray;

/// The README's Rust code, as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
