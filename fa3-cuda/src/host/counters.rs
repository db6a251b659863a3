//! Counters from which persistent kernels draw their tiles.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::context::RelaxedCapture;
use super::{Device, DeviceBuffer, HostError, Stream};

/// Counters of a chunk.
const CHUNK: usize = 4096;
/// Bytes from one counter to the next: a sector of the L2 cache, so that atomics of different launches do not meet.
const SPACING: usize = 32;

/// A counter for each queue of launches, in device memory. It is 0 before and after each launch.
///
/// Launches of one stream share one: they draw from it one after the other, because each waits for the one before
/// (`griddepcontrol.wait`). Those of different streams may run at the same time, and
/// so may a graph and the stream on which it was captured: each of them has its own, for as long as the device is open.
#[derive(Debug, Default)]
pub(super) struct Counters(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    book: Book,
    chunks: Vec<DeviceBuffer>,
}

/// Launches that run one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Queue {
    /// On a stream, by its number, which no other stream of the process ever has.
    Stream(u64),
    /// In a capture, by its number, on one of the streams that take part in it, by its handle: the driver does not tell such
    /// a stream's number.
    Capture { capture: u64, stream: usize },
}

/// Which queue has which counter.
#[derive(Debug, Default)]
struct Book {
    known: HashMap<Queue, u64>,
    /// Addresses that no queue has yet.
    free: Range<u64>,
}

impl Counters {
    /// Makes sure that a launch finds a counter.
    ///
    /// # Errors
    /// The driver's.
    pub(super) fn reserve(&self, device: &Device) -> Result<(), HostError> {
        let mut state = self.state();
        if state.book.is_used_up() { state.extend(device) } else { Ok(()) }
    }

    /// The address of the counter for launches on `stream` as it is now.
    ///
    /// # Errors
    /// [`HostError::Counters`] if there is none left and the stream is being captured, or the driver's.
    pub(super) fn of(&self, device: &Device, stream: &Stream) -> Result<u64, HostError> {
        let queue = stream.queue()?;
        let mut state = self.state();
        if state.book.is_used_up() && matches!(queue, Queue::Stream(_)) {
            // Also for captures to come, which must not allocate.
            state.extend(device)?;
        }
        let used = state.book.known.len();
        state.book.counter(queue).ok_or(HostError::Counters { used })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Another chunk, zeroed.
    fn extend(&mut self, device: &Device) -> Result<(), HostError> {
        // Other threads may be capturing: this is none of their business.
        let _relaxed = RelaxedCapture::begin()?;
        let (stream, mut chunk) = (device.stream()?, device.alloc(CHUNK * SPACING)?);
        chunk.fill(&stream, 0)?;
        stream.synchronize()?;
        self.book.extend(chunk.address());
        self.chunks.push(chunk);
        Ok(())
    }
}

impl Book {
    fn is_used_up(&self) -> bool {
        self.free.is_empty()
    }

    /// Replaces the free addresses by those of a chunk.
    fn extend(&mut self, chunk: u64) {
        self.free = chunk..chunk + (CHUNK * SPACING) as u64;
    }

    /// The queue's counter: the one that it had, or the next free one.
    fn counter(&mut self, queue: Queue) -> Option<u64> {
        if let Some(address) = self.known.get(&queue) {
            return Some(*address);
        }
        let address = self.free.clone().next()?;
        self.free.start += SPACING as u64;
        self.known.insert(queue, address);
        Some(address)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn queue(stream: u64, capture: Option<u64>) -> Queue {
        match capture {
            None => Queue::Stream(stream),
            Some(capture) => Queue::Capture { capture, stream: stream as usize },
        }
    }

    #[test]
    fn a_queue_keeps_its_counter_and_shares_it_with_no_other() {
        let mut book = Book::default();
        assert_eq!(book.counter(queue(1, None)), None, "no chunk yet");
        book.extend(0x1000);
        let queues =
            [queue(1, None), queue(2, None), queue(1, Some(1)), queue(1, Some(2)), queue(2, Some(1))];
        let first = queues.map(|queue| book.counter(queue).unwrap());
        assert_eq!(first, [0x1000, 0x1020, 0x1040, 0x1060, 0x1080]);
        assert_eq!(queues.map(|queue| book.counter(queue).unwrap()), first);
    }

    #[test]
    fn a_chunk_ends_and_the_next_one_goes_on() {
        let mut book = Book::default();
        let mut given = HashSet::new();
        for chunk in [0x10_0000, 0x80_0000] {
            assert!(book.is_used_up());
            book.extend(chunk);
            for _ in 0..CHUNK {
                let address = book.counter(queue(given.len() as u64, None)).unwrap();
                assert!((chunk..chunk + (CHUNK * SPACING) as u64 - 3).contains(&address), "{address:#x}");
                assert!(given.insert(address), "{address:#x} is given twice");
            }
            assert_eq!(book.counter(queue(u64::MAX, None)), None);
        }
        assert_eq!(book.counter(queue(0, None)), Some(0x10_0000), "the old ones stay");
    }
}
