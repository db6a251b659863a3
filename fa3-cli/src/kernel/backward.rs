//! The backward pass of attention as a kernel to print or run.

use std::num::NonZeroU32;

use clap::Arg;
use fa3_cuda::kernels::{Spec, bwd};
use fa3_ir::Program;
use fa3_sched::DeviceLimits;
use fa3_sched::backward::{Plan, PlanOptions};
use fa3_types::{BackwardProblem, BackwardSpec, KnownProblem};

use super::{OperationError, Reference};
use crate::args::function::FunctionArgs;
use crate::args::number::sms;
use crate::args::problem::ProblemArgs;

/// A problem, and the decisions of its plan.
#[derive(Debug, clap::Args)]
#[command(mut_args(with_kernels))]
pub(super) struct BackwardArgs {
    #[command(flatten)]
    problem: ProblemArgs,
    #[command(flatten)]
    function: FunctionArgs,
    /// Computes gradients that are the same bits in every run, however many keys rows see
    #[arg(long, help_heading = "Plan")]
    deterministic: bool,
    /// Number of streaming multiprocessors of the GPU
    #[arg(long, value_name = "N", default_value_t = DeviceLimits::h100_sxm().sms, value_parser = sms(), help_heading = "Plan")]
    sms: NonZeroU32,
}

/// Adapts an option to the kernels. There are no f32 kernels, and the e4m3 options do not apply, since e4m3 has no
/// gradients.
fn with_kernels(arg: Arg) -> Arg {
    match arg.get_id().as_str() {
        "dtype" => arg.help("f16 or bf16"),
        "v_transposed" | "block_scales" | "v_channels" => arg.hide(true),
        _ => arg,
    }
}

impl BackwardArgs {
    pub(super) fn reference(&self) -> Result<Reference, OperationError> {
        let (problem, known) = self.problem()?;
        Ok(Reference::Gradients { problem: Box::new(problem), known: Box::new(known) })
    }

    /// The problem, and its forward problem with the tables of the function of scores.
    fn problem(&self) -> Result<(BackwardProblem, KnownProblem), OperationError> {
        let known = self.function.of(self.problem.dense().known()?)?;
        Ok((BackwardSpec::contiguous(known.spec()).validate()?, known))
    }

    pub(super) fn program(&self) -> Result<Program<Spec>, OperationError> {
        let (problem, _) = self.problem()?;
        let options = PlanOptions::default();
        let options = if self.deterministic { options.deterministic() } else { options };
        let plan = Plan::with(&problem, &DeviceLimits::h100_sxm().sms(self.sms), &options)?;
        let program = bwd::program(&plan);
        if program.steps.is_empty() {
            return Err(OperationError::Empty { problem: Box::new(problem.forward().clone()) });
        }
        Ok(program)
    }
}
