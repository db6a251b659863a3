//! Attention over a KV cache: pages, left padding, valid lengths (seqused), with and without split-KV.
//!
//! ```text
//! (case, seed) → values of contiguous sequences → pages → simulator or GPU → O, LSE = results of the contiguous
//! sequences
//! ```

mod case;
mod targets;
mod trials;

pub use case::{Case, Keys, Pages, Queries};
pub(crate) use targets::targets;
pub use trials::{in_pieces, paged, random, random_wide};
pub(crate) use trials::{small, trials};
