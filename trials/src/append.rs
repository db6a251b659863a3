//! Problems for the kernel that appends rows to a KV cache, and a reference of plain loops over fa3-ref. Every byte
//! must match the reference. This includes the bytes that the kernel must not change.
//!
//! ```text
//! (case, seed) → bytes → simulator or GPU → bytes = bytes of fa3_ref::{AppendedTo, RotatedRows}
//! ```

mod case;
mod inputs;
mod trials;

pub use case::{Base, Cache, CacheLayout, Case, Lengths, New, Queries, Rotation};
pub(crate) use trials::{small, targets, trials};
