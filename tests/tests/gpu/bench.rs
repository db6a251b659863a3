//! A compiled operation with its stream and memory.

use std::borrow::Cow;
use std::fmt::Display;
use std::sync::Arc;

use fa3_cuda::host::{
    Compiled, Device, DeviceBuffer, Graph, HostError, Operation, OperationError, Stream, Tensors, Workspace,
};
use fa3_ir::Buffer;
use fa3_tests::memory::{dtype, number_bytes};

/// A compiled operation of any kind, with the tensors of a call.
pub(crate) struct Call {
    /// The plan's description.
    pub(crate) plan: String,
    pub(crate) tensors: Vec<Buffer>,
    pub(crate) kernels: usize,
    pub(crate) workspace_bytes: usize,
    run: Box<Run>,
}

type Run = dyn Fn(&Stream, Tensors<'_>, &mut Workspace) -> Result<(), OperationError> + Send + Sync;

impl<P: Operation + Display + Send + Sync + 'static> From<Compiled<P>> for Call {
    fn from(compiled: Compiled<P>) -> Call {
        let mut tensors = compiled.plan().program().buffers;
        tensors.retain(|buffer| !buffer.role.is_workspace());
        Call {
            plan: compiled.plan().to_string(),
            tensors,
            kernels: compiled.functions().count(),
            workspace_bytes: compiled.workspace_bytes(),
            run: Box::new(move |stream: &Stream, tensors: Tensors<'_>, workspace: &mut Workspace| {
                compiled.run(stream, tensors, workspace)
            }),
        }
    }
}

/// Device memory for the tensors of a call, in their order.
pub(crate) struct Memory(pub(crate) Vec<(Buffer, DeviceBuffer)>);

/// The bytes of every output of a call, in their order.
pub(crate) type Bits = Vec<Vec<u8>>;

impl Memory {
    /// Allocates memory with unspecified contents.
    pub(crate) fn new(device: &Device, call: &Call) -> Result<Memory, HostError> {
        let alloc = |tensor: &Buffer| Ok((tensor.clone(), device.alloc(tensor.bytes())?));
        call.tensors.iter().map(alloc).collect::<Result<_, _>>().map(Memory)
    }

    /// Copies inputs to the memory. An optional input that `give` does not provide is left out of calls.
    pub(crate) fn give<'a>(
        &mut self,
        stream: &Stream,
        mut input: impl FnMut(&Buffer) -> Option<Cow<'a, [u8]>>,
    ) -> Result<(), HostError> {
        for (tensor, mut memory) in std::mem::take(&mut self.0) {
            if !tensor.role.is_written() {
                let Some(bytes) = input(&tensor) else { continue };
                memory.upload(stream, &bytes)?;
            }
            self.0.push((tensor, memory));
        }
        Ok(())
    }

    /// The part of one of `count` sequences, as memory for a call of one sequence.
    pub(crate) fn of_sequence(
        &self,
        device: &Device,
        stream: &Stream,
        call: &Call,
        (index, count): (usize, usize),
    ) -> Result<Memory, HostError> {
        let part = |tensor: &Buffer| {
            let all: Vec<u8> = self.get(tensor.name).download(stream)?;
            let each = all.len() / count;
            Ok((tensor.clone(), device.upload(stream, &all[index * each..][..each])?))
        };
        call.tensors.iter().map(part).collect::<Result<_, _>>().map(Memory)
    }

    fn place(&self, name: &str) -> usize {
        let place = self.0.iter().position(|(tensor, _)| tensor.name == name);
        place.unwrap_or_else(|| panic!("the call has no {name}"))
    }

    pub(crate) fn get(&self, name: &str) -> &DeviceBuffer {
        &self.0[self.place(name)].1
    }

    pub(crate) fn get_mut(&mut self, name: &str) -> &mut DeviceBuffer {
        let place = self.place(name);
        &mut self.0[place].1
    }

    fn outputs(&mut self) -> impl Iterator<Item = &mut DeviceBuffer> {
        self.0.iter_mut().filter(|(tensor, _)| tensor.role.is_written()).map(|(_, memory)| memory)
    }

    /// Fills the outputs with NaN, in stream order.
    pub(crate) fn poison(&mut self, stream: &Stream) -> Result<(), HostError> {
        self.outputs().try_for_each(|memory| memory.fill(stream, 0xFF))
    }

    /// Runs a call on the tensors in this memory.
    pub(crate) fn run(
        &mut self,
        call: &Call,
        stream: &Stream,
        workspace: &mut Workspace,
    ) -> Result<(), OperationError> {
        let tensors = self.0.iter_mut().fold(Tensors::default(), |tensors, (Buffer { name, .. }, memory)| {
            match call.tensors.iter().find(|tensor| tensor.name == *name) {
                None => tensors,
                Some(tensor) if tensor.role.is_written() => tensors.output(name, memory),
                Some(_) => tensors.input(name, &*memory),
            }
        });
        (call.run)(stream, tensors, workspace)
    }

    /// The outputs after all work that is on the stream at this time.
    pub(crate) fn bits(&mut self, stream: &Stream) -> Result<Bits, HostError> {
        self.outputs().map(|memory| memory.download(stream)).collect()
    }
}

