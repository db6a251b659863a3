//! Memory that operations need in addition to their tensors.

use super::context::RelaxedCapture;
use super::{Device, DeviceBuffer, HostError, Stream};

/// Device memory for tile counters and for data that an operation keeps between its kernels. It belongs to the caller,
/// who may use it for one launch after the other on one stream: each launch leaves it as the next one needs it.
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
