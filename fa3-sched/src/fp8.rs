//! Plans of attention in 8 bits over 16-bit tensors: three quantizations and a forward pass.

use fa3_types::Fp8Problem;

use crate::forward::PlanError;
use crate::{DeviceLimits, forward, quantize};

/// How attention in 8 bits over 16-bit tensors is computed on a device.
#[derive(Clone, Debug)]
pub struct Plan {
    problem: Fp8Problem,
    quantizations: [quantize::Plan; 3],
    forward: forward::Plan,
}

impl Plan {
    /// Decides everything.
    ///
    /// # Errors
    /// [`PlanError`] if no kernel computes the problem.
    pub fn new(problem: &Fp8Problem, limits: &DeviceLimits) -> Result<Plan, PlanError> {
        let [q, k, v] = problem.quantizations();
        Ok(Plan {
            problem: problem.clone(),
            quantizations: [
                quantize::Plan::new(q, limits)?,
                quantize::Plan::new(k, limits)?,
                quantize::Plan::new(v, limits)?,
            ],
            forward: forward::Plan::new(problem.codes(), limits)?,
        })
    }

    /// The problem.
    pub fn problem(&self) -> &Fp8Problem {
        &self.problem
    }

    /// How Q, K and V are quantized.
    pub fn quantizations(&self) -> &[quantize::Plan; 3] {
        &self.quantizations
    }

    /// The forward pass over the codes of Q, K and V.
    pub fn forward(&self) -> &forward::Plan {
        &self.forward
    }
}
