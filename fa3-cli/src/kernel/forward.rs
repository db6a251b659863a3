//! The forward pass of attention as a kernel to print or run.

use clap::Arg;
use fa3_cuda::kernels::{Spec, fwd};
use fa3_ir::Program;
use fa3_types::{KnownProblem, Problem};

use super::{OperationError, Reference};
use crate::args::cache::CacheArgs;
use crate::args::function::FunctionArgs;
use crate::args::plan::PlanArgs;
use crate::args::problem::ProblemArgs;

/// A problem and its plan.
#[derive(Debug, clap::Args)]
#[command(mut_args(with_kernels))]
pub(super) struct ForwardArgs {
    #[command(flatten)]
    problem: ProblemArgs,
    #[command(flatten)]
    function: FunctionArgs,
    #[command(flatten, next_help_heading = "Cache")]
    cache: CacheArgs,
    #[command(flatten, next_help_heading = "Plan")]
    plan: PlanArgs,
}

/// Adapts an option to the kernels: there are no f32 kernels, and no attention over a cache with functions of scores.
fn with_kernels(arg: Arg) -> Arg {
    match arg.get_id().as_str() {
        "dtype" => arg.help("f16, bf16 or e4m3"),
        "cache_seqlens" => arg.conflicts_with("text"),
        _ => arg,
    }
}

impl ForwardArgs {
    pub(super) fn reference(&self) -> Result<Reference, OperationError> {
        Ok(match self.cache.problem(&self.problem)? {
            Some(problem) => Reference::Cache(Box::new(problem)),
            None => Reference::Attention(Box::new(self.dense()?)),
        })
    }

    /// The problem without a cache.
    fn dense(&self) -> Result<KnownProblem, OperationError> {
        Ok(self.function.of(self.problem.dense().known()?)?)
    }

    pub(super) fn program(&self) -> Result<Program<Spec>, OperationError> {
        let (problem, program) = match self.cache.problem(&self.problem)? {
            Some(problem) => (problem.attention().clone(), problem.plan(&self.plan)?.program()),
            None => {
                let problem = self.dense()?;
                let program = fwd::program(&self.plan.plan(&problem)?);
                (Problem::clone(&problem), program)
            }
        };
        if program.steps.is_empty() {
            return Err(OperationError::Empty { problem: Box::new(problem) });
        }
        Ok(program)
    }
}
