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

pub use case::BwdCase;
pub use form::Form;
pub(crate) use preys::preys;
pub(crate) use trials::{small, trials};
