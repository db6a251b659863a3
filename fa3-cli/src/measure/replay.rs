//! Launches that are captured once and replayed as a whole: a call of some microseconds takes the CPU longer.

use fa3::cuda::{Graph, HostError, Stream};

use crate::launches;

/// A graph of launches, and the memory that they use, which nobody else uses or frees for as long.
pub(super) struct Replay<'a, M> {
    graph: Graph,
    stream: &'a Stream,
    _memory: &'a mut M,
}

impl<'a, M> Replay<'a, M> {
    /// Captures what `launch` puts on the stream, all of which uses `memory` alone. Kernels were loaded before.
    ///
    /// # Errors
    /// The errors of `launch`, and the driver's.
    pub(super) fn capture<E: From<HostError>>(
        stream: &'a Stream,
        memory: &'a mut M,
        launch: impl FnOnce(&Stream, &mut M) -> Result<(), E>,
    ) -> Result<Replay<'a, M>, E> {
        stream.begin_capture()?;
        let launched = launch(stream, memory);
        // The capture ends whatever happened in it.
        let graph = stream.end_capture();
        launched?;
        Ok(Replay { graph: graph?, stream, _memory: memory })
    }

    /// How many replays fill `slice_ms`, at least three. The GPU is warm afterwards.
    ///
    /// # Errors
    /// The driver's.
    pub(super) fn fill(&self, slice_ms: f64) -> Result<u32, HostError> {
        self.ended(launches::fill(self.stream, slice_ms, || self.launch()))
    }

    /// Milliseconds of one of so many replays.
    ///
    /// # Errors
    /// The driver's.
    pub(super) fn time(&self, replays: u32) -> Result<f64, HostError> {
        self.ended(launches::time(self.stream, replays, || self.launch()))
    }

    /// The graph runs in [`Replay::ended`] alone.
    fn launch(&self) -> Result<(), HostError> {
        // SAFETY: the memory, which has the device, is lent to this value, and both methods that launch wait for the
        // end.
        #[allow(unsafe_code, reason = "a graph does not know its memory")]
        unsafe {
            self.graph.launch(self.stream)
        }
    }

    /// The result of launches, when all of them are done.
    fn ended<T>(&self, result: Result<T, HostError>) -> Result<T, HostError> {
        self.stream.synchronize()?;
        result
    }
}
