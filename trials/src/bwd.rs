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

pub use case::BwdCase;
pub use form::Form;
pub(crate) use targets::targets;
pub(crate) use trials::{small, trials};
