//! Memory that operations need in addition to their tensors.

use super::context::RelaxedCapture;
use super::{Device, DeviceBuffer, HostError, Stream};

/// Device memory for tile counters and for data that an operation keeps between its kernels. It belongs to the caller,
/// who may use it for one operation after the other on one stream: each operation leaves the counters at 0, as the next
/// one needs them. One workspace serves all operations of a stream, such as all layers of a model, if it has the
/// largest size that any of them needs. Streams that run at the same time need a workspace each.
///
/// An operation may have several launches, which pass data in the workspace. [`Compiled::run`](super::Compiled::run)
/// borrows the workspace mutably until all of these launches are on the stream, so host threads that share it cannot
/// interleave the launches of two operations. Callers of [`Compiled::launch`](super::Compiled::launch), which takes
/// addresses, promise not to interleave them.
#[derive(Debug)]
pub struct Workspace(DeviceBuffer);

impl Workspace {
    /// Number of leading bytes of a workspace that must be zero before its first launch: counters. (In a shorter
    /// workspace these are all bytes.) The other bytes need no initialisation.
    pub const COUNTERS: usize = 4096;

    /// A workspace of `bytes` bytes, zeroed on `stream`.
    /// [`Compiled::workspace_bytes`](super::Compiled::workspace_bytes) gives the number that an operation needs.
    ///
    /// # Errors
    /// [`HostError::OutOfMemory`], or an error of the driver.
    pub fn new(device: &Device, stream: &Stream, bytes: usize) -> Result<Workspace, HostError> {
        // The allocation must not invalidate a capture on another thread.
        let _relaxed = RelaxedCapture::begin()?;
        let mut buffer = device.alloc(bytes)?;
        buffer.fill(stream, 0)?;
        Ok(Workspace(buffer))
    }

    /// A workspace in the caller's memory.
    ///
    /// # Safety
    /// The buffer's first [`Workspace::COUNTERS`] bytes must be zero, or it must have been a workspace before. It must
    /// begin at a multiple of 256.
    pub unsafe fn from_buffer(buffer: DeviceBuffer) -> Workspace {
        Workspace(buffer)
    }

    /// The address.
    pub fn address(&self) -> u64 {
        self.0.address()
    }

    /// The addresses of the counters and of the scratch memory behind them, in a workspace that begins at `address`.
    pub const fn parts(address: u64) -> [u64; 2] {
        [address, address.wrapping_add(Workspace::COUNTERS as u64)]
    }

    /// The size in bytes.
    pub fn bytes(&self) -> usize {
        self.0.bytes()
    }

    pub(super) fn buffer(&self) -> &DeviceBuffer {
        &self.0
    }
}
