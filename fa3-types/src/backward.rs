//! The backward pass of an attention problem: the tensors of its gradients.

use std::fmt;

use crate::{Feature, Known, Problem, ProblemError, ProblemSpec, TensorDesc, TensorName, UnknownFeature};

/// The features that have gradients.
const KNOWN: Known = Known::new(
    "the backward pass",
    &[
        Feature::Window,
        Feature::Chunks,
        Feature::Intervals,
        Feature::Blocks,
        Feature::SoftCap,
        Feature::Score,
        Feature::Sinks,
        Feature::Packed,
        Feature::Used,
    ],
);

/// A caller's request, not yet checked: the forward problem, and the tensors of its gradients.
///
/// ```
/// use fa3_types::{BackwardSpec, Dtype, ProblemSpec, Shape};
///
/// let q = Shape { batch: 2, seqlen: 512, heads: 8, head_dim: 128 };
/// let forward = ProblemSpec::dense(Dtype::Bf16, q, Shape { heads: 2, ..q }).causal();
/// let problem = BackwardSpec::contiguous(forward).validate()?;
/// assert_eq!(problem.dk().shape.heads, 2);
/// # Ok::<(), fa3_types::ProblemError>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct BackwardSpec {
    /// The forward pass whose gradients are computed.
    pub forward: ProblemSpec,
    /// The gradient of O, of O's shape.
    pub dout: TensorDesc,
    /// The gradient of Q, of Q's shape.
    pub dq: TensorDesc,
    /// The gradient of K, of K's shape.
    pub dk: TensorDesc,
    /// The gradient of V, of V's shape.
    pub dv: TensorDesc,
}

impl BackwardSpec {
    /// A backward pass with contiguous gradients.
    pub fn contiguous(forward: ProblemSpec) -> BackwardSpec {
        let like = |x: &TensorDesc| TensorDesc::contiguous(x.dtype, x.shape);
        let [dout, dq, dk, dv] = [&forward.o, &forward.q, &forward.k, &forward.v].map(like);
        BackwardSpec { forward, dout, dq, dk, dv }
    }

    /// Calls [`BackwardProblem::new`].
    ///
    /// # Errors
    /// See [`ProblemError`].
    pub fn validate(self) -> Result<BackwardProblem, ProblemError> {
        BackwardProblem::new(self)
    }
}

/// A backward pass that can be computed. With D = rowsum(dO ∘ O) and dLSE, the gradient of LSE, if LSE was used:
///
/// ```text
/// P = exp(S - LSE)    dP = dO Vᵀ    dS = P ∘ (dP - D + dLSE)    dV = Pᵀ dO    dQ = scale · dS K    dK = scale · dSᵀ Q
/// ```
///
/// and dsink = Σ exp(sink - LSE) · (dLSE - D) over the rows of a head, if heads have [sinks](Problem::has_sink).
#[derive(Clone, Debug)]
pub struct BackwardProblem {
    forward: Problem,
    dout: TensorDesc,
    dq: TensorDesc,
    dk: TensorDesc,
    dv: TensorDesc,
}

impl BackwardProblem {
    /// Validates `spec`.
    ///
    /// # Errors
    /// The first violation found, with its numbers: the errors of [`Problem::new`]; [`ProblemError::NoGradients`] if
    /// the problem has a feature without gradients, such as e4m3, `qv` or a cache; and errors of the gradients' own
    /// shapes and strides.
    pub fn new(spec: BackwardSpec) -> Result<BackwardProblem, ProblemError> {
        let BackwardSpec { forward, dout, dq, dk, dv } = spec;
        let forward = forward.validate()?;
        KNOWN
            .check(&forward)
            .map_err(|UnknownFeature { feature, .. }| ProblemError::NoGradients { feature })?;
        check(TensorName::DOut, &dout, forward.o())?;
        let outputs = [
            (TensorName::DQ, &dq, forward.q()),
            (TensorName::DK, &dk, forward.k()),
            (TensorName::DV, &dv, forward.v()),
        ];
        for (tensor, given, of) in outputs {
            check(tensor, given, of)?;
            given.check_distinct(tensor)?;
        }
        let [dout, dq, dk, dv] = [dout, dq, dk, dv].map(TensorDesc::canonical);
        Ok(BackwardProblem { forward, dout, dq, dk, dv })
    }

