//! The backward kernels on a case's values: arrays as they lie in memory, gaps and all, and gradients out of them.
//!
//! ```text
//! (plan, values) → program and bytes → simulator or GPU → bytes → dQ, dK, dV
//! ```

mod argued;
mod case;
mod form;
pub(crate) mod intervals;
mod listed;
mod preys;
mod random;
mod trials;

use crate::family::Family;

pub use case::BwdCase;
pub use form::Form;

/// The backward kernels.
pub(crate) const FAMILY: Family =
    Family { name: "bwd", trials: trials::trials, small: trials::small, schedules: 5, preys: preys::preys };
