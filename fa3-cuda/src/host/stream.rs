//! Streams, on which work runs in order.

use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUevent_flags, CUstream_flags, CUstream_st, CUstreamCaptureStatus};

use super::context::Context;
use super::driver::Handle;
use super::{Device, Event, HostError};

/// A queue of work for a device: kernels and copies on it run one after the other. Any thread may put work on it; the
/// order between threads is unspecified.
#[derive(Debug)]
pub struct Stream {
    context: Arc<Context>,
    raw: Handle<CUstream_st>,
    /// Whether the stream is destroyed with this value.
    owned: bool,
}

impl Stream {
    pub(super) fn new(device: &Device) -> Result<Stream, HostError> {
        let context = Arc::clone(device.context());
        let mut raw = ptr::null_mut();
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        let current = context.enter()?;
        // SAFETY: `raw` is valid for the result.
        current.check("cuStreamCreate", unsafe { sys::cuStreamCreate(&raw mut raw, flags) })?;
        drop(current);
        Ok(Stream { context, raw: Handle(raw), owned: true })
    }

    pub(super) fn default_of(device: &Device) -> Stream {
        Stream { context: Arc::clone(device.context()), raw: Handle(ptr::null_mut()), owned: false }
    }

    /// The default stream of a context, for tests.
    #[cfg(test)]
    pub(super) fn unowned(context: Arc<Context>) -> Stream {
        Stream { context, raw: Handle(ptr::null_mut()), owned: false }
    }

    /// Takes the caller's stream, as the number that other CUDA libraries give, such as PyTorch's
    /// `torch.cuda.current_stream().cuda_stream`. Dropping this value does not destroy it.
    ///
    /// # Safety
    /// It must be a stream of this device's primary context (0, 1 and 2 are its default streams), and outlive this
    /// value and all work put on it.
    pub unsafe fn from_raw(device: &Device, raw: usize) -> Stream {
        let raw = Handle(ptr::with_exposed_provenance_mut(raw));
        Stream { context: Arc::clone(device.context()), raw, owned: false }
    }

    /// The driver's handle as a number, for other CUDA libraries of the process. It lives as long as this value.
    pub fn as_raw(&self) -> usize {
        self.raw.0.expose_provenance()
    }

    /// Waits for all work put on it so far.
    ///
    /// # Errors
    /// Errors of that work.
    pub fn synchronize(&self) -> Result<(), HostError> {
        let current = self.context.enter()?;
        // SAFETY: the stream is alive.
        current.check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.raw.0) })?;
        self.context.synchronised(|stream| stream.0 == self.raw.0);
        Ok(())
    }

    /// Whether all work put on it so far is done. It does not wait.
    ///
    /// # Errors
    /// Errors of that work.
    pub fn query(&self) -> Result<bool, HostError> {
        let current = self.context.enter()?;
        // SAFETY: the stream is alive.
        let is_done = current.check_ready("cuStreamQuery", unsafe { sys::cuStreamQuery(self.raw.0) })?;
        if is_done {
            self.context.synchronised(|stream| stream.0 == self.raw.0);
        }
        Ok(is_done)
    }

    /// Marks this point of the stream, and records its time.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn record(&self) -> Result<Event, HostError> {
        self.mark(Event::new(&self.context, CUevent_flags::CU_EVENT_DEFAULT)?)
    }

    /// Marks this point of the stream without its time, which takes less work of the GPU.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn record_untimed(&self) -> Result<Event, HostError> {
        self.mark(Event::new(&self.context, CUevent_flags::CU_EVENT_DISABLE_TIMING)?)
    }

    fn mark(&self, event: Event) -> Result<Event, HostError> {
        self.record_in(&event)?;
        Ok(event)
    }

    /// Moves an event of this device to this point of the stream.
    pub(super) fn record_in(&self, event: &Event) -> Result<(), HostError> {
        let current = self.context.enter()?;
        // SAFETY: event and stream are alive.
        current.check("cuEventRecord", unsafe { sys::cuEventRecord(event.raw().0, self.raw.0) })
    }

    /// Makes later work on this stream wait for an event of any stream and device. Returns at once. If the stream of
    /// the event is captured, this stream is captured with it.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn wait(&self, event: &Event) -> Result<(), HostError> {
        let current = self.context.enter()?;
        // SAFETY: event and stream are alive. The driver keeps its part of a destroyed event.
        current.check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(self.raw.0, event.raw().0, 0) })
    }

    /// The stream's number. No other stream of the process ever gets it, not even one that reuses the handle of a
    /// destroyed stream. `None` while the stream is captured into a graph.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn id(&self) -> Result<Option<u64>, HostError> {
        if self.is_captured()? {
            return Ok(None);
        }
        let (current, mut id) = (self.context.enter()?, 0);
        // SAFETY: the stream is alive, and `id` is valid for the result.
        current.check("cuStreamGetId", unsafe { sys::cuStreamGetId(self.raw.0, &raw mut id) })?;
        Ok(Some(id))
    }

    /// Whether the stream is captured: work on it is recorded and not executed.
    pub(super) fn is_captured(&self) -> Result<bool, HostError> {
        let current = self.context.enter()?;
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream is alive, and `status` is valid for the result.
        let result = unsafe { sys::cuStreamIsCapturing(self.raw.0, &raw mut status) };
        current.check("cuStreamIsCapturing", result)?;
        Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Checks that the stream belongs to the device with this context.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Needs a machine with a Hopper GPU. Work on a borrowed stream is work on the stream itself.
    #[test]
    fn a_stream_of_the_caller_is_used_and_not_destroyed() {
        let Ok(device) = Device::open(0) else {
            println!("skipped: no gpu");
            return;
        };
        let own = device.stream().unwrap();
        // SAFETY: `own` is a stream of the device and outlives `borrowed`.
        let borrowed = unsafe { Stream::from_raw(&device, own.as_raw()) };
        let mut buffer = device.alloc(64).unwrap();
        buffer.fill(&borrowed, 7).unwrap();
        drop(borrowed);
        assert_eq!(buffer.download::<u8>(&own).unwrap(), [7; 64]);
    }

    /// Needs a machine with a Hopper GPU.
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

    /// Needs a machine with a Hopper GPU, and a copy that takes a while.
    #[test]
    fn streams_wait_for_events_of_others() {
        let Ok(device) = Device::open(0) else {
            println!("skipped: no gpu");
            return;
        };
        let (one, other) = (device.stream().unwrap(), device.stream().unwrap());
        let mut buffer = device.alloc(1 << 30).unwrap();
        for byte in 0..50 {
            buffer.fill(&one, byte).unwrap();
        }
        assert!(!one.query().unwrap());
        let event = one.record_untimed().unwrap();
        other.wait(&event).unwrap();
        let behind = other.record().unwrap();
        assert!(!behind.query().unwrap(), "it waits for a stream that has work");
        behind.synchronize().unwrap();
        assert!(event.query().unwrap() && one.query().unwrap());
        assert!(behind.millis_since(&event).is_err(), "one of them has no time");
        // SAFETY: `event` lives longer than `borrowed`.
        let borrowed = unsafe { Event::from_raw(&device, event.as_raw()) };
        drop(borrowed);
        event.synchronize().unwrap();
    }
}
