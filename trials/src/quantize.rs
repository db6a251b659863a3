//! The quantization kernels: problems of every kind, and codes and scales of fa3-quant, which
//! must come out bit for bit.
//!
//! ```text
//! (case, seed) → bytes → simulator or GPU → bytes = those of fa3_quant::Preparation
//! ```

mod case;
mod trials;

pub use case::{Case, Rows, Spread};
pub(crate) use trials::{small, targets, trials};
