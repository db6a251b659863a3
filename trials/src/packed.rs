//! The kernel that writes the table of packed sequences: batches of every kind, and the table of fa3-sched, which must
//! come out word for word.
//!
//! ```text
//! (case, seed) → lengths → simulator or GPU → words = those of fa3_sched::packed::Plan::table
//! ```

mod case;
mod trials;

pub use case::{Case, Lengths};
pub(crate) use trials::{small, targets, trials};