    /// Checks the kernels' demands on all tensors, as [`Problem::check_rows`] does for the forward pass.
    ///
    /// # Errors
    /// [`ProblemError::HeadDimMultiple`] or [`ProblemError::StrideMultiple`].
    pub fn check_rows(&self) -> Result<(), ProblemError> {
        self.forward.check_rows()?;
        let gradients = [(TensorName::DOut, &self.dout), (TensorName::DQ, &self.dq)];
        let gradients = gradients.into_iter().chain([(TensorName::DK, &self.dk), (TensorName::DV, &self.dv)]);
        gradients.into_iter().try_for_each(|(name, x)| x.check_rows(name))
    }

    /// The gradients of [`Problem::padded`], with columns of zeros.
    #[must_use]
    pub fn padded(&self) -> BackwardProblem {
        let [dout, dq, dk, dv] = [&self.dout, &self.dq, &self.dk, &self.dv].map(TensorDesc::padded);
        BackwardProblem { forward: self.forward.padded(), dout, dq, dk, dv }
    }

    /// The forward pass.
    pub fn forward(&self) -> &Problem {
        &self.forward
    }

    /// The gradient of O (batch, seqlen_q, heads_q, head_dim_v).
    pub fn dout(&self) -> &TensorDesc {
        &self.dout
    }

    /// The gradient of Q (batch, seqlen_q, heads_q, head_dim).
    pub fn dq(&self) -> &TensorDesc {
        &self.dq
    }

    /// The gradient of K (batch, seqlen_k, heads_kv, head_dim), summed over the query heads that share it.
    pub fn dk(&self) -> &TensorDesc {
        &self.dk
    }

    /// The gradient of V (batch, seqlen_k, heads_kv, head_dim_v), summed over the query heads that share it.
    pub fn dv(&self) -> &TensorDesc {
        &self.dv
    }
}

/// Checks that a gradient has the type and the shape of its tensor.
fn check(tensor: TensorName, given: &TensorDesc, of: &TensorDesc) -> Result<(), ProblemError> {
    given.check(tensor)?;
    if given.dtype != of.dtype {
        return Err(ProblemError::DtypeMismatch { tensor, given: given.dtype, expected: of.dtype });
    }
    given.shape.check(tensor, of.shape)
}

impl fmt::Display for BackwardProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.forward)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dim, Dtype, Shape};

    const Q: Shape = Shape { batch: 2, seqlen: 16, heads: 4, head_dim: 64 };
    const KV: Shape = Shape { batch: 2, seqlen: 24, heads: 2, head_dim: 64 };

    fn spec() -> BackwardSpec {
        BackwardSpec::contiguous(ProblemSpec::dense(Dtype::F16, Q, KV).head_dim_v(32))
    }

    #[test]
    fn gradients_have_the_shapes_of_what_they_are_gradients_of() {
        let problem = spec().validate().unwrap();
        assert_eq!(problem.dout().shape, Shape { head_dim: 32, ..Q });
        assert_eq!((problem.dq().shape, problem.dk().shape), (Q, KV));
        assert_eq!(problem.dv().shape, Shape { head_dim: 32, ..KV });
    }

    #[test]
    fn gradients_of_another_type_or_shape_are_refused() {
        let refused = |change: fn(&mut BackwardSpec)| {
            let mut spec = spec();
            change(&mut spec);
            spec.validate().unwrap_err()
        };
        let contiguous = |shape| TensorDesc::contiguous(Dtype::F16, shape);
        assert_eq!(
            refused(|spec| spec.dout = TensorDesc::contiguous(Dtype::Bf16, spec.dout.shape)),
            ProblemError::DtypeMismatch {
                tensor: TensorName::DOut,
                given: Dtype::Bf16,
                expected: Dtype::F16
            }
        );
        let mismatch =
            ProblemError::DimMismatch { tensor: TensorName::DK, dim: Dim::Heads, given: 4, expected: 2 };
        let mut wide = spec();
        wide.dk = contiguous(Shape { heads: 4, ..KV });
        assert_eq!(wide.validate().unwrap_err(), mismatch);
        let overlapping = refused(|spec| spec.dv.strides.seqlen = 0);
        assert!(matches!(overlapping, ProblemError::OutputOverlapsItself { tensor: TensorName::DV, .. }));
        // Elements of dO, an input, may share memory: the gradient of a mean is an expanded tensor.
        let mut expanded = spec();
        expanded.dout.strides.seqlen = 0;
        assert!(expanded.validate().is_ok());
        let codes = BackwardSpec::contiguous(ProblemSpec::dense(Dtype::E4m3, Q, KV));
        assert_eq!(codes.validate().unwrap_err(), ProblemError::NoGradients { feature: Feature::E4m3 });
    }
}
