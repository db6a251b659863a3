//! One problem on the GPU.

use fa3_cuda::host::{Device, DeviceBuffer, Forward, Stream, Tensors, Workspace};
use fa3_sched::forward::PlanOptions;
use fa3_types::{Dtype, Problem};

use super::tensor::Tensor;
use crate::Fallible;

/// A problem, and how it is computed.
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

/// A trial on a device: plan, kernel and memory.
pub(super) struct Bench {
    pub(super) forward: Forward,
    stream: Stream,
    inputs: [DeviceBuffer; 3],
    o: DeviceBuffer,
    lse: DeviceBuffer,
    workspace: Workspace,
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
        let stream = device.stream()?;
        let upload = |x: &Tensor| match x.desc.dtype.bytes() {
            1 => device.upload(&stream, &x.bits.iter().map(|&bits| bits as u8).collect::<Vec<_>>()),
            _ => device.upload(&stream, &x.bits),
        };
        let inputs = [upload(&inputs.q)?, upload(&inputs.k)?, upload(&inputs.v)?];
        let o = device.alloc(trial.problem.o().extent_bytes().0 as usize)?;
        let lse = device.alloc(4 * trial.problem.lse_shape().iter().product::<usize>())?;
        let workspace = Workspace::new(device, &stream, forward.workspace_bytes())?;
        Ok(Bench { forward, stream, inputs, o, lse, workspace })
    }

    /// Computes into memory that holds NaN.
    pub(super) fn run(&mut self) -> Fallible<Outputs> {
        self.o.fill(&self.stream, 0xFF)?;
        self.lse.fill(&self.stream, 0xFF)?;
        let [q, k, v] = &self.inputs;
        let outputs = [("o", &mut self.o), ("lse", &mut self.lse)];
        let tensors = Tensors::new([("q", q), ("k", k), ("v", v)], outputs);
        self.forward.run(&self.stream, tensors, &mut self.workspace)?;
        let desc = *self.forward.plan().problem().o();
        let o = Tensor { desc, bits: self.o.download(&self.stream)? };
        Ok(Outputs { o, lse: self.lse.download(&self.stream)? })
    }
}

impl Outputs {
    pub(super) fn lse(&self, problem: &Problem, batch: usize, row: usize, head: usize) -> f32 {
        let [_, heads, rows] = problem.lse_shape();
        self.lse[(batch * heads + head) * rows + row]
    }

    /// Whether all bits are the same.
    pub(super) fn same(&self, other: &Outputs) -> bool {
        let bits = |lse: &[f32]| -> Vec<u32> { lse.iter().map(|x| x.to_bits()).collect() };
        self.o.bits == other.o.bits && bits(&self.lse) == bits(&other.lse)
    }
}

/// The trial's results for some inputs.
pub(super) fn run(device: &Device, trial: &Trial, inputs: &Inputs) -> Fallible<Outputs> {
    Bench::new(device, trial, inputs)?.run()
}

/// The 16-bit dtypes of the forward kernels.
pub(super) const DTYPES: [Dtype; 2] = [Dtype::Bf16, Dtype::F16];
