//! Device memory.

use std::sync::Arc;

use bytemuck::Pod;
use cudarc::driver::sys::{self, CUresult};

use super::context::{Context, Current};
use super::{CudaError, Device, HostError, Memory, Stream};

/// Device memory. Dropping a buffer of [`Device::alloc`] frees it, after waiting for all work of the device. While this
/// thread captures a stream, the buffer cannot be freed, and is leaked. [`DeviceBuffer::from_raw`] takes the caller's
/// memory.
#[derive(Debug)]
pub struct DeviceBuffer {
    context: Arc<Context>,
    address: u64,
    bytes: usize,
    /// Whether the memory is freed with this value.
    owned: bool,
}

impl DeviceBuffer {
    pub(super) fn new(device: &Device, bytes: usize) -> Result<DeviceBuffer, HostError> {
        let context = Arc::clone(device.context());
        let mut address = 0;
        let current = context.enter()?;
        // SAFETY: `address` is valid for the result. The driver refuses allocations of 0 bytes.
        let result = unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes.max(1)) };
        current.check_or("cuMemAlloc", result, |error| refused(bytes, error, || device.memory()))?;
        drop(current);
        Ok(DeviceBuffer { context, address, bytes, owned: true })
    }

    /// Takes the caller's memory by its address, as other CUDA libraries give it (PyTorch's `tensor.data_ptr()`), and
    /// its size in bytes. Dropping this value does not free it.
    ///
    /// # Safety
    /// At `address` there must be `bytes` bytes of memory that the device may access in this device's primary context.
    /// The memory must outlive this value and all work put on a stream with it. Until then nothing else may write to
    /// it, and nothing else may read what this value or that work writes: the rules that the borrow checker enforces
    /// for memory of [`Device::alloc`].
    pub unsafe fn from_raw(device: &Device, address: u64, bytes: usize) -> DeviceBuffer {
        DeviceBuffer { context: Arc::clone(device.context()), address, bytes, owned: false }
    }

    /// A buffer for tests that refers to no memory.
    #[cfg(test)]
    pub(super) fn unowned(context: Arc<Context>, address: u64, bytes: usize) -> DeviceBuffer {
        DeviceBuffer { context, address, bytes, owned: false }
    }

    /// The address, for [`fa3_ir::ArgValue::Pointer`] and [`fa3_ir::TensorView`].
    pub fn address(&self) -> u64 {
        self.address
    }

    pub(super) fn context(&self) -> &Context {
        &self.context
    }

    /// Makes the buffer's context current, for work on `stream`.
    ///
    /// # Errors
    /// [`HostError::OtherDevice`] if the stream belongs to another device, or an error of the driver.
    pub(super) fn enter(&self, stream: &Stream) -> Result<Current<'_>, HostError> {
        stream.check_context(&self.context)?;
        self.context.enter()
    }

    /// The size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Sets every byte, in stream order.
    ///
    /// # Errors
    /// [`HostError::OtherDevice`] if the stream belongs to another device, or an error of the driver.
    pub fn fill(&mut self, stream: &Stream, byte: u8) -> Result<(), HostError> {
        let current = self.enter(stream)?;
        // SAFETY: the memory has `bytes` bytes, and is freed only after the device has finished with it.
        let result = unsafe { sys::cuMemsetD8Async(self.address, byte, self.bytes, stream.raw().0) };
        current.check("cuMemsetD8Async", result)
    }

    /// Fills the buffer with `data`, in stream order, and waits for the copy.
    ///
    /// # Errors
    /// [`HostError::BufferSize`] if the sizes differ, [`HostError::OtherDevice`] if the stream belongs to another
    /// device, or an error of the driver.
    pub fn upload<T: Pod>(&mut self, stream: &Stream, data: &[T]) -> Result<(), HostError> {
        let given = size_of_val(data);
        if given != self.bytes {
            return Err(HostError::BufferSize { given, bytes: self.bytes });
        }
        self.upload_at(stream, 0, data)
    }

    /// Writes `data` from byte `from` on, in stream order, and waits for the copy.
    ///
    /// # Errors
    /// [`HostError::BufferSize`] if `data` does not fit, [`HostError::OtherDevice`] if the stream belongs to another
    /// device, or an error of the driver.
    pub fn upload_at<T: Pod>(&mut self, stream: &Stream, from: usize, data: &[T]) -> Result<(), HostError> {
        let (given, bytes) = (size_of_val(data), self.bytes.saturating_sub(from));
        if given > bytes {
            return Err(HostError::BufferSize { given, bytes });
        }
        let current = self.enter(stream)?;
        // SAFETY: the source has `given` bytes, and the destination has `given` bytes from `from` on, unless it is
        // empty; the source is borrowed until the copy is done.
        let result = unsafe {
            let to = self.address.wrapping_add(from as u64);
            sys::cuMemcpyHtoDAsync_v2(to, data.as_ptr().cast(), given, stream.raw().0)
        };
        current.check("cuMemcpyHtoDAsync", result)?;
        stream.synchronize()
    }

    /// Returns the contents after all work that is on the stream now.
    ///
    /// # Errors
    /// [`HostError::BufferSize`] if the size is not a multiple of an element's size, [`HostError::OtherDevice`] if the
    /// stream belongs to another device, or an error of the driver.
    pub fn download<T: Pod>(&self, stream: &Stream) -> Result<Vec<T>, HostError> {
        let count = self.bytes.checked_div(size_of::<T>()).unwrap_or(0);
        let mut data = vec![T::zeroed(); count];
        let given = size_of_val(data.as_slice());
        if given != self.bytes {
            return Err(HostError::BufferSize { given, bytes: self.bytes });
        }
        let current = self.enter(stream)?;
        // SAFETY: source and destination have `given` bytes, any bytes are valid elements, and the destination lives
        // until the copy is done.
        let result = unsafe {
            sys::cuMemcpyDtoHAsync_v2(data.as_mut_ptr().cast(), self.address, given, stream.raw().0)
        };
        current.check("cuMemcpyDtoHAsync", result)?;
        stream.synchronize()?;
        Ok(data)
    }
}

