//! A call of attention over a cache to which new rows are first appended.

use std::num::NonZeroU32;

use fa3_cuda::host::OperationError;
use fa3_sched::cached::Plan;
use fa3_sched::forward::PlanOptions;
use fa3_types::{
    AppendRotary, CachedProblem, CachedSpec, Dtype, ProblemSpec, RopeStyle, Sequences, TensorDesc,
};

use crate::attention::{Attention, Numbers, Pass};
use crate::call::Call;
use crate::error::Error;
use crate::options::Options;
use crate::tensors::Tensors;

/// Attention over a cache to which new rows are appended first.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Cached {
    /// The attention, in which Q is not rotated yet.
    pub attention: Attention,
    /// New keys and values.
    pub new: [TensorDesc; 2],
    /// The sequences of new keys and values.
    pub sequences: Sequences,
    /// The rotation of new keys and of Q, if any.
    pub rotary: Option<AppendRotary>,
}

impl Cached {
    /// The problem, from the call's attention and new rows with other strides.
    ///
    /// # Errors
    /// The call is invalid.
    pub fn problem_of(&self, attention: ProblemSpec, new: [TensorDesc; 2]) -> Result<CachedProblem, Error> {
        let mut spec = CachedSpec::new(attention, new, self.sequences);
        spec.rotary = self.rotary;
        Ok(spec.validate().map_err(OperationError::from)?)
    }
}

impl Call for Cached {
    type Plan = Plan;

    type Numbers = (Numbers, RopeStyle);

    fn numbers(options: &Options<'_>) -> Result<(Numbers, RopeStyle), Error> {
        Ok((Attention::numbers(options)?, options.style()?))
    }

    fn given(tensors: &mut Tensors<'_>, (numbers, style): &(Numbers, RopeStyle)) -> Result<Cached, Error> {
        let attention = Attention::of(tensors, numbers, Pass::Append)?;
        tensors.has_output("lse", Dtype::F32)?;
        let new = [tensors.input("k_new")?, tensors.input("v_new")?];
        let dense = Sequences::dense(new[0].shape.batch, new[0].shape.seqlen);
        let sequences = tensors.ends("cu_seqlens_k_new")?.map_or(dense, Sequences::packed);
        let count = attention.sequences.map_or(attention.inputs[0].shape.batch, |[of_q, _]| of_q.count());
        if sequences.is_packed() && sequences.count() != count {
            return Err(Error::NewSequences { given: sequences.count(), expected: count });
        }
        Ok(Cached { attention, new, sequences, rotary: tensors.append_rotary(*style, count)? })
    }

    fn problem(&self) -> Result<CachedProblem, Error> {
        self.problem_of(self.attention.spec()?, self.new)
    }

    fn options(&self, sms: NonZeroU32) -> Result<PlanOptions, Error> {
        self.attention.options(sms)
    }
}
