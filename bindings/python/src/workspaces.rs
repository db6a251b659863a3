//! Workspaces: kept for the next launch of the same stream, or allocated by Python for one launch. Of a large one the
//! counters are kept in any case, so that they need not be zeroed again.

use std::sync::LazyLock;

use fa3_cuda::host::{
    Compiled, Device, HostError, KeyedMutex, Lease, Operation, OperationError, Stream, Workspace,
};
use pyo3::prelude::*;

use crate::error::Error;

/// A workspace of this size is kept for a stream: the room of counters, and scratch for tables of sequences. Plans that
/// need more are given scratch for each launch.
const BYTES: usize = 1 << 20;

/// Workspaces by the numbers of their devices and streams, until the process ends.
///
/// It is the stream's number in the driver, not its handle: work of a stream that was destroyed may still run
/// when the driver gives its handle to a new one. The number is never given again. A stream costs the driver far
/// more than these bytes, and torch has but a few, which it never destroys, so none is ever freed: freeing would
/// wait for the whole device.
///
/// They are not torch tensors: a tensor would lie in the memory pool that torch uses at the time. The pool of a
/// compiled function's first run (`torch.compile(mode="reduce-overhead")`) must be empty after it, and is reused.
static WORKSPACES: LazyLock<KeyedMutex<(u32, u64), Workspace>> = LazyLock::new(KeyedMutex::default);

/// A function of Python, (bytes, zeros) -> (address, owner): it allocates `bytes` bytes and zeroes the first `zeros` of
/// them, from the first on, where the stream is now. They may be used until the owner is dropped, and then by later
/// work of the stream.
pub(crate) type Allocate = Py<PyAny>;

/// The workspace of one call: the one that is kept for the stream, or memory that Python allocated, or counters of the
/// one and scratch of the other.
pub(crate) struct Lent {
    kept: Option<Lease<Workspace>>,
    allocated: Option<(u64, Py<PyAny>)>,
}

impl Lent {
    /// The workspace for the next launch of an operation on `stream`, of the device with this number: as far as it goes
    /// the one that is kept for the stream, and else what `allocate` makes. The caller is outside of Python.
    ///
    /// # Errors
    /// The driver's, or the exception that `allocate` raises.
    pub(crate) fn of<P: Operation>(
        compiled: &Compiled<P>,
        ordinal: u32,
        stream: &Stream,
        allocate: &Allocate,
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
        // Not while the kept one is held: Python may run anything meanwhile, another call on this stream, too.
        let allocated = Python::attach(|py| allocate.call1(py, (bytes, zeros))?.extract(py))?;
        Ok(Lent { kept, allocated: Some(allocated) })
    }

    /// Calls `launch` with the addresses of its counters and its scratch. Until it returns, other threads that launch
    /// over the same kept workspace wait: the stream orders kernels, and a call may be several.
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

/// The workspace that is kept for launches on `stream`. There is none
///
/// - while the stream is captured: the graph may run beside the stream and other graphs, so it needs its
///   own, as long as it lives;
/// - if torch holds all memory of the device.
///
/// Calls of one stream are launched one after the other and leave its counters zeroed, so that they share it.
///
/// # Errors
/// The driver's. The legacy stream has no answer while a stream that blocks it is captured. It cannot be used then, and
/// a launch that tried would break that capture.
fn find(ordinal: u32, device: &Device, stream: &Stream) -> Result<Option<Lease<Workspace>>, HostError> {
    let Some(id) = stream.id()? else { return Ok(None) };
    match WORKSPACES.find((ordinal, id), || Workspace::new(device, stream, BYTES)) {
        Ok(workspace) => Ok(Some(workspace)),
        Err(HostError::OutOfMemory { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}
