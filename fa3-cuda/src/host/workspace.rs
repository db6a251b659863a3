//! Memory that operations need in addition to their tensors.

use super::context::RelaxedCapture;
use super::{Device, DeviceBuffer, HostError, Stream};

/// Device memory for tile counters and for data that an operation keeps between its kernels. It belongs to the caller,
/// who may use it for one operation after the other on one stream: each leaves it as the next one needs it. One of the
/// most bytes that any of them needs serves all operations of a stream, such as all layers of a model. Streams that run
/// at the same time need one each.
///
/// An operation may have several launches, and what one of them writes here another one reads.
/// [`Compiled::run`](super::Compiled::run) borrows the workspace mutably until all of them are on the stream. So host
/// threads that share it cannot put launches of one operation between those of another; those that launch by addresses
/// ([`Compiled::launch`](super::Compiled::launch)) promise that they do not.
#[derive(Debug)]
pub struct Workspace(DeviceBuffer);

impl Workspace {
    /// Bytes at the start of a workspace, or all of a shorter one, that hold zeros before its first launch: counters.
    /// The others may hold anything.
    pub const COUNTERS: usize = 4096;

    /// `bytes` bytes, zeroed on `stream`. The operation says how many it needs, as
    /// [`Compiled::workspace_bytes`](super::Compiled::workspace_bytes) does; more is allowed.
    ///
    /// # Errors
    /// [`HostError::OutOfMemory`], or what the driver says.
    pub fn new(device: &Device, stream: &Stream, bytes: usize) -> Result<Workspace, HostError> {
        // This must not invalidate a capture on another thread.
        let _relaxed = RelaxedCapture::begin()?;
        let mut buffer = device.alloc(bytes)?;
        buffer.fill(stream, 0)?;
        Ok(Workspace(buffer))
    }

    /// The caller's memory.
    ///
    /// # Safety
    /// Its first [`Workspace::COUNTERS`] bytes must hold zeros, or it must have been a workspace before. It must begin
    /// at a multiple of 256.
    pub unsafe fn from_buffer(buffer: DeviceBuffer) -> Workspace {
        Workspace(buffer)
    }

    /// Its address.
    pub fn address(&self) -> u64 {
        self.0.address()
    }

    /// The addresses of the counters of a workspace that begins at `address`, and of what lies behind them.
    pub const fn parts(address: u64) -> [u64; 2] {
        [address, address.wrapping_add(Workspace::COUNTERS as u64)]
    }

    /// Its bytes.
    pub fn bytes(&self) -> usize {
        self.0.bytes()
    }

    pub(super) fn buffer(&self) -> &DeviceBuffer {
        &self.0
    }
}
