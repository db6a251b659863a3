//! Problems for the combine kernel (split-KV reduction), judged by [`fa3_ref::combine`].

mod case;
mod trials;

pub use case::{Case, Spread};
pub(crate) use trials::{small, targets, trials};
