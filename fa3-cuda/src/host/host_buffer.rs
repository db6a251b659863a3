//! Page-locked host memory.

use std::ptr::{self, NonNull};
use std::slice;
use std::sync::Arc;

use bytemuck::Pod;
use cudarc::driver::sys::{self, CUevent_flags};

use super::context::Context;
use super::{Device, DeviceBuffer, Event, HostError, Stream};

/// Page-locked host memory, with asynchronous copies from and to device memory: [`DeviceBuffer::upload_from`] and
/// [`DeviceBuffer::download_to`] return at once. Reading or writing the memory afterwards waits for the copy, and only
/// for that.
///
/// ```
/// use fa3_cuda::host::{Device, HostError};
///
/// let run = || -> Result<Vec<u32>, HostError> {
///     let device = Device::open(0)?;
///     let (stream, mut memory) = (device.stream()?, device.alloc_host(4 * 32)?);
///     let mut buffer = device.alloc(memory.bytes())?;
///     memory.write::<u32>()?.fill(41);
///     buffer.upload_from(&stream, &mut memory)?;
///     // The host is free here. This waits until the copy has read the memory:
///     memory.write::<u32>()?.fill(0);
///     buffer.download_to(&stream, &mut memory)?;
///     Ok(memory.read()?.to_vec())
/// };
/// match run() {
///     Ok(x) => assert_eq!(x, [41; 32]),
///     Err(error) => println!("skipped: {error}"),
/// }
/// ```
#[derive(Debug)]
pub struct HostBuffer {
    context: Arc<Context>,
    memory: NonNull<u8>,
    bytes: usize,
    /// An event after the last copy. Waiting for it waits for all earlier copies.
    copied: Event,
}

// SAFETY: it is memory of the process, to which only this value gives access, by the rules of references.
unsafe impl Send for HostBuffer {}
// SAFETY: as above.
unsafe impl Sync for HostBuffer {}

impl HostBuffer {
    pub(super) fn new(device: &Device, bytes: usize) -> Result<HostBuffer, HostError> {
        let context = Arc::clone(device.context());
        let copied = Event::new(&context, CUevent_flags::CU_EVENT_DISABLE_TIMING)?;
        let (current, mut memory) = (context.enter()?, ptr::null_mut());
        // SAFETY: `memory` is valid for the result.
        let result = unsafe { sys::cuMemHostAlloc(&raw mut memory, bytes.max(1), 0) };
        current.check("cuMemHostAlloc", result)?;
        drop(current);
        let memory = NonNull::new(memory.cast::<u8>()).expect("the driver gives memory, or an error");
        // SAFETY: the driver gave `bytes` bytes. They are written because Rust must not read uninitialised bytes.
        unsafe { memory.write_bytes(0, bytes) };
        Ok(HostBuffer { context, memory, bytes, copied })
    }

    /// The size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the contents, which are 0 at first. Waits for the last copy.
    ///
    /// # Errors
    /// [`HostError::BufferSize`] if the size is not a multiple of an element's size, or errors of the work before the
    /// copy.
    pub fn read<T: Pod>(&self) -> Result<&[T], HostError> {
        self.copied.synchronize()?;
        // SAFETY: the memory has `bytes` bytes, all of which were written. No copy is under way, and none begins while
        // this value is borrowed.
        let bytes = unsafe { slice::from_raw_parts(self.memory.as_ptr(), self.bytes) };
        bytemuck::try_cast_slice(bytes).map_err(|_| self.not_whole::<T>())
    }

    /// Mutable access to the contents. Waits for the last copy.
    ///
    /// # Errors
    /// The errors of [`HostBuffer::read`].
    pub fn write<T: Pod>(&mut self) -> Result<&mut [T], HostError> {
        self.copied.synchronize()?;
        let error = self.not_whole::<T>();
        // SAFETY: as for `read`.
        let bytes = unsafe { slice::from_raw_parts_mut(self.memory.as_ptr(), self.bytes) };
        bytemuck::try_cast_slice_mut(bytes).map_err(|_| error)
    }

    /// The error for a size that is not a multiple of an element's size. (Pages are aligned to every element.)
    fn not_whole<T>(&self) -> HostError {
        HostError::BufferSize { given: self.bytes.next_multiple_of(size_of::<T>().max(1)), bytes: self.bytes }
    }

    /// Puts a copy of this memory on a stream. The copy comes after all earlier copies.
    ///
    /// # Errors
    /// [`HostError::BufferSize`] if the sizes differ, [`HostError::OtherDevice`], or an error of the driver.
    fn copy(
        &mut self,
        stream: &Stream,
        device: &DeviceBuffer,
        copy: impl FnOnce(NonNull<u8>) -> Result<(), HostError>,
    ) -> Result<(), HostError> {
        if self.bytes != device.bytes() {
            return Err(HostError::BufferSize { given: self.bytes, bytes: device.bytes() });
        }
        stream.check_context(&self.context)?;
        if stream.is_captured()? {
            // The copy runs when the graph is launched. The caller of that launch guarantees the memory.
            return copy(self.memory);
        }
        stream.wait(&self.copied)?;
        copy(self.memory)?;
        stream.record_in(&self.copied).or_else(|error| {
            // No later access could wait for the copy, since the event was not recorded.
            stream.synchronize()?;
            Err(error)
        })
    }
}

impl DeviceBuffer {
    /// Fills the buffer with the contents of `from`, in stream order. Returns at once. On a captured stream each launch
    /// of the graph copies, and the caller of that launch guarantees both memories.
    ///
    /// # Errors
    /// [`HostError::BufferSize`] if the sizes differ, [`HostError::OtherDevice`] if the stream or the memory belongs to
    /// another device, or an error of the driver.
    pub fn upload_from(&mut self, stream: &Stream, from: &mut HostBuffer) -> Result<(), HostError> {
        let current = self.enter(stream)?;
        from.copy(stream, self, |memory| {
            // SAFETY: both memories have that number of bytes. Freeing or changing host memory waits for the copy, and
            // so does the driver before it frees device memory.
            let result = unsafe {
                sys::cuMemcpyHtoDAsync_v2(
                    self.address(),
                    memory.as_ptr().cast(),
                    self.bytes(),
                    stream.raw().0,
                )
            };
            current.check("cuMemcpyHtoDAsync", result)
        })
    }

    /// Copies the contents to `to`, in stream order. Returns at once. Captures work as for
    /// [`DeviceBuffer::upload_from`].
    ///
    /// # Errors
    /// The errors of [`DeviceBuffer::upload_from`].
    pub fn download_to(&self, stream: &Stream, to: &mut HostBuffer) -> Result<(), HostError> {
        let current = self.enter(stream)?;
        to.copy(stream, self, |memory| {
            // SAFETY: as for `upload_from`.
            let result = unsafe {
                sys::cuMemcpyDtoHAsync_v2(
                    memory.as_ptr().cast(),
                    self.address(),
                    self.bytes(),
                    stream.raw().0,
                )
            };
            current.check("cuMemcpyDtoHAsync", result)
        })
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        // If a copy may never end, as on a lost device, the memory is leaked.
        if self.copied.synchronize().is_ok()
            && let Ok(_current) = self.context.enter()
        {
            // SAFETY: it was allocated in this context and is freed once, when no copy is under way.
            let _ = unsafe { sys::cuMemFreeHost(self.memory.as_ptr().cast()) };
        }
    }
}
