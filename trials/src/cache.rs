//! Attention over a cache: pages, padding, parts in use, with keys shared by CTAs or not.
//!
//! ```text
//! (case, seed) → values of contiguous sequences → pages → simulator or GPU → O, LSE = those of the sequences
//! ```

mod case;
mod preys;
mod trials;

use crate::family::Family;

pub use case::{Case, Keys, Pages, Queries};
pub use trials::{in_pieces, paged, random, random_wide};

/// Kernels that read a cache.
pub(crate) const FAMILY: Family =
    Family { name: "cache", trials: trials::trials, small: trials::small, schedules: 5, preys: preys::preys };
