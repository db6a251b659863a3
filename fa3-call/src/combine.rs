//! A call of the split-KV reduction.

use std::num::NonZeroU32;

use fa3_cuda::host::OperationError;
use fa3_sched::combine::Plan;
use fa3_types::{CombineProblem, CombineSpec, Partials, TensorDesc};

use crate::call::Call;
use crate::error::Error;
use crate::options::Options;
use crate::tensors::Tensors;

/// A split-KV reduction.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Combination {
    /// O of the splits.
    pub out_partial: Partials,
    /// LSE of the splits, with head_dim 1.
    pub lse_partial: Partials,
    /// O.
    pub o: TensorDesc,
    /// LSE, with head_dim 1.
    pub lse: TensorDesc,
}

impl Combination {
    /// The call with contiguous splits.
    fn contiguous(&self) -> Combination {
        let contiguous = |x: Partials| Partials::contiguous(x.first.dtype, x.splits, x.first.shape);
        let [out_partial, lse_partial] = [self.out_partial, self.lse_partial].map(contiguous);
        Combination { out_partial, lse_partial, ..*self }
    }

    /// The problem by the rules of the CPU, on which splits may have any strides.
    ///
    /// # Errors
    /// The call is invalid.
    pub fn problem_for_cpu(&self) -> Result<CombineProblem, Error> {
        self.contiguous().problem()
    }
}

impl Call for Combination {
    type Plan = Plan;

    type Numbers = ();

    fn numbers(_options: &Options<'_>) -> Result<(), Error> {
        Ok(())
    }

    fn given(tensors: &mut Tensors<'_>, _numbers: &()) -> Result<Combination, Error> {
        Ok(Combination {
            out_partial: tensors.partials("out_partial", false)?,
            lse_partial: tensors.partials("lse_partial", true)?,
            o: tensors.output("o")?,
            lse: tensors.rows_of_one("lse")?,
        })
    }

    fn problem(&self) -> Result<CombineProblem, Error> {
        let spec = CombineSpec::new(self.out_partial, self.lse_partial, self.o, self.lse);
        Ok(spec.validate().map_err(OperationError::from)?)
    }

    fn options(&self, _sms: NonZeroU32) -> Result<(), Error> {
        Ok(())
    }
}
