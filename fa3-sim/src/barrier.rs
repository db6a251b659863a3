//! Named barriers of a CTA, and the barrier of a cluster.

use crate::clock::Bundle;

#[derive(Debug, Default)]
pub(crate) struct NamedBarrier {
    /// Number of threads that the current generation expects; 0 before the first arrival.
    pub(crate) threads: u32,
    /// The warps that have arrived in the current generation.
    pub(crate) arrived: Vec<usize>,
    /// The arrived warps that wait.
    pub(crate) waiting: Vec<usize>,
    /// The clocks that the arrived warps have released.
    pub(crate) bundle: Bundle,
    /// Generations completed so far.
    pub(crate) generation: u32,
}

/// A violation by an arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Misuse {
    /// Rule B1.
    Threads { given: u32, open: u32 },
    /// Rule B2.
    Again,
}

impl NamedBarrier {
    /// Records the arrival of warp `warp` at a generation of `threads` threads. Returns a violation, if any. Then a
    /// second arrival of a warp does not count, and of two numbers of threads the smaller applies.
    pub(crate) fn arrive(
        &mut self,
        warp: usize,
        threads: u32,
        waits: bool,
        bundle: &Bundle,
    ) -> Result<(), Misuse> {
        let misuse = if self.arrived.contains(&warp) {
            Some(Misuse::Again)
        } else if !self.arrived.is_empty() && self.threads != threads {
            Some(Misuse::Threads { given: threads, open: self.threads })
        } else {
            None
        };
        self.threads = if self.arrived.is_empty() { threads } else { self.threads.min(threads) };
        if misuse != Some(Misuse::Again) {
            self.arrived.push(warp);
        }
        self.bundle.join(bundle);
        if waits {
            self.waiting.push(warp);
        }
        misuse.map_or(Ok(()), Err)
    }

    /// Whether all warps have arrived.
    pub(crate) fn is_complete(&self) -> bool {
        32 * self.arrived.len() as u32 >= self.threads && !self.arrived.is_empty()
    }

    /// Completes the generation. Returns the waiting warps, and the clocks that they acquire.
    pub(crate) fn complete(&mut self) -> (Vec<usize>, Bundle) {
        let next = NamedBarrier { generation: self.generation + 1, ..NamedBarrier::default() };
        let done = std::mem::replace(self, next);
        (done.waiting, done.bundle)
    }
}

#[derive(Debug, Default)]
pub(crate) struct ClusterBarrier {
    /// Generations completed so far.
    pub(crate) generation: u32,
    /// Number of warps that have arrived in the current generation.
    pub(crate) arrived: u32,
    /// The clocks that the arrived warps have released.
    pub(crate) collected: Bundle,
    /// The clocks that warps released in the previous generation.
    pub(crate) complete: Bundle,
}
