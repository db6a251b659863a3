//! A call, planned for a device.

use std::ffi::c_void;

use fa3_call::{
    At, Attention, Cached, Combination, CpuCall, Error, Fp8Attention, Gradients, Memory, Options, Place,
    Quantization, threads,
};
use fa3_cuda::host::{Compiled, PlacementError, Stream, Workspace};

use crate::given::{Choices, Named, Tensors};

/// A call, planned, and compiled for its device.
pub struct Plan {
    /// Number of tensors that C passes addresses of.
    tensors: usize,
    /// The tensors that the call reads and writes, with their indices.
    taken: Vec<(&'static str, usize)>,
    planned: Box<dyn Planned>,
}

/// A call that is ready for launches.
trait Planned {
    fn workspace_bytes(&self) -> usize;

    /// Computes the call on the CPU, or puts it on a stream.
    ///
    /// # Safety
    /// The conditions of [`Plan::launch`], for the tensors at the addresses `at`.
    ///
    /// # Errors
    /// An address is invalid, or the driver reports an error.
    unsafe fn launch(&self, stream: usize, at: &At, workspace: u64) -> Result<(), Error>;
}

/// A call on the CPU, with the sizes of its tensors in bytes.
struct OnCpu<C> {
    call: C,
    bytes: Vec<(&'static str, u64)>,
}

impl<C: CpuCall> Planned for OnCpu<C> {
    fn workspace_bytes(&self) -> usize {
        0
    }

    unsafe fn launch(&self, _stream: usize, at: &At, _workspace: u64) -> Result<(), Error> {
        // SAFETY: the caller guarantees the tensors.
        threads(0)?.install(|| self.call.compute(&unsafe { Memory::new(at, &self.bytes) }))
    }
}

impl<P: Send + Sync> Planned for Compiled<P> {
    fn workspace_bytes(&self) -> usize {
        Compiled::workspace_bytes(self)
    }

    unsafe fn launch(&self, stream: usize, at: &At, workspace: u64) -> Result<(), Error> {
        let needed = Compiled::workspace_bytes(self);
        if needed > 0 && workspace == 0 {
            return Err(PlacementError::WorkspaceSize { given: 0, needed }.into());
        }
        if !workspace.is_multiple_of(256) {
            let tensor = "the workspace";
            return Err(PlacementError::Misaligned { tensor, address: workspace, alignment: 256 }.into());
        }
        // SAFETY: the caller guarantees the stream, the tensors and the workspace.
        unsafe {
            let stream = Stream::from_raw(self.device(), stream);
            Ok(Compiled::launch(self, &stream, at, Workspace::parts(workspace))?)
        }
    }
}

impl Plan {
    /// Plans an operation.
    ///
    /// # Errors
    /// The call is invalid, nothing computes it, or the driver reports an error.
    pub(crate) fn new(
        operation: &str,
        device: i32,
        tensors: Vec<Named>,
        options: &Choices,
    ) -> Result<Plan, Error> {
        match operation {
            "forward" => plan::<Attention>(device, tensors, options),
            "append" => plan::<Cached>(device, tensors, options),
            "backward" => plan::<Gradients>(device, tensors, options),
            "fp8_forward" => plan::<Fp8Attention>(device, tensors, options),
            "quantize" => plan::<Quantization>(device, tensors, options),
            "combine" => plan::<Combination>(device, tensors, options),
            other => Err(Error::NoOperation { name: other.to_owned() }),
        }
    }

    pub(crate) fn tensor_count(&self) -> usize {
        self.tensors
    }

    pub(crate) fn workspace_bytes(&self) -> usize {
        self.planned.workspace_bytes()
    }

    /// Computes the call on the CPU, or puts it on a stream.
    ///
    /// # Safety
    /// `data` has the address of each tensor. The tensors, the stream and the workspace are as the header says.
    ///
    /// # Errors
    /// An address is invalid, or the driver reports an error.
    pub(crate) unsafe fn launch(
        &self,
        stream: usize,
        data: &[*mut c_void],
        workspace: u64,
    ) -> Result<(), Error> {
        let address = |&(name, index): &(_, usize)| (name, Some(data[index].expose_provenance() as u64));
        let at: Vec<_> = self.taken.iter().map(address).collect();
        // SAFETY: the caller guarantees all of it.
        unsafe { self.planned.launch(stream, &at, workspace) }
    }
}

fn plan<C: CpuCall>(device: i32, given: Vec<Named>, options: &Choices) -> Result<Plan, Error> {
    let options = Options::new(options);
    let numbers = C::numbers(&options)?;
    options.refuse_others()?;
    let gpu = u32::try_from(device).ok();
    let place = if gpu.is_some() { Place::CheckedForGpu } else { Place::CheckedForCpu };
    let mut given = Tensors { place, given, taken: Vec::new() };
    let mut tensors = fa3_call::Tensors::new(&mut given);
    let call = C::given(&mut tensors, &numbers)?;
    tensors.at()?;
    given.taken.retain(|(tensor, ..)| call.takes(tensor));
    let bytes: Vec<_> = given.taken.iter().map(|&(tensor, _, bytes)| (tensor, bytes)).collect();
    let planned: Box<dyn Planned> = match gpu {
        None => {
            call.check_for_cpu()?;
            Box::new(OnCpu { call, bytes })
        }
        Some(gpu) => {
            let compiled = call.compile(gpu)?;
            compiled.check_sizes(&bytes)?;
            Box::new(compiled)
        }
    };
    let taken = given.taken.into_iter().map(|(tensor, index, _)| (tensor, index)).collect();
    Ok(Plan { tensors: given.given.len(), taken, planned })
}
