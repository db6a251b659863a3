//! Times of the backward pass over packed sequences on a GPU.

use fa3::cuda::{
    Backward, BackwardOptions, Device, DeviceBuffer, Forward, Lengths, Stream, Tensors, Workspace,
};
use fa3_sched::backward::DqBy;
use fa3_types::{BackwardSpec, KnownProblem, ProblemSpec, TensorDesc};
use indicatif::ProgressBar;

use super::gradient_truth::{GradientTruth, SatisfiedGradients};
use super::outcome::{Outcome, Pace, Timing};
use super::truth::Wrong;
use super::{Refusal, hash, steps};
use crate::launches;

/// Both passes of a problem on a GPU, with the memory of their tensors.
struct Stand {
    stream: Stream,
    forward: Forward,
    backward: Backward,
    workspaces: [Workspace; 2],
    qkv: [DeviceBuffer; 3],
    dout: DeviceBuffer,
    /// O and LSE.
    output: [DeviceBuffer; 2],
    /// dQ, dK and dV.
    gradients: [DeviceBuffer; 3],
}

/// Measures the backward pass of packed sequences on numbers from N(0, 1). `progress` steps as for one way to compute.
pub(crate) fn race(
    device: &Device,
    (spec, problem): (&ProblemSpec, &KnownProblem),
    deterministic: bool,
    pace: Pace,
    progress: &ProgressBar,
) -> Outcome {
    let end = progress.position() + steps(1, pace) as u64;
    let timing = measure(device, (spec, problem), deterministic, pace, progress);
    progress.set_position(end);
    timing.map_or_else(Outcome::from, Outcome::Checked)
}

fn measure(
    device: &Device,
    (spec, problem): (&ProblemSpec, &KnownProblem),
    deterministic: bool,
    pace: Pace,
    progress: &ProgressBar,
) -> Result<Timing, Refusal> {
    let mut stand = Stand::new(device, spec, problem, deterministic)?;
    let truth = GradientTruth::new(spec, problem).map_err(fa3::cuda::OperationError::from)?;
    stand.upload(&truth)?;
    let of_cut = Lengths::upload(device, &stand.stream, &truth.cut)?;
    let lengths = Lengths::upload(device, &stand.stream, problem)?;
    stand.attend(&of_cut)?;
    let SatisfiedGradients { rows, ratio } = truth.check(&stand.compute(&of_cut)?)?;
    stand.attend(&lengths)?;
    let first = stand.compute(&lengths)?;
    truth.check_numbers(&first)?;
    progress.inc(1);
    let launches = {
        let (stream, launch) = stand.launch(&lengths);
        launches::fill(stream, pace.slice_ms, launch)?
    };
    let mut millis = Vec::new();
    for _ in 0..pace.rounds {
        let (stream, launch) = stand.launch(&lengths);
        millis.push(launches::time(stream, launches, launch)?);
        progress.inc(1);
    }
    let last = stand.compute(&lengths)?;
    truth.check_numbers(&last)?;
    // dQ may have other last bits.
    let same = usize::from(!deterministic);
    let bits = |all: &[Vec<u16>; 3]| all[same..].iter().map(|bits| hash(bits, &[])).collect::<Vec<_>>();
    if bits(&first) != bits(&last) {
        return Err(Wrong::Changed.into());
    }
    let plan = stand.backward.plan();
    let dq = match plan.dq() {
        DqBy::Kernel(dq) => format!("dQ {}", dq.tile),
        DqBy::Additions => "dQ added in any order".to_owned(),
        DqBy::AdditionsInOrder => "dQ added in order".to_owned(),
    };
    Ok(Timing::new(format!("{}; {dq}", plan.dkv().tile), launches, millis, rows, ratio))
}

impl Stand {
    fn new(
        device: &Device,
        spec: &ProblemSpec,
        problem: &KnownProblem,
        deterministic: bool,
    ) -> Result<Stand, Refusal> {
        let refused = fa3::cuda::OperationError::from;
        let of_gradients = BackwardSpec::contiguous(spec.clone()).validate().map_err(refused)?;
        let options = BackwardOptions::default();
        let options = if deterministic { options.deterministic() } else { options };
        let forward = Forward::new(device, problem)?;
        let backward = Backward::with(device, &of_gradients, &options)?;
        let stream = device.stream()?;
        let alloc = |x: &TensorDesc| device.alloc(x.extent_bytes().0 as usize);
        let [q, k, v] = [problem.q(), problem.k(), problem.v()].map(alloc);
        let [dq, dk, dv] = [of_gradients.dq(), of_gradients.dk(), of_gradients.dv()].map(alloc);
        let (o, dout) = (alloc(problem.o())?, alloc(of_gradients.dout())?);
        let lse = device.alloc(size_of::<f32>() * problem.lse_shape().iter().product::<usize>())?;
        let of_forward = Workspace::new(device, &stream, forward.workspace_bytes())?;
        let of_backward = Workspace::new(device, &stream, backward.workspace_bytes())?;
        Ok(Stand {
            stream,
            forward,
            backward,
            workspaces: [of_forward, of_backward],
            qkv: [q?, k?, v?],
            dout,
            output: [o, lse],
            gradients: [dq?, dk?, dv?],
        })
    }

    fn upload(&mut self, truth: &GradientTruth) -> Result<(), Refusal> {
        let [q, k, v, dout] = &truth.tensors;
        for (buffer, bits) in self.qkv.iter_mut().zip([q, k, v]) {
            buffer.upload(&self.stream, bits)?;
        }
        Ok(self.dout.upload(&self.stream, dout)?)
    }

    /// The forward pass of sequences of these lengths, whose results the backward pass takes.
    fn attend(&mut self, lengths: &Lengths) -> Result<(), Refusal> {
        let ([q, k, v], [o, lse], [workspace, _]) = (&self.qkv, &mut self.output, &mut self.workspaces);
        let tensors = Tensors::new([("q", q), ("k", k), ("v", v)], [("o", o), ("lse", lse)]);
        Ok(self.forward.run(&self.stream, lengths.beside(tensors), workspace)?)
    }

    /// The stream, and a function that launches the backward pass of sequences of these lengths there.
    fn launch<'a>(
        &'a mut self,
        lengths: &'a Lengths,
    ) -> (&'a Stream, impl FnMut() -> Result<(), fa3::cuda::OperationError> + use<'a>) {
        let Stand { stream, backward, workspaces: [_, workspace], qkv, dout, output, gradients, .. } = self;
        let (stream, backward, dout) = (&*stream, &*backward, &*dout);
        let ([q, k, v], [o, lse]) = (&*qkv, &*output);
        (stream, move || {
            let [dq, dk, dv] = &mut *gradients;
            let tensors = Tensors::new(
                [("q", q), ("k", k), ("v", v), ("o", o), ("lse", lse), ("dout", dout)],
                [("dq", dq), ("dk", dk), ("dv", dv)],
            );
            backward.run(stream, lengths.beside(tensors), workspace)
        })
    }

    /// The bits of dQ, dK and dV, computed into memory that holds NaN.
    fn compute(&mut self, lengths: &Lengths) -> Result<[Vec<u16>; 3], Refusal> {
        for gradient in &mut self.gradients {
            gradient.fill(&self.stream, 0xFF)?;
        }
        self.launch(lengths).1()?;
        let [dq, dk, dv] = self.gradients.each_ref().map(|gradient| gradient.download(&self.stream));
        Ok([dq?, dk?, dv?])
    }
}
