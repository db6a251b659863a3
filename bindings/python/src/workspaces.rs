//! Workspaces: kept for the next launch of the same stream, or allocated by Python for one launch.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex};

use fa3_cuda::host::{Compiled, Device, HostError, Operation, OperationError, Stream, Workspace};
use pyo3::prelude::*;

use crate::error::Error;
use crate::kept::lock;

/// A workspace of this size is kept for a stream: the room of counters. Plans that need more are given one for each
/// launch.
const BYTES: usize = Workspace::COUNTERS;

/// Workspaces by the numbers of their devices and streams, until the process ends.
///
/// It is the stream's number in the driver, not its handle: work of a stream that was destroyed may still run
/// when the driver gives its handle to a new one. The number is never given again. A stream costs the driver far
/// more than these bytes, and torch has but a few, which it never destroys, so none is ever freed: freeing would
/// wait for the whole device.
///
/// They are no torch tensors: a tensor lies in whichever pool of memory torch uses at the time. That of a
/// compiled function's first run (`torch.compile(mode="reduce-overhead")`) must be empty after it, and is used
/// again for something else.
static WORKSPACES: LazyLock<Mutex<HashMap<(u32, u64), Workspace>>> = LazyLock::new(Mutex::default);

/// A function of Python, (bytes, zeros) -> (address, owner): it allocates so many bytes, of which it zeroes so many,
/// from the first on, where the stream is now. They may be used until the owner is dropped, and then by later work of
/// the stream.
pub(crate) type Allocate = Py<PyAny>;

/// The workspace of one launch.
pub(crate) struct Lent {
    address: u64,
    _owner: Option<Py<PyAny>>,
}

impl Lent {
    /// Where it lies.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// The workspace for the next launch of an operation on `stream`, of the device with this number: the one that is
    /// kept for the stream, or else one that `allocate` makes. The caller is outside of Python.
    ///
    /// # Errors
    /// The driver's, or the exception that `allocate` raises.
    pub(crate) fn of<P: Operation>(
        compiled: &Compiled<P>,
        ordinal: u32,
        stream: &Stream,
        allocate: &Allocate,
    ) -> Result<Lent, Error> {
        let bytes = compiled.workspace_bytes();
        let kept = find(ordinal, compiled.device(), stream, bytes).map_err(OperationError::from)?;
        if let Some(address) = kept {
            return Ok(Lent { address, _owner: None });
        }
        Python::attach(|py| {
            let (address, owner) = allocate.call1(py, (bytes, compiled.counter_bytes()))?.extract(py)?;
            Ok(Lent { address, _owner: Some(owner) })
        })
    }
}

/// The address of a workspace of `bytes` bytes for the next launch on `stream`, if one is kept. There is none
///
/// - while the stream is captured: the graph may run beside the stream and other graphs, so it needs its
///   own, as long as it lives;
/// - if it takes more than [`BYTES`];
/// - if torch holds all memory of the device.
///
/// Launches of one stream run one after the other and leave it zeroed, so that they share it.
///
/// # Errors
/// The driver's. The legacy stream has no answer while a stream that blocks it is captured. It cannot be used then, and
/// a launch that tried would break that capture.
fn find(ordinal: u32, device: &Device, stream: &Stream, bytes: usize) -> Result<Option<u64>, HostError> {
    if bytes == 0 {
        return Ok(Some(0));
    }
    if bytes > BYTES {
        return Ok(None);
    }
    let Some(id) = stream.id()? else { return Ok(None) };
    // Locked while one is made, so that no two threads make one for the same stream and one of them must be freed.
    let mut workspaces = lock(&WORKSPACES);
    if let Some(workspace) = workspaces.get(&(ordinal, id)) {
        return Ok(Some(workspace.address()));
    }
    match Workspace::new(device, stream, BYTES) {
        Ok(workspace) => Ok(Some(workspaces.entry((ordinal, id)).or_insert(workspace).address())),
        Err(HostError::OutOfMemory { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}
