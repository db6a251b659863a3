//! One problem on the GPU.

use fa3_cuda::host::{Device, Forward};
use fa3_sched::forward::PlanOptions;
use fa3_types::{Dtype, Problem, TensorDesc};

use super::tensor::Tensor;
use crate::Fallible;

/// A problem and its plan options.
#[derive(Clone)]
pub(super) struct Trial {
    pub(super) problem: Problem,
    pub(super) options: PlanOptions,
}

/// Q, K and V.
#[derive(Clone)]
pub(super) struct Inputs {
    pub(super) q: Tensor,
    pub(super) k: Tensor,
    pub(super) v: Tensor,
}

/// O and LSE.
#[derive(Clone)]
pub(super) struct Outputs {
    pub(super) o: Tensor,
    pub(super) lse: Vec<f32>,
}

/// A trial on a device.
pub(super) struct Bench {
    bench: crate::bench::Bench,
    /// The layout of O.
    o: TensorDesc,
    /// Rows per tile.
    pub(super) tile_m: usize,
}

impl From<Problem> for Trial {
    fn from(problem: Problem) -> Trial {
        Trial { problem, options: PlanOptions::default() }
    }
}

impl Inputs {
    pub(super) fn random(problem: &Problem, seed: u64) -> Inputs {
        let [q, k, v] = [(problem.q(), 1), (problem.k(), 2), (problem.v(), 3)]
            .map(|(x, part)| Tensor::random(x, 4 * seed + part));
        Inputs { q, k, v }
    }
}

impl Bench {
    pub(super) fn new(device: &Device, trial: &Trial, inputs: &Inputs) -> Fallible<Bench> {
        let forward = Forward::with(device, &trial.problem, &trial.options)?;
        let tile_m = forward.plan().tile().tile_m as usize;
        let mut bench = crate::bench::Bench::new(device, forward)?;
        // The caller gives no scales, so all scales are 1.
        bench.memory.give(&bench.stream, |tensor| match tensor.name {
            "q" => Some(inputs.q.bytes()),
            "k" => Some(inputs.k.bytes()),
            "v" => Some(inputs.v.bytes()),
            _ => None,
        })?;
        Ok(Bench { bench, o: *trial.problem.o(), tile_m })
    }

    /// Runs the plan. The outputs hold NaN before the run.
    pub(super) fn run(&mut self) -> Fallible<Outputs> {
        let Bench { bench, o, .. } = self;
        bench.memory.poison(&bench.stream)?;
        bench.run()?;
        let bits = bench.memory.get("o").download(&bench.stream)?;
        Ok(Outputs { o: Tensor { desc: *o, bits }, lse: bench.memory.get("lse").download(&bench.stream)? })
    }
}

impl Outputs {
    pub(super) fn lse(&self, problem: &Problem, batch: usize, row: usize, head: usize) -> f32 {
        let [_, heads, rows] = problem.lse_shape();
        self.lse[(batch * heads + head) * rows + row]
    }

    /// Whether all bits are equal.
    pub(super) fn same(&self, other: &Outputs) -> bool {
        let bits = |lse: &[f32]| -> Vec<u32> { lse.iter().map(|x| x.to_bits()).collect() };
        self.o.bits == other.o.bits && bits(&self.lse) == bits(&other.lse)
    }
}

/// The results of a trial on these inputs.
pub(super) fn run(device: &Device, trial: &Trial, inputs: &Inputs) -> Fallible<Outputs> {
    Bench::new(device, trial, inputs)?.run()
}

/// The 16-bit dtypes of the forward kernels.
pub(super) const DTYPES: [Dtype; 2] = [Dtype::Bf16, Dtype::F16];
