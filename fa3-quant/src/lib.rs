#![doc = include_str!("../README.md")]
//!
//! # What is here
//!
//! - the number format ([`E4m3`]) and the scales ([`Granularity`], [`Quantized`]);
//! - the random orthogonal transform ([`Incoherent`]), rotary embedding ([`Rope`]), and both with quantization in one
//!   pass over memory ([`Preparation`]);
//! - [`Fp8Attention`], which emulates the kernel with the arithmetic of Hopper's tensor cores ([`Accumulation`]), and
//!   [`StandardFp8`], the baseline that the paper compares it with;
//! - [`layout`], the assignment of fragment elements to registers and threads.
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

// Other crates whose types are in the interface.
pub use ndarray;
