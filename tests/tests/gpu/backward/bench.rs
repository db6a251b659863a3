//! A plan with a stream and memory of its own.

use fa3::cuda::Lengths;
use fa3_cuda::host::{Backward, Device, Graph, HostError, OperationError, Stream, Workspace};
use fa3_tests::bwd::Form;
use fa3_types::{BackwardProblem, KnownProblem};

use super::form;
use super::tensors::{Bits, Tensors, part};
use crate::Fallible;

pub(super) struct Bench {
    pub(super) backward: Backward,
    pub(super) stream: Stream,
    pub(super) tensors: Tensors,
    pub(super) workspace: Workspace,
}

impl Bench {
    /// With random inputs, the same for equal problems.
    pub(super) fn new(device: &Device, problem: &BackwardProblem, form: Form) -> Fallible<Bench> {
        let stream = device.stream()?;
        let tensors = Tensors::random(device, &stream, problem, None)?;
        Bench::with(device, form::plan(form, device, problem)?, stream, tensors)
    }

    /// With random inputs of sequences of these lengths.
    pub(super) fn packed(
        device: &Device,
        problem: &BackwardProblem,
        known: &KnownProblem,
        form: Form,
    ) -> Fallible<Bench> {
        let stream = device.stream()?;
        let lengths = Lengths::upload(device, &stream, known)?;
        let tensors = Tensors::random(device, &stream, problem, Some(lengths))?;
        Bench::with(device, form::plan(form, device, problem)?, stream, tensors)
    }

    /// With tensors whose inputs are there.
    pub(super) fn with(
        device: &Device,
        backward: Backward,
        stream: Stream,
        tensors: Tensors,
    ) -> Fallible<Bench> {
        let workspace = workspace_of_nan(device, &stream, backward.workspace_bytes())?;
        Ok(Bench { backward, stream, tensors, workspace })
    }

    /// On its stream.
    pub(super) fn run(&mut self) -> Result<(), OperationError> {
        self.tensors.run(&self.backward, &self.stream, &mut self.workspace)
    }

    /// The results of so many runs, one right after the other.
    pub(super) fn runs(&mut self, runs: usize) -> Result<Bits, OperationError> {
        self.tensors.poison(&self.stream)?;
        (0..runs).try_for_each(|_| self.run())?;
        Ok(self.tensors.bits(&self.stream)?)
    }

    /// A graph of so many runs.
    pub(super) fn capture(&mut self, runs: usize) -> Result<Graph, OperationError> {
        self.stream.begin_capture()?;
        let captured = (0..runs).try_for_each(|_| self.run());
        let graph = self.stream.end_capture();
        captured?;
        Ok(graph?)
    }

    /// Replays a graph on `stream`.
    #[allow(unsafe_code, reason = "the launch of a graph is unsafe")]
    pub(super) fn replay(&self, graph: &Graph, stream: &Stream) -> Result<(), HostError> {
        // SAFETY: it captured runs of this bench, which lives until its results are there.
        unsafe { graph.launch(stream) }
    }
}

/// A workspace that holds NaN where it need not hold zeros.
#[allow(unsafe_code, reason = "a workspace that is made of a buffer has counters that are 0")]
pub(super) fn workspace_of_nan(
    device: &Device,
    stream: &Stream,
    bytes: usize,
) -> Result<Workspace, HostError> {
    let mut buffer = device.alloc(bytes)?;
    buffer.fill(stream, 0xFF)?;
    part(device, &buffer, 0, bytes.min(Workspace::COUNTERS)).fill(stream, 0)?;
    stream.synchronize()?;
    // SAFETY: the counters are 0, and allocated memory begins at multiples of 256.
    Ok(unsafe { Workspace::from_buffer(buffer) })
}