/// A call with its stream and memory.
pub(crate) struct Bench {
    pub(crate) call: Arc<Call>,
    pub(crate) stream: Stream,
    pub(crate) memory: Memory,
    pub(crate) workspace: Workspace,
}

impl Bench {
    /// Prepares a call, with memory of unspecified contents.
    pub(crate) fn new(device: &Device, call: impl Into<Call>) -> Result<Bench, HostError> {
        let (call, stream) = (call.into(), device.stream()?);
        let memory = Memory::new(device, &call)?;
        let workspace = workspace_of_nan(device, &stream, call.workspace_bytes)?;
        Ok(Bench { call: Arc::new(call), stream, memory, workspace })
    }

    pub(crate) fn run(&mut self) -> Result<(), OperationError> {
        self.memory.run(&self.call, &self.stream, &mut self.workspace)
    }

    /// The results of `runs` consecutive runs. The outputs hold NaN before the first run.
    pub(crate) fn runs(&mut self, runs: usize) -> Result<Bits, OperationError> {
        self.memory.poison(&self.stream)?;
        (0..runs).try_for_each(|_| self.run())?;
        self.bits()
    }

    /// The outputs.
    pub(crate) fn bits(&mut self) -> Result<Bits, OperationError> {
        Ok(self.memory.bits(&self.stream)?)
    }

    /// A graph of `runs` runs.
    pub(crate) fn capture(&mut self, runs: usize) -> Result<Graph, OperationError> {
        self.stream.begin_capture()?;
        let captured = (0..runs).try_for_each(|_| self.run());
        let graph = self.stream.end_capture();
        captured?;
        Ok(graph?)
    }

    /// Replays a graph on `stream`.
    #[allow(unsafe_code, reason = "the launch of a graph is unsafe")]
    pub(crate) fn replay(&self, graph: &Graph, stream: &Stream) -> Result<(), HostError> {
        // SAFETY: the graph captured runs of this bench, which lives until their results have arrived.
        unsafe { graph.launch(stream) }
    }
}

/// Random numbers between -size and size. Equal calls give equal numbers.
pub(crate) fn noise(size: f32) -> impl FnMut(&Buffer) -> Option<Cow<'static, [u8]>> {
    let mut state = 1_u32;
    move |tensor| {
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            size * ((state >> 8) as f32 / (1 << 23) as f32 - 1.0)
        };
        let numbers = (0..tensor.len()).map(|_| next());
        Some(number_bytes(dtype(tensor.elem), numbers).into())
    }
}

/// A workspace whose counters are zero. All other bytes are NaN.
#[allow(unsafe_code, reason = "a workspace that is made of a buffer has counters that are 0")]
pub(crate) fn workspace_of_nan(
    device: &Device,
    stream: &Stream,
    bytes: usize,
) -> Result<Workspace, HostError> {
    let mut buffer = device.alloc(bytes)?;
    buffer.fill(stream, 0xFF)?;
    part(device, &buffer, 0, bytes.min(Workspace::COUNTERS)).fill(stream, 0)?;
    stream.synchronize()?;
    // SAFETY: the counters are 0, and allocations are aligned to 256 bytes.
    Ok(unsafe { Workspace::from_buffer(buffer) })
}

/// A part of a buffer, as memory of its own.
#[allow(unsafe_code, reason = "the part is the buffer's memory")]
pub(crate) fn part(device: &Device, whole: &DeviceBuffer, first: usize, bytes: usize) -> DeviceBuffer {
    assert!(first + bytes <= whole.bytes(), "{bytes} bytes from {first} on, of {}", whole.bytes());
    // SAFETY: the part lies within the buffer. The callers keep the buffer longer, and do not use it otherwise
    // meanwhile.
    unsafe { DeviceBuffer::from_raw(device, whole.address() + first as u64, bytes) }
}
