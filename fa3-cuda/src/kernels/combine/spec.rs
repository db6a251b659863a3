//! The spec of the reduction kernel.

use fa3_ir::Elem;
use fa3_sched::combine::{Plan, Team};

use crate::kernels::tensors::elem;

/// Everything that the reduction kernel's code depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Spec {
    /// The element type of the parts.
    pub input: Elem,
    /// The element type of O.
    pub output: Elem,
    /// Number of elements of a row.
    pub head_dim: u32,
    /// The team of warps that reduces a row.
    pub team: Team,
}

impl Spec {
    /// The spec of a plan's kernel.
    pub fn of(plan: &Plan) -> Spec {
        let problem = plan.problem();
        Spec {
            input: elem(problem.out_partial().first.dtype),
            output: elem(problem.o().dtype),
            head_dim: problem.shape().head_dim as u32,
            team: plan.team(),
        }
    }
}
