//! A call of FP8 attention of 16-bit tensors.

use std::num::NonZeroU32;
use std::sync::LazyLock;

use fa3_cuda::host::{Compiled, OperationError, PlanCache};
use fa3_quant::Incoherent;
use fa3_sched::fp8::Plan;
use fa3_types::{Fp8Problem, Fp8Spec, ProblemSpec, QkRotary};

use crate::arguments::{Options, Tensors};
use crate::attention::Attention;
use crate::call::{At, Call};
use crate::cpu;
use crate::error::Error;
use pyo3::PyResult;

/// FP8 attention of 16-bit tensors.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Fp8Attention {
    /// The attention, of 16-bit tensors.
    pub(crate) attention: Attention,
    /// The rotation of Q and K, if any.
    pub(crate) rotary: Option<QkRotary>,
    /// The seed of the Hadamard transform's signs; no transform if `None`.
    pub(crate) hadamard_seed: Option<u64>,
    /// Whether channels of V have scales and means, in place of blocks of keys.
    pub(crate) v_channels: bool,
}

impl Fp8Attention {
    /// The problem, from the call's attention with other strides.
    ///
    /// # Errors
    /// The call is invalid.
    pub(crate) fn problem_of(&self, attention: ProblemSpec) -> Result<Fp8Problem, Error> {
        let mut spec = Fp8Spec::new(attention);
        (spec.rotary, spec.v_channels) = (self.rotary, self.v_channels);
        let problem = spec.clone().validate().map_err(OperationError::from)?;
        let Some(seed) = self.hadamard_seed else { return Ok(problem) };
        // Every head_dim that was not refused has signs.
        spec.signs = Incoherent::new(problem.attention().head_dim(), seed).signs();
        Ok(spec.validate().map_err(OperationError::from)?)
    }
}

impl Call for Fp8Attention {
    type Plan = Plan;

    fn given(tensors: &Tensors<'_>, options: &Options<'_>) -> PyResult<Fp8Attention> {
        Ok(Fp8Attention {
            attention: Attention::given(tensors, options)?,
            rotary: tensors.qk_rotary(options)?,
            hadamard_seed: options.number("hadamard_seed")?,
            v_channels: options.flag("v_channels")?,
        })
    }

    fn kept() -> &'static PlanCache<(u32, Fp8Attention), Compiled<Plan>> {
        static KEPT: LazyLock<PlanCache<(u32, Fp8Attention), Compiled<Plan>>> =
            LazyLock::new(PlanCache::default);
        &KEPT
    }

    fn problem(&self) -> Result<Fp8Problem, Error> {
        self.problem_of(self.attention.spec()?)
    }

    fn options(&self, _sms: NonZeroU32) -> Result<(), Error> {
        Ok(())
    }

    fn check_for_cpu(&self) -> Result<(), Error> {
        cpu::fp8_problem(self).map(drop)
    }

    fn compute(&self, at: &At) -> Result<(), Error> {
        cpu::fp8_forward(self, at)
    }
}
