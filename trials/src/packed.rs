//! Problems for the kernel that writes the tile table of packed sequences. Every word must match the table of
//! fa3-sched.
//!
//! ```text
//! (case, seed) → lengths → simulator or GPU → words = words of fa3_sched::packed::Plan::table
//! ```

mod case;
mod trials;

pub use case::{Case, Lengths};
pub(crate) use trials::{small, targets, trials};
