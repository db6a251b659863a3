//! Graphs: work that is captured from a stream once and launched as a whole many times.

use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUgraph_st, CUgraphExec_st, CUstreamCaptureMode};

use super::context::Context;
use super::driver::Handle;
use super::{HostError, LaunchInfo, Stream};

impl Stream {
    /// Begins a capture: until [`Stream::end_capture`], work that is put on this stream is recorded and not executed.
    /// Meanwhile this thread can neither wait for the stream nor allocate or free device memory.
    ///
    /// # Errors
    /// Errors of the driver: for example, the default stream cannot be captured.
    pub fn begin_capture(&self) -> Result<(), HostError> {
        let current = self.context().enter()?;
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive.
        current.check("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(self.raw().0, mode) })
    }

    /// Ends the capture and makes a graph of the recorded work.
    ///
    /// # Errors
    /// Errors of the driver: there is no capture, or work that cannot be captured has ended it.
    pub fn end_capture(&self) -> Result<Graph, HostError> {
        let current = self.context().enter()?;
        let mut captured: *mut CUgraph_st = ptr::null_mut();
        // SAFETY: the stream is alive, and `captured` is valid for the result.
        let result = unsafe { sys::cuStreamEndCapture(self.raw().0, &raw mut captured) };
        current.check("cuStreamEndCapture", result)?;
        let mut raw = ptr::null_mut();
        // SAFETY: the call above made the graph, and `raw` is valid for the result.
        let result = unsafe { sys::cuGraphInstantiateWithFlags(&raw mut raw, captured, 0) };
        // SAFETY: the graph is destroyed once; the instance does not need it.
        let _ = unsafe { sys::cuGraphDestroy(captured) };
        current.check("cuGraphInstantiate", result)?;
        let launches = self.context().launches_on(self.raw());
        Ok(Graph { context: Arc::clone(self.context()), raw: Handle(raw), launches })
    }
}

/// Work that was captured from a stream, ready to be launched. Launches of one graph run one after the other, even on
/// different streams.
#[derive(Debug)]
pub struct Graph {
    context: Arc<Context>,
    raw: Handle<CUgraphExec_st>,
    /// Suspects of a later error: the last launches on the captured stream.
    launches: Vec<LaunchInfo>,
}

impl Graph {
    /// Launches all of the work on `stream`. Returns at once.
    ///
    /// # Safety
    /// The memory that the work uses must live until the work is done, and so must the [`super::Device`] that keeps the
    /// kernels. Nothing else may use the memory meanwhile.
    ///
    /// # Errors
    /// An error if the stream belongs to another device, or an error of the driver.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<(), HostError> {
        stream.check_context(&self.context)?;
        let current = self.context.enter()?;
        // SAFETY: graph and stream are alive.
        let result = unsafe { sys::cuGraphLaunch(self.raw.0, stream.raw().0) };
        let (call, launches) = ("cuGraphLaunch", self.launches.iter().cloned());
        current.check_launch(call, result, stream.raw(), launches, |error| HostError::Driver { call, error })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter() {
            // SAFETY: it was instantiated in this context and is destroyed once. Launches under way end first.
            let _ = unsafe { sys::cuGraphExecDestroy(self.raw.0) };
        }
    }
}
