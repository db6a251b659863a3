//! Workspaces: kept for the next launch of the same stream, or allocated by Python for one launch. Of a large one the
//! counters are kept in any case, so that nobody zeroes them again.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex};

use fa3_cuda::host::{Compiled, Device, HostError, Operation, OperationError, Stream, Workspace};
use pyo3::prelude::*;

use crate::error::Error;
use crate::kept::lock;

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
    parts: [u64; 2],
    _owner: Option<Py<PyAny>>,
}

impl Lent {
    /// Where its counters and its scratch lie.
    pub(crate) fn parts(&self) -> [u64; 2] {
        self.parts
    }

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
            return Ok(Lent { parts: [0; 2], _owner: None });
        }
        let kept =
            find(ordinal, compiled.device(), stream).map_err(OperationError::from)?.map(Workspace::parts);
        if let Some(parts) = kept
            && bytes <= BYTES
        {
            return Ok(Lent { parts, _owner: None });
        }
        Python::attach(|py| {
            let (bytes, zeros) = if kept.is_some() { (scratch, 0) } else { (bytes, counters) };
            let (address, owner) = allocate.call1(py, (bytes, zeros))?.extract(py)?;
            let parts = kept.map_or(Workspace::parts(address), |[counters, _]| [counters, address]);
            Ok(Lent { parts, _owner: Some(owner) })
        })
    }
}

/// The address of the workspace that is kept for launches on `stream`, if there is one. There is none
///
/// - while the stream is captured: the graph may run beside the stream and other graphs, so it needs its
///   own, as long as it lives;
/// - if torch holds all memory of the device.
///
/// Launches of one stream run one after the other and leave its counters zeroed, so that they share it.
///
/// # Errors
/// The driver's. The legacy stream has no answer while a stream that blocks it is captured. It cannot be used then, and
/// a launch that tried would break that capture.
fn find(ordinal: u32, device: &Device, stream: &Stream) -> Result<Option<u64>, HostError> {
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
