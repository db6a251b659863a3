//! Asynchronous copies under way: bulk copies to global memory of one thread, and cp.async of a warp.

use std::collections::VecDeque;

use crate::clock::Bundle;

/// The bulk groups of one thread. Groups count from 1.
#[derive(Default)]
pub(crate) struct BulkThread {
    pub(crate) lane: usize,
    /// The cluster's components that count groups read, and groups written.
    pub(crate) read: u16,
    pub(crate) write: u16,
    pub(crate) committed: u32,
    /// Copies in the open group.
    pub(crate) open: u32,
    /// Groups that the thread has waited for, in each way.
    pub(crate) waited_read: u32,
    pub(crate) waited_write: u32,
    /// Copies not yet performed, in order.
    pub(crate) copies: VecDeque<BulkCopy>,
}

/// A copy from shared to global memory.
pub(crate) struct BulkCopy {
    pub(crate) group: u32,
    /// Where it reads.
    pub(crate) source: u32,
    /// The permutation of its source's 16-byte chunks.
    pub(crate) swizzle: fa3_ir::Swizzle,
    pub(crate) pieces: Vec<Piece>,
    /// How it adds, if it does.
    pub(crate) add: Option<fa3_ir::Elem>,
    /// The data that it has read, once it has.
    pub(crate) data: Option<Vec<u8>>,
}

/// A contiguous part of a copy: `bytes` at offset `shared` of the box, and their global address; none if they are
/// outside of the tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) shared: u32,
    pub(crate) global: Option<u64>,
    pub(crate) bytes: u32,
}

/// The cp.async of a warp, whose groups are each lane's own.
#[derive(Default)]
pub(crate) struct CopyAsync {
    /// Instructions so far.
    pub(crate) issued: u32,
    pub(crate) lanes: [LaneCopies; 32],
}

/// The cp.async of a lane.
#[derive(Default)]
pub(crate) struct LaneCopies {
    /// The cluster's component that counts them.
    pub(crate) component: Option<u16>,
    /// `issued` at each commit that no wait has retired.
    pub(crate) groups: VecDeque<u32>,
    /// Copies not yet performed, in order.
    pub(crate) pending: VecDeque<Copy16>,
}

/// 16 bytes, of which the first `valid` are read and the others zero.
#[derive(Clone, Copy)]
pub(crate) struct Copy16 {
    pub(crate) number: u32,
    pub(crate) target: u32,
    pub(crate) source: u64,
    pub(crate) valid: u32,
}

/// An event that no warp executes: it happens at a time that the schedule chooses.
pub(crate) enum AsyncEvent {
    /// A load brings its data, then signals its mbarriers.
    Load(LoadCopy),
    /// A `st.async` brings its number, then signals its mbarrier.
    Store(RemoteStore),
    /// The cp.async of a lane up to number `upto` arrive at an mbarrier.
    Arrive { cta: usize, warp: usize, lane: usize, upto: u32, offset: u32, event: u32 },
}

/// A copy from global to shared memory.
pub(crate) struct LoadCopy {
    pub(crate) pieces: Vec<Piece>,
    pub(crate) bytes: u32,
    /// The permutation of its 16-byte chunks.
    pub(crate) swizzle: fa3_ir::Swizzle,
    /// The CTAs that get it: rank, where it goes, its mbarrier, and that one's phase when it was issued.
    pub(crate) targets: Vec<Target>,
    pub(crate) landed: bool,
    pub(crate) event: u32,
}

/// A number on its way to shared memory of the cluster.
pub(crate) struct RemoteStore {
    pub(crate) bits: u32,
    pub(crate) target: Target,
    /// The thread's knowledge when the store began.
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
