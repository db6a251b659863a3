//! Device memory of our own.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUresult};

use super::context::Context;
use super::{CudaError, Device, HostError, Memory, Stream};

/// Types that are any sequence of bytes.
///
/// # Safety
/// Every bit pattern must be a value, and no byte may be padding.
pub unsafe trait Plain: Copy + Default {}

macro_rules! plain {
    ($($ty:ty)+) => {$(
        // SAFETY: a primitive number.
        unsafe impl Plain for $ty {}
    )+};
}

plain!(u8 u16 u32 u64 i8 i16 i32 i64 f32 f64);

/// Device memory, freed with this value.
#[derive(Debug)]
pub struct DeviceBuffer {
    context: Arc<Context>,
    address: u64,
    bytes: usize,
}

impl DeviceBuffer {
    pub(super) fn new(device: &Device, bytes: usize) -> Result<DeviceBuffer, HostError> {
        let context = Arc::clone(device.context());
        let mut address = 0;
        let current = context.enter()?;
        // SAFETY: `address` is a valid place for the result. The driver allocates no empty memory.
        let result = unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes.max(1)) };
        current.check_or("cuMemAlloc", result, |error| refused(device, bytes, error))?;
        drop(current);
        Ok(DeviceBuffer { context, address, bytes })
    }

    /// Its address, for [`fa3_ir::ArgValue::Pointer`] and [`fa3_ir::TensorView`].
    pub fn address(&self) -> u64 {
        self.address
    }

    pub(super) fn context(&self) -> &Context {
        &self.context
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Sets every byte, in the stream's order.
    ///
    /// # Errors
    /// The driver's.
    pub fn fill(&mut self, stream: &Stream, byte: u8) -> Result<(), HostError> {
        let current = self.context.enter()?;
        // SAFETY: the memory has as many bytes, and is freed only when the device has done with it.
        let result = unsafe { sys::cuMemsetD8Async(self.address, byte, self.bytes, stream.raw().0) };
        current.check("cuMemsetD8Async", result)
    }

    /// Fills it with `data`, in the stream's order, and waits for that.
    ///
    /// # Errors
    /// [`HostError::BufferSize`] if `data` is not as large as it, or the driver's.
    pub fn upload<T: Plain>(&mut self, stream: &Stream, data: &[T]) -> Result<(), HostError> {
        let given = size_of_val(data);
        if given != self.bytes {
            return Err(HostError::BufferSize { given, bytes: self.bytes });
        }
        let current = self.context.enter()?;
        // SAFETY: source and destination have `given` bytes; the source is borrowed until the copy is done.
        let result =
            unsafe { sys::cuMemcpyHtoDAsync_v2(self.address, data.as_ptr().cast(), given, stream.raw().0) };
        current.check("cuMemcpyHtoDAsync", result)?;
        stream.synchronize()
    }

    /// Its contents, after all work that the stream has now.
    ///
    /// # Errors
    /// [`HostError::BufferSize`] if it is not whole elements, or the driver's.
    pub fn download<T: Plain>(&self, stream: &Stream) -> Result<Vec<T>, HostError> {
        let mut data = vec![T::default(); self.bytes / size_of::<T>()];
        let given = size_of_val(data.as_slice());
        if given != self.bytes {
            return Err(HostError::BufferSize { given, bytes: self.bytes });
        }
        let current = self.context.enter()?;
        // SAFETY: source and destination have `given` bytes, any of which make valid elements; the destination
        // lives until the copy is done.
        let result = unsafe {
            sys::cuMemcpyDtoHAsync_v2(data.as_mut_ptr().cast(), self.address, given, stream.raw().0)
        };
        current.check("cuMemcpyDtoHAsync", result)?;
        stream.synchronize()?;
        Ok(data)
    }
}

fn refused(device: &Device, bytes: usize, error: CudaError) -> HostError {
    let full = error == CudaError::new(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    match device.memory() {
        Ok(Memory { free, total }) if full => HostError::OutOfMemory { bytes, free, total },
        Ok(_) => HostError::Driver { call: "cuMemAlloc", error },
        Err(error) => error,
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter() {
            // SAFETY: it was allocated in this context and is freed once. The driver waits for work under way.
            let _ = unsafe { sys::cuMemFree_v2(self.address) };
        }
    }
}
