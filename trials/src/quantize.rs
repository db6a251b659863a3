//! Problems for the quantization kernels. Codes and scales must match fa3-quant bit for bit.
//!
//! ```text
//! (case, seed) → bytes → simulator or GPU → bytes = bytes of fa3_quant::Preparation
//! ```

mod case;
mod trials;

pub use case::{Case, Rows, Spread};
pub(crate) use trials::{small, targets, trials};
