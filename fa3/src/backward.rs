//! The backward pass of an attention call.

use fa3_types::{BackwardProblem, BackwardSpec, TensorName};

use crate::attention::check_input as check;
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::{Attention, Device, Error, Gradients, Output, OutputGradients, Scalar};

impl<T: Scalar<Output = T>> Attention<'_, T> {
    /// Computes dQ, dK and dV, and dsink if there are sinks: the gradients of a number φ that was computed from O, and
    /// optionally LSE. This is Algorithm 3 of the paper (arXiv 2407.08608, Appendix B.1). `output` is the result of
    /// [`Attention::forward`] for this call, on any device, or was made by [`Output::new`]. `gradients` has ∂φ/∂O, and
    /// optionally ∂φ/∂LSE. The output of another call is refused, unless only the values of Q, K and V differ, which
    /// cannot be detected.
    ///
    /// ```text
    /// S  = softmax_scale · Q Kᵀ     X = mask(cap(S))     P = exp(X − LSE)     D = rowsum(dO ∘ O)
    /// dV = Pᵀ dO     dP = dO Vᵀ     dS = P ∘ (dP − D + dLSE) ∘ cap'(S)
    /// dQ = softmax_scale · dS K     dK = softmax_scale · dSᵀ Q     dsink = Σ exp(sink − LSE) · (dLSE − D)
    /// ```
    ///
    /// With a [function of scores](Attention::score) f, X = mask(f(cap(S))), and f' is one more factor of dS.
    ///
    /// e4m3 has no gradients, since it rounds values: `T` is f32, f16 or bf16. On a GPU all arrays are copied to it and
    /// the results are copied back. A problem that the GPU's backward kernels do not take is an error; the CPU does not
    /// compute it instead. The results have the same bits in every run on the CPU, and on a GPU with
    /// [`Attention::deterministic`].
    ///
    /// NaN or an infinity in dO reaches dQ of its row. It may also reach dK and dV of keys that the row does not see,
    /// as a NaN in V may reach O: tiles are multiplied as a whole, by 0 where a key is hidden. dLSE of rows that see no
    /// key is ignored, unless there are sinks.
    ///
    /// ```
    /// use fa3::ndarray::{Array3, Array4};
    /// use fa3::{Attention, Device, OutputGradients};
    ///
    /// let wave = |heads: usize, step: f32| {
    ///     Array4::from_shape_fn((1, 20, heads, 8), |(_, s, h, d)| (step * (9 * s + 5 * h + d) as f32).sin())
    /// };
    /// let (q, k, v) = (wave(4, 0.3), wave(2, 0.5), wave(2, 0.7));
    /// let attention = Attention::new(&q, &k, &v).causal();
    /// let output = attention.forward(&Device::Cpu)?;
    ///
    /// // φ = Σ O
    /// let dout = Array4::ones((1, 20, 4, 8));
    /// let gradients = attention.backward(&Device::Cpu, &output, &dout)?;
    /// assert_eq!(gradients.dk.dim(), (1, 20, 2, 8));
    /// // Only the last row of two query heads sees the last key, so dV of this key is the sum of two probabilities.
    /// assert!((0.0..2.0).contains(&gradients.dv[[0, 19, 0, 0]]));
    ///
    /// // φ = Σ O + Σ LSE
    /// let dlse = Array3::ones((1, 4, 20));
    /// let both = OutputGradients::new(&dout).dlse(&dlse);
    /// assert_ne!(attention.backward(&Device::Cpu, &output, both)?.dq, gradients.dq);
    /// # Ok::<(), fa3::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error`] with the first violation: the errors of [`Attention::problem`], [`Error::InputShape`] if O, LSE, dO or
    /// dLSE does not have the call's shape, [`Error::OtherCall`] if the output belongs to another call, and
    /// `Error::Cuda` from a GPU.
    pub fn backward<'g>(
        &self,
        device: &Device,
        output: &Output<T>,
        gradients: impl Into<OutputGradients<'g, T>>,
    ) -> Result<Gradients<T>, Error> {
        let (problem, gradients) = (self.backward_problem()?, gradients.into());
        let (o, lse) = (problem.forward().o().shape.dims(), problem.forward().lse_shape());
        check(TensorName::O, output.o.shape(), &o)?;
        check(TensorName::Lse, output.lse.shape(), &lse)?;
        let known = self.problem()?;
        output.check_call(&known)?;
        check(TensorName::DOut, gradients.dout.shape(), &o)?;
        if let Some(dlse) = &gradients.dlse {
            check(TensorName::DLse, dlse.shape(), &lse)?;
        }
        match device {
            Device::Cpu => Ok(T::backward_on_cpu(&known, self.tensors(), self.sinks(), output, gradients)?),
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => {
                let deterministic = self.is_deterministic();
                let (problem, qkv, sinks) = ((&problem, &known), self.tensors(), self.sinks());
                Ok(cuda::backward(device, problem, qkv, sinks, output, gradients, deterministic)?)
            }
        }
    }

    /// The validated problem of the backward pass, of contiguous tensors.
    ///
    /// # Errors
    /// [`Error`] with the first violation.
    pub fn backward_problem(&self) -> Result<BackwardProblem, Error> {
        Ok(BackwardSpec::contiguous(self.spec()?).validate()?)
    }
}
