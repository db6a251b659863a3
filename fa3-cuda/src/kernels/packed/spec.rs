//! The spec of the kernel that writes the table of packed sequences.

use fa3_sched::packed::{Arrays, Plan};
use fa3_types::Mask;

use crate::kernels::parts::geometry::sides;

/// Everything that the kernel's code depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Spec {
    /// Arrays of lengths of Q.
    pub q: Arrays,
    /// Arrays of lengths of K and V.
    pub k: Arrays,
    /// The mask with every bounded side at 0.
    pub mask: Mask,
    /// Number of threads, each of which has a sequence: a power of two from 32 to 1024.
    pub threads: u32,
    /// Whether the kernel also writes the positions of first rows in arrays that pad sequences to whole row blocks.
    pub firsts: bool,
}

impl Spec {
    /// The spec of a plan's kernel.
    pub fn of(plan: &Plan) -> Spec {
        Spec {
            q: plan.q().arrays,
            k: plan.k().arrays,
            mask: sides(plan.mask()),
            threads: plan.threads(),
            firsts: false,
        }
    }

    /// The spec of the kernel that also writes the positions of first rows.
    #[must_use]
    pub fn with_firsts(self) -> Spec {
        Spec { firsts: true, ..self }
    }
}
