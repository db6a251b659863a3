//! The kernel that appends rows to a cache: problems of every kind, and what plain loops of fa3-ref make of them, which
//! must come out bit for bit, everything that must not change included.
//!
//! ```text
//! (case, seed) → bytes → simulator or GPU → bytes = those of fa3_ref::{AppendedTo, RotatedRows}
//! ```

mod case;
mod inputs;
mod trials;

pub use case::{Base, Cache, CacheLayout, Case, Lengths, New, Queries, Rotation};
pub(crate) use trials::{small, targets, trials};
