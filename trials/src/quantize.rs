//! The quantization kernels: problems of every kind, and codes and scales of fa3-quant, which
//! must come out bit for bit.
//!
//! ```text
//! (case, seed) → bytes → simulator or GPU → bytes = those of fa3_quant::Preparation
//! ```

mod case;
mod trials;

use crate::family::Family;

pub use case::{Case, Rows, Spread};

/// The quantization kernels.
pub(crate) const FAMILY: Family = Family {
    name: "quantize",
    trials: trials::trials,
    small: trials::small,
    schedules: 10,
    targets: trials::targets,
};
