//! A call of the backward pass.

use std::num::NonZeroU32;

use fa3_sched::backward::{Plan, PlanOptions};
use fa3_types::{BackwardProblem, BackwardSpec, Dtype, ScoreGradients, TensorDesc};

use crate::attention::{Attention, Numbers, Pass, is_packed};
use crate::call::Call;
use crate::devices;
use crate::error::Error;
use crate::options::Options;
use crate::tensors::Tensors;

/// A backward pass.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Gradients {
    /// The forward pass.
    pub forward: Attention,
    /// The gradient of O.
    pub dout: TensorDesc,
    /// dQ, dK and dV.
    pub outputs: [TensorDesc; 3],
    /// Whether dQ has the same bits in every run.
    pub deterministic: bool,
    /// The tables of the function of scores whose gradients are outputs.
    pub score_gradients: ScoreGradients,
}

impl Gradients {
    /// The problem, checked as [`Attention::spec`] does.
    ///
    /// # Errors
    /// The errors of [`Attention::spec`].
    pub fn spec(&self) -> Result<BackwardSpec, Error> {
        let mut spec = BackwardSpec::contiguous(self.forward.spec()?);
        let score = spec.forward.score.take();
        spec.forward.score = score.map(|form| form.with_gradients(self.score_gradients));
        (spec.dout, [spec.dq, spec.dk, spec.dv]) = (self.dout, self.outputs);
        Ok(spec)
    }
}

impl Call for Gradients {
    type Plan = Plan;

    type Numbers = (Numbers, bool);

    fn numbers(options: &Options<'_>) -> Result<(Numbers, bool), Error> {
        Ok((Attention::numbers(options)?, options.flag("deterministic")?))
    }

    fn given(
        tensors: &mut Tensors<'_>,
        (numbers, deterministic): &(Numbers, bool),
    ) -> Result<Gradients, Error> {
        let forward = Attention::of(tensors, numbers, Pass::Backward)?;
        let ([q, k, v], is_packed) = (forward.inputs, is_packed(forward.sequences));
        tensors.check_lse("lse", q.shape, is_packed)?;
        tensors.check_lse("dlse", q.shape, is_packed)?;
        tensors.has_output("dsink", Dtype::F32)?;
        let score_gradients = tensors.score_gradients(forward.numbers.score.as_ref())?;
        let mut gradient = |name, of| tensors.gradient(name, of, is_packed);
        Ok(Gradients {
            outputs: [gradient("dq", q)?, gradient("dk", k)?, gradient("dv", v)?],
            dout: tensors.like_o("dout", forward.o, is_packed)?,
            forward,
            deterministic: *deterministic,
            score_gradients,
        })
    }

    fn problem(&self) -> Result<BackwardProblem, Error> {
        let problem = self.spec()?.validate()?;
        problem.check_rows()?;
        Ok(problem)
    }

    fn options(&self, sms: NonZeroU32) -> Result<PlanOptions, Error> {
        let mut options = PlanOptions::default().sms(devices::without(sms, self.forward.numbers.sm_margin)?);
        options.deterministic = self.deterministic;
        Ok(options)
    }
}
