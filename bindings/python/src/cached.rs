//! A call of attention over a cache to which new rows are first appended.

use std::num::NonZeroU32;

use fa3_cuda::host::OperationError;
use fa3_sched::cached::Plan;
use fa3_sched::forward::PlanOptions;
use fa3_types::{AppendRotary, CachedProblem, CachedSpec, ProblemSpec, RopeStyle, Sequences, TensorDesc};

use crate::arguments::{Options, Tensors};
use crate::attention::{Attention, Numbers, Pass};
use crate::call::{At, Call};
use crate::cpu;
use crate::error::Error;
use pyo3::PyResult;
use pyo3::exceptions::PyValueError;

/// Attention over a cache to which new rows are appended first.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Cached {
    /// The attention, in which Q is not rotated yet.
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

    type Numbers = (Numbers, RopeStyle);

    fn numbers(options: &Options<'_>) -> PyResult<(Numbers, RopeStyle)> {
        Ok((Attention::numbers(options)?, options.style()?))
    }

    fn given(tensors: &mut Tensors<'_, '_>, (numbers, style): &(Numbers, RopeStyle)) -> PyResult<Cached> {
        let attention = Attention::of(tensors, numbers, Pass::Append)?;
        tensors.has_output("lse")?;
        let new = [tensors.input("k_new")?, tensors.input("v_new")?];
        let dense = Sequences::dense(new[0].shape.batch, new[0].shape.seqlen);
        let sequences = tensors.ends("cu_seqlens_k_new")?.map_or(dense, Sequences::packed);
        let count = attention.sequences.map_or(attention.inputs[0].shape.batch, |[of_q, _]| of_q.count());
        if sequences.is_packed() && sequences.count() != count {
            let found = format!("cu_seqlens_k_new is of {} sequences", sequences.count());
            return Err(PyValueError::new_err(format!("{found}, expected {count}")));
        }
        Ok(Cached { attention, new, sequences, rotary: tensors.append_rotary(*style, count)? })
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
