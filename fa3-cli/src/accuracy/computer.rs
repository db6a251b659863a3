//! The device that computes O: the CPU, or a GPU for the methods that have a kernel.

use std::error::Error;

use fa3_quant::Accumulation;
use ndarray::Array4;
use serde::Serialize;

use super::cpu;
use super::gpu::Gpu;
use super::method::{Kernel, Method};
use super::recipe::BLOCK;
use super::sample::Sample;

/// The computer of O: the GPU, if any, for the methods that have a kernel, and the CPU for all others.
pub(super) struct Computer(pub(super) Option<Gpu>);

/// The processor that computed O.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Processor {
    Cpu,
    Gpu,
}

impl Computer {
    /// The name of the GPU, if any.
    pub(super) fn gpu(&self) -> Option<&str> {
        self.0.as_ref().map(Gpu::name)
    }

    /// The processor that computes the methods that have a kernel.
    pub(super) fn place(&self) -> Processor {
        if self.0.is_some() { Processor::Gpu } else { Processor::Cpu }
    }

    /// The processor that computes `method`.
    pub(super) fn place_of(&self, method: Method) -> Processor {
        method.kernel().map_or(Processor::Cpu, |_| self.place())
    }

    /// Computes O by `method`, with the random signs of `seed`.
    pub(super) fn output(
        &self,
        method: Method,
        sample: &Sample,
        seed: u64,
    ) -> Result<Array4<f32>, Box<dyn Error>> {
        match (&self.0, method.kernel()) {
            (Some(gpu), Some(Kernel::Fp16)) => Ok(gpu.fp16(sample)?),
            (Some(gpu), Some(Kernel::Fp8(recipe))) => gpu.fp8(sample, recipe, seed),
            _ => Ok(cpu::output(method, sample, seed)?),
        }
    }

    /// Computes FP8 attention of exact e4m3 inputs with two-level accumulation.
    pub(super) fn two_levels(&self, sample: &Sample) -> Result<Array4<f32>, Box<dyn Error>> {
        match &self.0 {
            None => Ok(cpu::e4m3(sample, Accumulation::TwoLevel { keys: BLOCK })?),
            Some(gpu) => gpu.e4m3(sample),
        }
    }
}
