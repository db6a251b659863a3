//! A call of attention over a cache that gets rows before.

use std::num::NonZeroU32;
use std::sync::LazyLock;

use fa3_cuda::host::{Compiled, OperationError};
use fa3_sched::cached::Plan;
use fa3_sched::forward::PlanOptions;
use fa3_types::{AppendRotary, CachedProblem, CachedSpec, ProblemSpec, Sequences, TensorDesc};

use crate::attention::Attention;
use crate::call::{At, Call};
use crate::cpu;
use crate::error::Error;
use crate::kept::Kept;

/// Attention over a cache that gets rows before.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Cached {
    /// The attention; Q is not rotated yet.
    pub(crate) attention: Attention,
    /// New keys and values.
    pub(crate) new: [TensorDesc; 2],
    /// Their sequences.
    pub(crate) sequences: Sequences,
    /// The rotation of new keys and of Q, if any.
    pub(crate) rotary: Option<AppendRotary>,
}

impl Cached {
    /// The problem, of an attention and new rows that are the call's but for their strides.
    ///
    /// # Errors
    /// The call makes no sense.
    pub(crate) fn problem_of(
        &self,
        attention: ProblemSpec,
        new: [TensorDesc; 2],
    ) -> Result<CachedProblem, Error> {
        let mut spec = CachedSpec::new(attention, new, self.sequences);
        spec.rotary = self.rotary;
        Ok(spec.validate().map_err(OperationError::from)?)
    }
}

impl Call for Cached {
    type Plan = Plan;

    fn kept() -> &'static Kept<(u32, Cached), Compiled<Plan>> {
        static KEPT: LazyLock<Kept<(u32, Cached), Compiled<Plan>>> = LazyLock::new(Kept::default);
        &KEPT
    }

    fn problem(&self) -> Result<CachedProblem, Error> {
        self.problem_of(self.attention.spec()?, self.new)
    }

    fn options(&self, sms: NonZeroU32) -> Result<PlanOptions, Error> {
        self.attention.options(sms)
    }

    fn check_for_cpu(&self) -> Result<(), Error> {
        cpu::cached_problem(self).map(drop)
    }

    fn compute(&self, at: &At) -> Result<(), Error> {
        cpu::append_forward(self, at)
    }
}
