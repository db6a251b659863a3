//! Asynchronous copies under way: bulk copies to global memory of one thread, and cp.async of a warp.

use std::collections::VecDeque;

use crate::clock::Bundle;

/// The bulk groups of one thread. Groups count from 1.
#[derive(Default)]
pub(crate) struct BulkThread {
    pub(crate) lane: usize,
    /// The component of the cluster that counts groups that have read their sources.
    pub(crate) read: u16,
    /// The component of the cluster that counts groups that have written.
    pub(crate) write: u16,
    pub(crate) committed: u32,
    /// Number of copies in the open group.
    pub(crate) open: u32,
    /// Number of groups whose reads of their sources the thread has waited for.
    pub(crate) waited_read: u32,
    /// Number of groups whose writes the thread has waited for.
    pub(crate) waited_write: u32,
    /// Copies that are not performed yet, in order.
    pub(crate) copies: VecDeque<BulkCopy>,
}

/// A copy from shared to global memory.
pub(crate) struct BulkCopy {
    pub(crate) group: u32,
    /// The offset of its source in shared memory.
    pub(crate) source: u32,
    /// The permutation of its source's 16-byte chunks.
    pub(crate) swizzle: fa3_ir::Swizzle,
    pub(crate) pieces: Vec<Piece>,
    /// The element type, if the copy adds.
    pub(crate) add: Option<fa3_ir::Elem>,
    /// The data, once they have been read.
    pub(crate) data: Option<Vec<u8>>,
}

/// A contiguous part of a copy: `bytes` bytes at offset `shared` of the box, and their global address; `None` if they
/// are outside of the tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) shared: u32,
    pub(crate) global: Option<u64>,
    pub(crate) bytes: u32,
}

/// The cp.async of a warp. Each lane has its own groups.
#[derive(Default)]
pub(crate) struct CopyAsync {
    /// Number of instructions so far.
    pub(crate) issued: u32,
    pub(crate) lanes: [LaneCopies; 32],
}

/// The cp.async of a lane.
#[derive(Default)]
pub(crate) struct LaneCopies {
    /// The component of the cluster that counts the lane's copies.
    pub(crate) component: Option<u16>,
    /// The value of `issued` at each commit that no wait has retired.
    pub(crate) groups: VecDeque<u32>,
    /// Copies that are not performed yet, in order.
    pub(crate) pending: VecDeque<Copy16>,
}

/// A copy of 16 bytes. The first `valid` bytes are read, and the other bytes are zero.
#[derive(Clone, Copy)]
pub(crate) struct Copy16 {
    pub(crate) number: u32,
    pub(crate) target: u32,
    pub(crate) source: u64,
    pub(crate) valid: u32,
}

/// An event that no warp executes. The schedule chooses its time.
pub(crate) enum AsyncEvent {
    /// A load brings its data, then signals its mbarriers.
    Load(LoadCopy),
    /// A `st.async` stores its number, then signals its mbarrier.
    Store(RemoteStore),
    /// All cp.async of a lane up to number `upto` are complete, and arrive at an mbarrier.
    Arrive { cta: usize, warp: usize, lane: usize, upto: u32, offset: u32, event: u32 },
}

/// A copy from global to shared memory.
pub(crate) struct LoadCopy {
    pub(crate) pieces: Vec<Piece>,
    pub(crate) bytes: u32,
    /// The permutation of its 16-byte chunks.
    pub(crate) swizzle: fa3_ir::Swizzle,
    /// The CTAs that receive the copy, each with the offset, the mbarrier, and the mbarrier's phase when the copy was
    /// issued.
    pub(crate) targets: Vec<Target>,
    pub(crate) landed: bool,
    pub(crate) event: u32,
}

/// A number on its way to shared memory of the cluster.
pub(crate) struct RemoteStore {
    pub(crate) bits: u32,
    pub(crate) target: Target,
    /// The clocks that the store releases: the thread's clocks when the store began.
    pub(crate) released: Bundle,
    pub(crate) event: u32,
}

#[derive(Clone, Copy)]
pub(crate) struct Target {
    pub(crate) cta: usize,
    pub(crate) offset: u32,
    pub(crate) mbarrier: u32,
    pub(crate) phase: u32,
}
