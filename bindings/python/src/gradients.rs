//! A call of the backward pass.

use std::num::NonZeroU32;
use std::sync::LazyLock;

use fa3_cuda::host::{Compiled, PlanCache};
use fa3_sched::backward::{Plan, PlanOptions};
use fa3_types::{BackwardProblem, BackwardSpec, ProblemError, TensorDesc};

use crate::arguments::{Options, Tensors};
use crate::attention::Attention;
use crate::call::{At, Call};
use crate::error::Error;
use crate::{cpu, devices};
use pyo3::PyResult;

/// A backward pass.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Gradients {
    /// The forward pass.
    pub(crate) forward: Attention,
    /// The gradient of O.
    pub(crate) dout: TensorDesc,
    /// dQ, dK and dV.
    pub(crate) outputs: [TensorDesc; 3],
    /// Whether dQ has the same bits in every run.
    pub(crate) deterministic: bool,
}

impl Gradients {
    /// The problem, with only the mask checked.
    ///
    /// # Errors
    /// [`ProblemError::WindowSize`] or [`ProblemError::AttentionChunk`].
    pub(crate) fn spec(&self) -> Result<BackwardSpec, ProblemError> {
        let mut spec = BackwardSpec::contiguous(self.forward.spec()?);
        (spec.dout, [spec.dq, spec.dk, spec.dv]) = (self.dout, self.outputs);
        Ok(spec)
    }
}

impl Call for Gradients {
    type Plan = Plan;

    fn given(tensors: &Tensors<'_>, options: &Options<'_>) -> PyResult<Gradients> {
        for name in ["dlse", "dsink"] {
            tensors.has(name);
        }
        Ok(Gradients {
            forward: Attention::given(tensors, options)?,
            dout: tensors.desc("dout")?,
            outputs: [tensors.desc("dq")?, tensors.desc("dk")?, tensors.desc("dv")?],
            deterministic: options.flag("deterministic")?,
        })
    }

    fn kept() -> &'static PlanCache<(u32, Gradients), Compiled<Plan>> {
        static KEPT: LazyLock<PlanCache<(u32, Gradients), Compiled<Plan>>> =
            LazyLock::new(PlanCache::default);
        &KEPT
    }

    fn problem(&self) -> Result<BackwardProblem, Error> {
        let problem = self.spec()?.validate()?;
        problem.check_rows()?;
        Ok(problem)
    }

    fn options(&self, sms: NonZeroU32) -> Result<PlanOptions, Error> {
        let mut options = PlanOptions::default().sms(devices::without(sms, self.forward.sm_margin)?);
        options.deterministic = self.deterministic;
        Ok(options)
    }

    fn check_for_cpu(&self) -> Result<(), Error> {
        cpu::backward_problem(self).map(drop)
    }

    fn compute(&self, at: &At) -> Result<(), Error> {
        cpu::backward(self, at)
    }
}
