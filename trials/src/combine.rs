//! The kernel that merges partial results: problems of every kind, and the merge of [`fa3_ref::combine`], whose
//! numbers must come out.

mod case;
mod trials;

pub use case::{Case, Spread};
pub(crate) use trials::{small, targets, trials};
