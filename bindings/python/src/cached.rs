//! A call of attention over a cache to which new rows are first appended.

use std::num::NonZeroU32;
use std::sync::LazyLock;

use fa3_cuda::host::{Compiled, OperationError, PlanCache};
use fa3_sched::cached::Plan;
use fa3_sched::forward::PlanOptions;
use fa3_types::{AppendRotary, CachedProblem, CachedSpec, ProblemSpec, Sequences, TensorDesc};

use crate::arguments::{Options, Tensors};
use crate::attention::Attention;
use crate::call::{At, Call};
use crate::cpu;
use crate::error::Error;
use pyo3::PyResult;

/// Attention over a cache to which new rows are first appended.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Cached {
    /// The attention; Q is not rotated yet.
    pub(crate) attention: Attention,
    /// New keys and values.
    pub(crate) new: [TensorDesc; 2],
    /// The sequences of new keys and values.
    pub(crate) sequences: Sequences,
    /// The rotation of new keys and of Q, if any.
    pub(crate) rotary: Option<AppendRotary>,
}

impl Cached {
    /// The problem, from the call's attention and new rows with other strides.
    ///
    /// # Errors
    /// The call is invalid.
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

    fn given(tensors: &Tensors<'_>, options: &Options<'_>) -> PyResult<Cached> {
        let attention = Attention::given(tensors, options)?;
        let new = [tensors.desc("k_new")?, tensors.desc("v_new")?];
        let count = tensors.extents("cu_seqlens_k_new")?.map(|[numbers]| numbers.saturating_sub(1));
        let dense = Sequences::dense(new[0].shape.batch, new[0].shape.seqlen);
        let sequences = count.map_or(dense, Sequences::packed);
        Ok(Cached { attention, new, sequences, rotary: tensors.append_rotary(options)? })
    }

    fn kept() -> &'static PlanCache<(u32, Cached), Compiled<Plan>> {
        static KEPT: LazyLock<PlanCache<(u32, Cached), Compiled<Plan>>> = LazyLock::new(PlanCache::default);
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
