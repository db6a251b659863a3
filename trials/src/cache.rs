//! Attention over a cache: pages, padding, parts in use, with keys shared by CTAs or not.
//!
//! ```text
//! (case, seed) → values of contiguous sequences → pages → simulator or GPU → O, LSE = those of the sequences
//! ```

mod case;
mod targets;
mod trials;

pub use case::{Case, Keys, Pages, Queries};
pub(crate) use targets::targets;
pub use trials::{in_pieces, paged, random, random_wide};
pub(crate) use trials::{small, trials};
