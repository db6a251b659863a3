//! The backward kernels on a case's values: arrays as they lie in memory, gaps and all, and gradients out of them.
//!
//! ```text
//! (plan, values) → program and bytes → simulator or GPU → bytes → dQ, dK, dV
//! ```

mod case;
mod equivalent;
mod form;
pub(crate) mod intervals;
mod listed;
mod random;
mod targets;
mod trials;

use crate::family::Family;

pub use case::BwdCase;
pub use form::Form;
pub use trials::{DISTS, MASKS};

/// The backward kernels.
pub(crate) const FAMILY: Family = Family {
    name: "bwd",
    trials: trials::trials,
    small: trials::small,
    schedules: 5,
    targets: targets::targets,
};
