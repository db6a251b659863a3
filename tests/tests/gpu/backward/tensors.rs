//! Device memory for the tensors of a backward pass.

use fa3::cuda::Lengths;
use fa3_cuda::host::{
    self, Backward, Device, DeviceBuffer, Forward, HostError, OperationError, Stream, Workspace,
};
use fa3_tests::fwd::encode;
use fa3_types::{BackwardProblem, TensorDesc};

use super::bench::workspace_of_nan;
use crate::Fallible;

/// The caller's buffers of a program, in their order: inputs, then dQ, dK and dV; and lists of lengths, if it takes some.
pub(super) struct Tensors(pub(super) [DeviceBuffer; 10], Option<Lengths>);

/// The bits of dQ, dK and dV.
pub(super) type Bits = [Vec<u16>; 3];

impl Tensors {
    /// Tensors whose contents are not set.
    pub(super) fn new(device: &Device, problem: &BackwardProblem) -> Result<Tensors, HostError> {
        Tensors::each(sizes(problem).map(|(_, bytes)| device.alloc(bytes as usize)))
    }

    fn each(buffers: [Result<DeviceBuffer, HostError>; 10]) -> Result<Tensors, HostError> {
        let buffers: Vec<DeviceBuffer> = buffers.into_iter().collect::<Result<_, _>>()?;
        Ok(Tensors(buffers.try_into().expect("as many as before"), None))
    }

    /// Tensors of numbers between -2 and 2, the same for equal problems, with O and LSE of the forward kernel.
    pub(super) fn random(
        device: &Device,
        stream: &Stream,
        problem: &BackwardProblem,
        lengths: Option<Lengths>,
    ) -> Fallible<Tensors> {
        let mut tensors = Tensors { 1: lengths, ..Tensors::new(device, problem)? };
        let [q, k, v, _, _, dout, dlse, ..] = &mut tensors.0;
        let (dtype, mut state) = (problem.forward().dtype(), 1_u32);
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 22) as f32 - 2.0
        };
        for x in [q, k, v, dout] {
            let bits: Vec<u16> = (0..x.bytes() / 2).map(|_| encode(dtype, next())).collect();
            x.upload(stream, &bits)?;
        }
        let numbers: Vec<f32> = (0..dlse.bytes() / 4).map(|_| next()).collect();
        dlse.upload(stream, &numbers)?;
        let forward = Forward::new(device, problem.forward())?;
        let mut workspace = workspace_of_nan(device, stream, forward.workspace_bytes())?;
        tensors.attend(&forward, stream, &mut workspace)?;
        Ok(tensors)
    }

    /// The tensors of one of `count` sequences.
    pub(super) fn of_sequence(
        &self,
        device: &Device,
        stream: &Stream,
        (index, count): (usize, usize),
    ) -> Result<Tensors, HostError> {
        Tensors::each(self.0.each_ref().map(|all| {
            let all: Vec<u8> = all.download(stream)?;
            let each = all.len() / count;
            device.upload(stream, &all[index * each..][..each])
        }))
    }

    /// Computes O and LSE.
    pub(super) fn attend(
        &mut self,
        forward: &Forward,
        stream: &Stream,
        workspace: &mut Workspace,
    ) -> Result<(), OperationError> {
        let [q, k, v, o, lse, ..] = &mut self.0;
        let tensors = host::Tensors::new([("q", &*q), ("k", &*k), ("v", &*v)], [("o", o), ("lse", lse)]);
        forward.run(stream, beside(&self.1, tensors), workspace)
    }

    /// Makes dQ, dK and dV NaN, in the stream's order.
    pub(super) fn poison(&mut self, stream: &Stream) -> Result<(), HostError> {
        let [.., dq, dk, dv] = &mut self.0;
        [dq, dk, dv].into_iter().try_for_each(|x| x.fill(stream, 0xFF))
    }

    /// Computes dQ, dK and dV.
    pub(super) fn run(
        &mut self,
        backward: &Backward,
        stream: &Stream,
        workspace: &mut Workspace,
    ) -> Result<(), OperationError> {
        let [q, k, v, o, lse, dout, dlse, dq, dk, dv] = &mut self.0;
        let inputs: [(_, &DeviceBuffer); 7] =
            [("q", q), ("k", k), ("v", v), ("o", o), ("lse", lse), ("dout", dout), ("dlse", dlse)];
        let tensors = host::Tensors::new(inputs, [("dq", dq), ("dk", dk), ("dv", dv)]);
        backward.run(stream, beside(&self.1, tensors), workspace)
    }

    /// After all work that the stream has now.
    pub(super) fn bits(&self, stream: &Stream) -> Result<Bits, HostError> {
        let [.., dq, dk, dv] = &self.0;
        Ok([dq.download(stream)?, dk.download(stream)?, dv.download(stream)?])
    }
}

/// Tensors with these lists, if there are some.
fn beside<'a>(lengths: &'a Option<Lengths>, tensors: host::Tensors<'a>) -> host::Tensors<'a> {
    match lengths {
        None => tensors,
        Some(lengths) => lengths.beside(tensors),
    }
}

/// The tensors of a call and their bytes.
pub(super) fn sizes(problem: &BackwardProblem) -> [(&'static str, u64); 10] {
    let forward = problem.forward();
    let bytes = |x: &TensorDesc| x.extent_bytes().0;
    let lse = 4 * forward.lse_shape().iter().product::<usize>() as u64;
    [
        ("q", bytes(forward.q())),
        ("k", bytes(forward.k())),
        ("v", bytes(forward.v())),
        ("o", bytes(forward.o())),
        ("lse", lse),
        ("dout", bytes(problem.dout())),
        ("dlse", lse),
        ("dq", bytes(problem.dq())),
        ("dk", bytes(problem.dk())),
        ("dv", bytes(problem.dv())),
    ]
}

/// A part of a buffer, as memory of its own.
#[allow(unsafe_code, reason = "the part is the buffer's memory")]
pub(super) fn part(device: &Device, whole: &DeviceBuffer, first: usize, bytes: usize) -> DeviceBuffer {
    assert!(first + bytes <= whole.bytes(), "{bytes} bytes from {first} on, of {}", whole.bytes());
    // SAFETY: it lies within the buffer, which its callers hold longer, and use for nothing else meanwhile.
    unsafe { DeviceBuffer::from_raw(device, whole.address() + first as u64, bytes) }
}
