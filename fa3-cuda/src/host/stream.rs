//! Streams, on which work runs in order, and events, which mark points of them.

use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{
    self, CUevent_flags, CUevent_st, CUstream_flags, CUstream_st, CUstreamCaptureStatus,
};

use super::context::Context;
use super::driver::Handle;
use super::{Device, HostError};

/// A queue of work for a device: kernels and copies on it run one after the other.
#[derive(Debug)]
pub struct Stream {
    context: Arc<Context>,
    raw: Handle<CUstream_st>,
    /// Whether it is destroyed with this value.
    owned: bool,
}

impl Stream {
    pub(super) fn new(device: &Device) -> Result<Stream, HostError> {
        let context = Arc::clone(device.context());
        let mut raw = ptr::null_mut();
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        let current = context.enter()?;
        // SAFETY: `raw` is a valid place for the result.
        current.check("cuStreamCreate", unsafe { sys::cuStreamCreate(&raw mut raw, flags) })?;
        drop(current);
        Ok(Stream { context, raw: Handle(raw), owned: true })
    }

    pub(super) fn default_of(device: &Device) -> Stream {
        Stream { context: Arc::clone(device.context()), raw: Handle(ptr::null_mut()), owned: false }
    }

    /// For tests: the default stream of a context.
    #[cfg(test)]
    pub(super) fn unowned(context: Arc<Context>) -> Stream {
        Stream { context, raw: Handle(ptr::null_mut()), owned: false }
    }

    /// The caller's stream, given as the number that other CUDA libraries show, such as PyTorch's
    /// `torch.cuda.current_stream().cuda_stream`. It is not destroyed with this value.
    ///
    /// # Safety
    /// It must be a stream of this device's primary context (0, 1 and 2 are its default streams), and outlive this
    /// value and all work put on it.
    pub unsafe fn from_raw(device: &Device, raw: usize) -> Stream {
        let raw = Handle(ptr::with_exposed_provenance_mut(raw));
        Stream { context: Arc::clone(device.context()), raw, owned: false }
    }

    /// Waits for all work put on it so far.
    ///
    /// # Errors
    /// Whatever that work did wrong.
    pub fn synchronize(&self) -> Result<(), HostError> {
        let current = self.context.enter()?;
        // SAFETY: the stream is alive.
        current.check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.raw.0) })?;
        self.context.synchronised(|stream| stream.0 == self.raw.0);
        Ok(())
    }

    /// Marks this point of the stream.
    ///
    /// # Errors
    /// The driver's.
    pub fn record(&self) -> Result<Event, HostError> {
        let current = self.context.enter()?;
        let mut raw = ptr::null_mut();
        let flags = CUevent_flags::CU_EVENT_DEFAULT as u32;
        // SAFETY: `raw` is a valid place for the result.
        current.check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut raw, flags) })?;
        let event = Event { context: Arc::clone(&self.context), raw: Handle(raw) };
        // SAFETY: event and stream are alive.
        current.check("cuEventRecord", unsafe { sys::cuEventRecord(event.raw.0, self.raw.0) })?;
        Ok(event)
    }

    /// Its number. No other stream of the process ever gets it, not even one with the handle of a stream that was
    /// destroyed. `None` while the stream is captured into a graph.
    ///
    /// # Errors
    /// The driver's.
    pub fn id(&self) -> Result<Option<u64>, HostError> {
        let current = self.context.enter()?;
        let (mut status, mut id) = (CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE, 0);
        // SAFETY: the stream is alive, and `status` is a valid place for the result.
        let result = unsafe { sys::cuStreamIsCapturing(self.raw.0, &raw mut status) };
        current.check("cuStreamIsCapturing", result)?;
        if status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
            return Ok(None);
        }
        // SAFETY: the stream is alive, and `id` is a valid place for the result.
        current.check("cuStreamGetId", unsafe { sys::cuStreamGetId(self.raw.0, &raw mut id) })?;
        Ok(Some(id))
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Checks that it is a stream of the device with this context.
    ///
    /// # Errors
    /// [`HostError::OtherDevice`].
    pub(super) fn check_context(&self, own: &Context) -> Result<(), HostError> {
        if self.context.is(own) { Ok(()) } else { Err(HostError::OtherDevice) }
    }

    pub(super) fn raw(&self) -> Handle<CUstream_st> {
        self.raw
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.owned
            && let Ok(_current) = self.context.enter()
        {
            // SAFETY: it was created in this context and is destroyed once. Work on it ends first.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.raw.0) };
        }
    }
}

/// A point of a stream, with the time at which the work before it had ended.
#[derive(Debug)]
pub struct Event {
    context: Arc<Context>,
    raw: Handle<CUevent_st>,
}

impl Event {
    /// Waits for the work before it.
    ///
    /// # Errors
    /// Whatever that work did wrong.
    pub fn synchronize(&self) -> Result<(), HostError> {
        let current = self.context.enter()?;
        // SAFETY: the event is alive.
        current.check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.raw.0) })
    }

    /// Milliseconds from `start` to this event, to about half a microsecond. Waits for both.
    ///
    /// # Errors
    /// Whatever the work before them did wrong.
    pub fn millis_since(&self, start: &Event) -> Result<f32, HostError> {
        start.synchronize()?;
        self.synchronize()?;
        let current = self.context.enter()?;
        let mut millis = 0.0;
        // SAFETY: both events are alive, and `millis` is a valid place for the result.
        let result = unsafe { sys::cuEventElapsedTime(&raw mut millis, start.raw.0, self.raw.0) };
        current.check("cuEventElapsedTime", result)?;
        Ok(millis)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter() {
            // SAFETY: it was created in this context and is destroyed once.
            let _ = unsafe { sys::cuEventDestroy_v2(self.raw.0) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// On a machine with a Hopper GPU, work on a borrowed stream is work on the stream itself.
    #[test]
    fn a_stream_of_the_caller_is_used_and_not_destroyed() {
        let Ok(device) = Device::open(0) else {
            println!("skipped: no gpu");
            return;
        };
        let own = device.stream().unwrap();
        // SAFETY: `own` is a stream of the device and outlives the value made of it.
        let borrowed = unsafe { Stream::from_raw(&device, own.raw.0.expose_provenance()) };
        let mut buffer = device.alloc(64).unwrap();
        buffer.fill(&borrowed, 7).unwrap();
        drop(borrowed);
        assert_eq!(buffer.download::<u8>(&own).unwrap(), [7; 64]);
    }

    /// On a machine with a Hopper GPU.
    #[test]
    fn a_stream_has_a_number_of_its_own_and_none_while_it_is_captured() {
        let Ok(device) = Device::open(0) else {
            println!("skipped: no gpu");
            return;
        };
        let (stream, other) = (device.stream().unwrap(), device.stream().unwrap());
        let id = stream.id().unwrap();
        assert!(id.is_some() && id != other.id().unwrap() && id != device.default_stream().id().unwrap());
        stream.begin_capture().unwrap();
        assert_eq!(stream.id(), Ok(None));
        stream.end_capture().unwrap();
        assert_eq!(stream.id(), Ok(id));
        // The driver may give the next stream the same handle.
        drop(stream);
        assert_ne!(device.stream().unwrap().id().unwrap(), id);
    }
}