fn refused(bytes: usize, error: CudaError, memory: impl FnOnce() -> Result<Memory, HostError>) -> HostError {
    let why = HostError::Driver { call: "cuMemAlloc", error };
    if error != CudaError::new(CUresult::CUDA_ERROR_OUT_OF_MEMORY) {
        return why;
    }
    // An error of the memory query must not hide the original error.
    memory().map_or(why, |Memory { free, total }| HostError::OutOfMemory { bytes, free, total })
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if self.owned
            && let Ok(_current) = self.context.enter()
        {
            // SAFETY: it was allocated in this context and is freed once. The driver waits for work under way.
            let _ = unsafe { sys::cuMemFree_v2(self.address) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::mem::ManuallyDrop;

    use super::*;

    #[test]
    fn an_allocation_says_itself_why_it_was_refused() {
        let (full, other) = (CUresult::CUDA_ERROR_OUT_OF_MEMORY, CUresult::CUDA_ERROR_INVALID_VALUE);
        let lost = || Err(HostError::Driver { call: "cuMemGetInfo", error: CudaError::new(other) });
        let known = || Ok(Memory { free: 5, total: 9 });
        let why = |code| HostError::Driver { call: "cuMemAlloc", error: CudaError::new(code) };
        assert_eq!(
            refused(7, CudaError::new(full), known),
            HostError::OutOfMemory { bytes: 7, free: 5, total: 9 }
        );
        assert_eq!(refused(7, CudaError::new(full), lost), why(full));
        assert_eq!(refused(7, CudaError::new(other), lost), why(other));
    }

    /// These contexts are unknown to the driver: no driver function may be called in them, and no object of them may be
    /// dropped.
    #[test]
    fn streams_of_other_devices_are_refused_before_the_driver_is_asked() {
        let [here, there] = [0x10, 0x20].map(|raw| Arc::new(Context::unknown(raw)));
        let stream = ManuallyDrop::new(Stream::unowned(there));
        let buffer = DeviceBuffer { context: here, address: 0x1000, bytes: 4, owned: true };
        let mut buffer = ManuallyDrop::new(buffer);
        assert_eq!(buffer.fill(&stream, 0), Err(HostError::OtherDevice));
        assert_eq!(buffer.upload(&stream, &[1_u32]), Err(HostError::OtherDevice));
        assert_eq!(buffer.download::<u32>(&stream), Err(HostError::OtherDevice));
    }

    /// Needs a machine with a Hopper GPU.
    #[test]
    fn memory_of_the_caller_is_used_and_not_freed() {
        let Ok(device) = Device::open(0) else {
            println!("skipped: no gpu");
            return;
        };
        let (stream, own) = (device.stream().unwrap(), device.alloc(8).unwrap());
        // SAFETY: this is the second half of `own`, which outlives `half` and is not accessed meanwhile.
        let mut half = unsafe { DeviceBuffer::from_raw(&device, own.address() + 4, 4) };
        half.upload(&stream, &[7_u32]).unwrap();
        drop(half);
        assert_eq!(own.download::<u32>(&stream).unwrap()[1], 7);
    }
}
