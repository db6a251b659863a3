//! Workspaces: cached for the next launch of the same stream, or allocated by the caller for one launch. The counters
//! of a large workspace are always cached, so that they need not be zeroed again.

use std::any::Any;
use std::sync::LazyLock;

use fa3_call::Error;
use fa3_cuda::host::{
    Compiled, Device, DeviceBuffer, HostError, KeyedMutex, Lease, Operation, OperationError, Stream,
    Workspace,
};
use pyo3::prelude::*;

use crate::error::caller;
use crate::threads;

/// The size in bytes of a stream's cached workspace: room for counters, and scratch memory for tables of sequences. A
/// plan that needs more gets scratch memory for each launch.
const BYTES: usize = 1 << 20;

/// Workspaces by the numbers of their devices and streams. They live until the process ends.
///
/// A key has the stream's number in the driver, not its handle: when the driver gives the handle of a destroyed stream
/// to a new stream, work of the old stream may still run. The number is never given again. A stream takes far more of
/// the driver's memory than a workspace, and torch has only a few streams, which it never destroys. So no workspace is
/// ever freed, which would wait for the whole device.
///
/// Workspaces are not torch tensors: a tensor would lie in the memory pool that torch uses at the time. After a
/// compiled function's first run (`torch.compile(mode="reduce-overhead")`), its pool must be empty, because torch uses
/// the pool again.
static WORKSPACES: LazyLock<KeyedMutex<(u32, u64), Workspace>> = LazyLock::new(KeyedMutex::default);

/// The alignment of a workspace in bytes.
pub(crate) const ALIGNMENT: usize = 256;

/// A computation on the CPU.
pub(crate) type Work<'a> = Box<dyn FnOnce() -> Result<(), Error> + Send + 'a>;

/// The program that makes a call: Python, XLA or tvm-ffi. It gives memory and threads.
pub(crate) trait Caller {
    /// Allocates `bytes` bytes at a multiple of [`ALIGNMENT`], and zeroes the first `zeros` bytes at the current point
    /// of the stream. They may be used until the owner is dropped.
    ///
    /// # Errors
    /// An error of the caller's.
    fn allocate(
        &self,
        device: &Device,
        stream: &Stream,
        bytes: usize,
        zeros: usize,
    ) -> Result<(u64, Box<dyn Any>), Error>;

    /// Computes on the threads that the caller wants, and waits.
    ///
    /// # Errors
    /// Errors of the work, or [`Error::Threads`].
    fn compute(&self, work: Work<'_>) -> Result<(), Error>;
}

/// A function of Python, (bytes, zeros) -> (address, owner). It allocates `bytes` bytes and zeroes the first `zeros`
/// bytes at the current point of the stream. They may be used until the owner is dropped. After that, later work of the
/// stream may use them.
pub(crate) struct Allocate {
    pub(crate) function: Py<PyAny>,
    /// The function's first argument, before the others, if it takes one.
    pub(crate) like: Option<Py<PyAny>>,
}

impl Caller for Allocate {
    fn allocate(
        &self,
        _device: &Device,
        _stream: &Stream,
        bytes: usize,
        zeros: usize,
    ) -> Result<(u64, Box<dyn Any>), Error> {
        let call = |py: Python<'_>| -> PyResult<(u64, Py<PyAny>)> {
            let made = match &self.like {
                Some(like) => self.function.call1(py, (like, bytes, zeros))?,
                None => self.function.call1(py, (bytes, zeros))?,
            };
            made.extract(py)
        };
        let (address, owner) = Python::attach(call).map_err(caller)?;
        Ok((address, Box::new(owner)))
    }

    fn compute(&self, work: Work<'_>) -> Result<(), Error> {
        threads::run(work)
    }
}

/// The first multiple of [`ALIGNMENT`] in memory that begins at an address. Zeroes the `zeros` bytes from there on at
/// the current point of the stream.
///
/// # Safety
/// The memory is the device's, has these bytes, and nothing else uses it.
///
/// # Errors
/// Errors of the driver.
#[allow(unsafe_code, reason = "memory of other programs is a plain address")]
pub(crate) unsafe fn zeroed(
    device: &Device,
    stream: &Stream,
    address: u64,
    zeros: usize,
) -> Result<u64, Error> {
    let address = address.next_multiple_of(ALIGNMENT as u64);
    if zeros > 0 {
        // SAFETY: the caller guarantees the memory.
        let mut counters = unsafe { DeviceBuffer::from_raw(device, address, zeros) };
        counters.fill(stream, 0).map_err(OperationError::from)?;
    }
    Ok(address)
}

/// The workspace of one call: the stream's cached workspace, or memory from the caller. It may also be the counters of
/// the cached workspace and scratch memory from the caller.
pub(crate) struct Lent {
    kept: Option<Lease<Workspace>>,
    allocated: Option<(u64, Box<dyn Any>)>,
}

impl Lent {
    /// The workspace for the next launch of an operation on `stream`, of the device `ordinal`: the stream's cached
    /// workspace if it is large enough, otherwise memory from the caller. Must be called without the GIL.
    ///
    /// # Errors
    /// Errors of the driver or of the caller.
    pub(crate) fn of<P: Operation>(
        compiled: &Compiled<P>,
        ordinal: u32,
        stream: &Stream,
        caller: &dyn Caller,
    ) -> Result<Lent, Error> {
        let (bytes, counters, scratch) =
            (compiled.workspace_bytes(), compiled.counter_bytes(), compiled.scratch_bytes());
        if bytes == 0 {
            return Ok(Lent { kept: None, allocated: None });
        }
        let kept = find(ordinal, compiled.device(), stream).map_err(OperationError::from)?;
        let (bytes, zeros) = match kept {
            Some(_) if bytes <= BYTES => return Ok(Lent { kept, allocated: None }),
            Some(_) => (scratch, 0),
            None => (bytes, counters),
        };
        // The cached workspace is not held here: Python may run any code meanwhile, even another call on this stream.
        let allocated = caller.allocate(compiled.device(), stream, bytes, zeros)?;
        Ok(Lent { kept, allocated: Some(allocated) })
    }

    /// Calls `launch` with the addresses of the workspace's counters and scratch memory. Until it returns, other
    /// threads that launch over the same cached workspace wait, since one call may be several kernels.
    pub(crate) fn with<R>(&self, launch: impl FnOnce([u64; 2]) -> R) -> R {
        let allocated = self.allocated.as_ref().map(|(address, _)| *address);
        match &self.kept {
            None => launch(allocated.map_or([0; 2], Workspace::parts)),
            Some(kept) => kept.with(|workspace| {
                let [counters, scratch] = Workspace::parts(workspace.address());
                launch([counters, allocated.unwrap_or(scratch)])
            }),
        }
    }
}

/// The cached workspace for launches on `stream`. There is none
///
/// - while the stream is captured: the graph may run beside the stream and other graphs, so it needs its own workspace,
///   which lives as long as the graph;
/// - if the caller holds all memory of the device.
///
/// The calls of a stream are launched one after the other and leave the counters at zero, so they share the workspace.
///
/// # Errors
/// Errors of the driver. While a stream that blocks the legacy stream is captured, the legacy stream has no number. It
/// cannot be used then: a launch on it would break that capture.
fn find(ordinal: u32, device: &Device, stream: &Stream) -> Result<Option<Lease<Workspace>>, HostError> {
    let Some(id) = stream.id()? else { return Ok(None) };
    match WORKSPACES.find((ordinal, id), || Workspace::new(device, stream, BYTES)) {
        Ok(workspace) => Ok(Some(workspace)),
        Err(HostError::OutOfMemory { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}
