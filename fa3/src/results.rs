//! The arrays that a forward pass writes.

use fa3_types::{KnownProblem, Problem, TensorName, UnknownFeature};
use ndarray::{Array3, Array4, ArrayViewMut3, ArrayViewMut4, Axis};

use crate::cpu::keys::Keys;
use crate::cpu::queries::Queries;
use crate::{Error, Output, Scalar};

/// The arrays that a forward pass writes, of a problem's shapes and of any strides.
pub(crate) struct Results<'a, T: Scalar> {
    pub(crate) o: ArrayViewMut4<'a, T::Output>,
    pub(crate) lse: ArrayViewMut3<'a, f32>,
    /// The largest scores of rows, if they are a result of the problem.
    pub(crate) max_logits: Option<ArrayViewMut3<'a, f32>>,
}

impl<'a, T: Scalar> Results<'a, T> {
    /// A caller's O and LSE, checked.
    ///
    /// # Errors
    /// [`Error::OutputShape`].
    pub(crate) fn into(
        problem: &Problem,
        o: ArrayViewMut4<'a, T::Output>,
        lse: ArrayViewMut3<'a, f32>,
    ) -> Result<Results<'a, T>, Error> {
        let check = |tensor, given: &[usize], expected: &[usize]| {
            if given == expected {
                return Ok(());
            }
            Err(Error::OutputShape { tensor, given: given.to_vec(), expected: expected.to_vec() })
        };
        check(TensorName::O, o.shape(), &problem.o().shape.dims())?;
        check(TensorName::Lse, lse.shape(), &problem.lse_shape())?;
        Ok(Results { o, lse, max_logits: None })
    }

    /// Writes the forward pass that the CPU engine computes.
    ///
    /// # Errors
    /// The problem has a feature that is not computed.
    pub(crate) fn compute_on_cpu(
        mut self,
        problem: &KnownProblem,
        queries: Queries<'_, T>,
        keys: Keys<'_>,
    ) -> Result<(), UnknownFeature> {
        let Some(mut max_logits) = self.max_logits else {
            return T::forward_on_cpu(problem, queries, keys, self.o, self.lse.insert_axis(Axis(3)));
        };
        let [batch, heads, rows] = problem.lse_shape();
        let mut of_rows = Array4::zeros([batch, heads, rows, 2]);
        T::forward_on_cpu(problem, queries, keys, self.o, of_rows.view_mut())?;
        self.lse.assign(&of_rows.index_axis(Axis(3), 0));
        max_logits.assign(&of_rows.index_axis(Axis(3), 1));
        Ok(())
    }
}

/// New arrays that `compute` has written: O and LSE, and the largest scores of rows, which are empty if they are no
/// result of the problem.
///
/// # Errors
/// The errors of `compute`.
pub(crate) fn computed<T: Scalar>(
    problem: &Problem,
    compute: impl FnOnce(Results<'_, T>) -> Result<(), Error>,
) -> Result<(Output<T::Output>, Array3<f32>), Error> {
    let (rows, has_max_logits) = (problem.lse_shape(), problem.has_max_logits());
    let mut o = Array4::from_elem(problem.o().shape.dims(), T::Output::default());
    let (mut lse, mut largest) =
        (Array3::zeros(rows), Array3::zeros(if has_max_logits { rows } else { [0; 3] }));
    let max_logits = has_max_logits.then(|| largest.view_mut());
    compute(Results { o: o.view_mut(), lse: lse.view_mut(), max_logits })?;
    Ok((Output::new(o, lse), largest))
}
