//! Plans of attention in 8 bits of 16-bit tensors: those of its quantizations, and that of the forward pass.

use fa3_types::Fp8Problem;

use crate::forward::PlanError;
use crate::{DeviceLimits, forward, quantize};

/// How attention in 8 bits is computed on a device.
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
    /// If no kernel computes it.
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

    /// The forward pass of their codes.
    pub fn forward(&self) -> &forward::Plan {
        &self.forward
    }
}
