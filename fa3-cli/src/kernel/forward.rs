//! The forward pass of attention.

use clap::Arg;
use fa3_cuda::kernels::{Spec, fwd};
use fa3_ir::Program;
use fa3_types::{KnownProblem, ProblemError};

use super::OperationError;
use crate::args::plan::PlanArgs;
use crate::args::problem::ProblemArgs;

/// A problem and its plan.
#[derive(Debug, clap::Args)]
#[command(mut_args(with_kernels))]
pub(super) struct ForwardArgs {
    #[command(flatten)]
    problem: ProblemArgs,
    #[command(flatten, next_help_heading = "Plan")]
    plan: PlanArgs,
}

/// There are no kernels of f32.
fn with_kernels(arg: Arg) -> Arg {
    if arg.get_id() == "dtype" { arg.help("f16, bf16 or e4m3") } else { arg }
}

impl ForwardArgs {
    pub(super) fn problem(&self) -> Result<KnownProblem, ProblemError> {
        self.problem.dense().known()
    }

    pub(super) fn program(&self) -> Result<Program<Spec>, OperationError> {
        let problem = self.problem()?;
        let program = fwd::program(&self.plan.plan(&problem)?);
        if program.steps.is_empty() {
            return Err(OperationError::Empty { problem: Box::new((*problem).clone()) });
        }
        Ok(program)
    }
}
