//! Backward trials: writes arrays in their memory layouts, gaps included, and reads the gradients back.
//!
//! ```text
//! (plan, values) → program and bytes → simulator or GPU → bytes → dQ, dK, dV
//! ```

pub mod blocks;
mod case;
mod equivalent;
mod form;
mod functions;
pub(crate) mod intervals;
mod listed;
mod random;
mod targets;
mod trials;

pub use case::BwdCase;
pub use form::Form;
pub(crate) use targets::targets;
pub(crate) use trials::{small, trials};
