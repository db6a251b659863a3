//! Events, which mark points of streams.

use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUevent_flags, CUevent_st};

use super::context::Context;
use super::driver::Handle;
use super::{Device, HostError};

/// A point of a stream. [`Stream::record`](super::Stream::record) also records the time at which the preceding work
/// ended.
#[derive(Debug)]
pub struct Event {
    context: Arc<Context>,
    raw: Handle<CUevent_st>,
    /// Whether the event is destroyed with this value.
    owned: bool,
}

impl Event {
    pub(super) fn new(context: &Arc<Context>, flags: CUevent_flags) -> Result<Event, HostError> {
        let (current, mut raw) = (context.enter()?, ptr::null_mut());
        // SAFETY: `raw` is valid for the result.
        current.check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut raw, flags as u32) })?;
        Ok(Event { context: Arc::clone(context), raw: Handle(raw), owned: true })
    }

    /// Takes the caller's event, as the number that other CUDA libraries give. Dropping this value does not destroy it.
    ///
    /// # Safety
    /// It must be an event of this device's primary context, and outlive this value.
    pub unsafe fn from_raw(device: &Device, raw: usize) -> Event {
        let raw = Handle(ptr::with_exposed_provenance_mut(raw));
        Event { context: Arc::clone(device.context()), raw, owned: false }
    }

    /// The driver's handle as a number, for other CUDA libraries of the process. It lives as long as this value.
    pub fn as_raw(&self) -> usize {
        self.raw.0.expose_provenance()
    }

    pub(super) fn raw(&self) -> Handle<CUevent_st> {
        self.raw
    }

    /// Waits for the preceding work.
    ///
    /// # Errors
    /// Errors of that work.
    pub fn synchronize(&self) -> Result<(), HostError> {
        let current = self.context.enter()?;
        // SAFETY: the event is alive.
        current.check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.raw.0) })
    }

    /// Whether the preceding work is done. It does not wait.
    ///
    /// # Errors
    /// Errors of that work.
    pub fn query(&self) -> Result<bool, HostError> {
        let current = self.context.enter()?;
        // SAFETY: the event is alive.
        current.check_ready("cuEventQuery", unsafe { sys::cuEventQuery(self.raw.0) })
    }

    /// Milliseconds from `start` to this event, to about half a microsecond. It waits for both events.
    ///
    /// # Errors
    /// Errors of the preceding work; an error of the driver if one of the events has no time.
    pub fn millis_since(&self, start: &Event) -> Result<f32, HostError> {
        start.synchronize()?;
        self.synchronize()?;
        let current = self.context.enter()?;
        let mut millis = 0.0;
        // SAFETY: both events are alive, and `millis` is valid for the result.
        let result = unsafe { sys::cuEventElapsedTime(&raw mut millis, start.raw.0, self.raw.0) };
        current.check("cuEventElapsedTime", result)?;
        Ok(millis)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.owned
            && let Ok(_current) = self.context.enter()
        {
            // SAFETY: it was created in this context and is destroyed once.
            let _ = unsafe { sys::cuEventDestroy_v2(self.raw.0) };
        }
    }
}
