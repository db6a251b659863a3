//! The kernel that merges partial results: problems of every kind, and the merge of [`fa3_ref::combine`], whose
//! numbers must come out.

mod case;
mod trials;

use crate::family::Family;

pub use case::{Case, Spread};

/// The merging kernel.
pub(crate) const FAMILY: Family = Family {
    name: "combine",
    trials: trials::trials,
    small: trials::small,
    schedules: 20,
    targets: trials::targets,
};
