//! The last accesses to each 16 bytes of memory, and whether the next access is ordered after them.

use smallvec::{SmallVec, smallvec};

use crate::clock::{Clock, Epoch};
use crate::lanes::{Lane, LaneOrder};

/// Bytes of a cell.
pub(crate) const CELL: usize = 16;

/// Kind of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Read,
    Write,
    /// An atomic, or a store with release. Accesses of this kind never race with each other.
    Strong,
    /// A load with acquire. It does not race with [`Kind::Strong`], either.
    StrongRead,
    /// An addition by a bulk copy. It commutes with other additions and with atomics.
    Reduction,
}

impl Kind {
    fn conflicts(self, other: Kind) -> bool {
        let reads = |kind| matches!(kind, Kind::Read | Kind::StrongRead);
        let commutes = |kind| matches!(kind, Kind::Strong | Kind::StrongRead | Kind::Reduction);
        !((reads(self) && reads(other)) || (commutes(self) && commutes(other)))
    }
}

/// The origin of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// A thread, by an ordinary instruction.
    Thread,
    /// cp.async.
    CopyAsync,
    /// st.async.
    StoreAsync,
    /// A tensor or bulk copy to shared memory.
    Load,
    /// A tensor or bulk copy, or an addition, to global memory.
    Store,
    /// A matrix product.
    Product,
    /// The previous grid.
    Predecessor,
}

impl Origin {
    /// Whether accesses of this origin belong to the async proxy.
    pub(crate) fn asynchronous(self) -> bool {
        matches!(self, Origin::Load | Origin::Store | Origin::Product)
    }

    /// Whether one lane makes each access of this origin. Products belong to the whole warp.
    fn is_of_a_lane(self) -> bool {
        !matches!(self, Origin::Product | Origin::Predecessor)
    }

    /// Whether later accesses must be ordered after the lane that made the access, rather than after a completion.
    pub(crate) fn ends_with_its_lane(self) -> bool {
        matches!(self, Origin::Thread | Origin::CopyAsync)
    }
}

/// One access, as cells remember it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Access {
    pub(crate) epoch: Epoch,
    /// The instruction's execution: an index into the log.
    pub(crate) event: u32,
    pub(crate) kind: Kind,
    pub(crate) origin: Origin,
    /// The component of the warp that makes the access, or that issued its asynchronous operation.
    pub(crate) warp: u16,
    /// The lane that makes the access or issued its operation.
    pub(crate) lane: Lane,
}

impl Access {
    /// This access with `lane` as the lane that made it.
    pub(crate) fn of(self, lane: usize) -> Access {
        Access { lane: Lane::of(lane), ..self }
    }
}

/// The events that come before an access.
pub(crate) struct After<'a> {
    /// The cluster.
    pub(crate) cluster: u32,
    /// The clock over other agents.
    pub(crate) clock: &'a Clock,
    /// The order among the lanes of the same warp.
    pub(crate) lanes: &'a LaneOrder,
}

/// An earlier access that does not happen before the next access.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Conflict {
    pub(crate) old: Access,
    /// Whether the two accesses are unordered only because different lanes of one warp made them.
    pub(crate) of_lanes: bool,
}

#[derive(Clone, Copy, Debug)]
struct CellAccess {
    access: Access,
    /// The bytes of the cell that it accesses, as bits.
    bytes: u16,
    /// The lane that accessed each pair of bytes: no lane accesses less than two bytes.
    lanes: [Lane; CELL / 2],
}

/// The accesses to 16 bytes that the next access must be ordered after. Reads are stored separately: there are many,
/// and the next read need not be compared with them.
#[derive(Debug, Default)]
struct History {
    changes: SmallVec<[CellAccess; 1]>,
    reads: SmallVec<[CellAccess; 1]>,
    /// The number of cells that share it.
    cells: u32,
    /// The number of the batch that made it.
    made: u64,
    /// Its last change.
    change: Change,
}

/// The cells of one memory. Cells that are always accessed together, such as the cells of a tile, share a history.
#[derive(Debug, Default)]
pub(crate) struct Shadow {
    /// For each cell, the index of its history.
    cells: Vec<u32>,
    histories: Vec<History>,
    /// Histories that no cell has.
    free: Vec<u32>,
    /// Number of batches so far.
    batches: u64,
    /// Number of accesses that a history remembers; beyond it, the history forgets the oldest accesses.
    limit: usize,
}

/// The last change of a history by an access, which applies to the next cells that share the history.
#[derive(Clone, Copy, Debug, Default)]
struct Change {
    batch: u64,
    bytes: u16,
    to: u32,
    conflict: Option<Conflict>,
}

/// How an access changed its last cell, and the number of further cells that it changed in the same way.
#[derive(Clone, Copy, Debug, Default)]
struct Moved {
    /// Whether there was such a cell, and its history changed.
    is_known: bool,
    from: u32,
    bytes: u16,
    to: u32,
    conflict: Option<Conflict>,
    cells: u32,
}

/// One access to many cells of a memory.
pub(crate) struct Batch<'a> {
    number: u64,
    access: Access,
    after: &'a After<'a>,
    /// The history of cells that the access has written as a whole.
    written: Option<u32>,
}

impl Shadow {
    pub(crate) fn new(bytes: usize, limit: usize) -> Shadow {
        let cells = vec![0; bytes.div_ceil(CELL)];
        let nothing = History { cells: cells.len() as u32, ..History::default() };
        Shadow { cells, histories: vec![nothing], free: Vec::new(), batches: 0, limit }
    }

    /// Marks everything as accessed.
    pub(crate) fn fill(&mut self, access: Access) {
        let record = CellAccess { access, bytes: u16::MAX, lanes: [access.lane; CELL / 2] };
        let cells = self.cells.len() as u32;
        self.cells.fill(0);
        self.histories = vec![History { changes: smallvec![record], cells, ..History::default() }];
        self.free.clear();
    }

    /// Begins an access to cells that are named later.
    pub(crate) fn batch<'a>(&mut self, access: Access, after: &'a After<'a>) -> Batch<'a> {
        self.batches += 1;
        Batch { number: self.batches, access, after, written: None }
    }

    /// Records an access to `bytes` bytes from `start`. Returns the first earlier access that does not happen before
    /// it: an access by another agent if there is one, otherwise one by another lane.
    pub(crate) fn access(&mut self, start: usize, bytes: usize, batch: &mut Batch<'_>) -> Option<Conflict> {
        let (cell, offset) = (start / CELL, start % CELL);
        let is_in_a_cell = bytes > 0 && offset + bytes <= CELL && cell < self.cells.len();
        if is_in_a_cell {
            return self.change(cell, mask(offset, offset + bytes), batch);
        }
        let mut found = None;
        self.access_each(&[start as u32], bytes, batch, |_, conflict| found = Some(conflict));
        found
    }

    /// Records an access to `bytes` bytes from each of `starts`, and reports each start with a conflict.
    pub(crate) fn access_each(
        &mut self,
        starts: &[u32],
        bytes: usize,
        batch: &mut Batch<'_>,
        mut tell: impl FnMut(u32, Conflict),
    ) {
        let mut moved = Moved::default();
        for &start in starts {
            let mut found = None;
            let end = start as usize + bytes;
            let mut at = start as usize;
            while at < end {
                let cell = at / CELL;
                let upto = end.min((cell + 1) * CELL);
                let bytes = mask(at - cell * CELL, upto - cell * CELL);
                at = upto;
                let Some(history) = self.cells.get_mut(cell) else { continue };
                let goes_along = moved.is_known && (moved.from, moved.bytes) == (*history, bytes);
                if goes_along {
                    *history = moved.to;
                    moved.cells += 1;
                } else {
                    self.go_first(cell, bytes, batch, &mut moved);
                }
                let Some(conflict) = moved.conflict else { continue };
                if found.is_none_or(|found: Conflict| found.of_lanes && !conflict.of_lanes) {
                    found = Some(conflict);
                }
            }
            found.into_iter().for_each(|conflict| tell(start, conflict));
        }
        self.settle(&mut moved);
    }

    /// Records an access to some bytes of a cell, and notes how the cell changed, for the next cells.
    fn go_first(&mut self, cell: usize, bytes: u16, batch: &mut Batch<'_>, moved: &mut Moved) {
        let from = self.cells[cell];
        self.settle(moved);
        let conflict = self.change(cell, bytes, batch);
        let to = self.cells[cell];
        *moved = Moved { is_known: to != from, from, bytes, to, conflict, cells: 0 };
    }

    /// Applies the noted change to the cells that were counted.
    fn settle(&mut self, moved: &mut Moved) {
        if moved.cells > 0 {
            self.recount(moved.from, moved.to, moved.cells);
        }
        *moved = Moved::default();
    }

    /// Records an access to some bytes of a cell.
    fn change(&mut self, cell: usize, bytes: u16, batch: &mut Batch<'_>) -> Option<Conflict> {
        let from = self.cells[cell];
        let history = &self.histories[from as usize];
        let known = history.change;
        if history.made == batch.number {
            // The access has already changed this cell.
            return None;
        }
        if (known.batch, known.bytes) == (batch.number, bytes) {
            self.give(cell, known.to);
            return known.conflict;
        }
        let new = CellAccess { access: batch.access, bytes, lanes: batch.access.lane.by_pairs() };
        let conflict = history.conflict(&new, batch.after);
        // A write of the whole cell leaves nothing of its history.
        let whole = new.access.kind == Kind::Write && bytes == u16::MAX;
        let to = match batch.written.filter(|_| whole) {
            Some(to) => to,
            None => self.copy(from),
        };
        if to != from {
            self.give(cell, to);
            self.histories[from as usize].change = Change { batch: batch.number, bytes, to, conflict };
        }
        if self.histories[to as usize].made != batch.number {
            let history = &mut self.histories[to as usize];
            history.made = batch.number;
            history.add(new, batch.after.lanes, self.limit);
            batch.written = whole.then_some(to);
        }
        conflict
    }

    /// Gives a cell the history `to`.
    fn give(&mut self, cell: usize, to: u32) {
        let from = std::mem::replace(&mut self.cells[cell], to);
        self.recount(from, to, 1);
    }

    /// Moves the count of cells from one history to another.
    fn recount(&mut self, from: u32, to: u32, cells: u32) {
        self.histories[to as usize].cells += cells;
        self.histories[from as usize].cells -= cells;
        if self.histories[from as usize].cells == 0 {
            self.free.push(from);
        }
    }

    /// A history for one more cell: a copy if several cells share this history, otherwise this history itself.
    fn copy(&mut self, from: u32) -> u32 {
        if self.histories[from as usize].cells == 1 {
            return from;
        }
        let History { changes, reads, made, change, .. } = &self.histories[from as usize];
        let (changes, reads) = (SmallVec::from_slice(changes), SmallVec::from_slice(reads));
        let copy = History { changes, reads, cells: 0, made: *made, change: *change };
        let to = self.free.pop().unwrap_or(self.histories.len() as u32);
        match self.histories.get_mut(to as usize) {
            Some(free) => *free = copy,
            None => self.histories.push(copy),
        }
        to
    }
}

/// Bytes `first` to `end` of a cell, as bits.
fn mask(first: usize, end: usize) -> u16 {
    (((1u32 << (end - first)) - 1) << first) as u16
}

impl History {
    fn add(&mut self, new: CellAccess, order: &LaneOrder, limit: usize) {
        if new.access.kind == Kind::Read {
            return remember(&mut self.reads, new, order, limit);
        }
        if new.access.kind == Kind::Write {
            // An access that is ordered after the write is ordered after everything that comes before the write.
            for records in [&mut self.changes, &mut self.reads] {
                records.iter_mut().for_each(|old| old.bytes &= !new.bytes);
                records.retain(|old| old.bytes != 0);
            }
        }
        remember(&mut self.changes, new, order, limit);
    }

    /// The first access that does not happen before the new access: an access by another agent, or else by another
    /// lane.
    fn conflict(&self, new: &CellAccess, after: &After<'_>) -> Option<Conflict> {
        let reads: &[CellAccess] = if new.access.kind == Kind::Read { &[] } else { &self.reads };
        let mut of_lanes = None;
        for old in self.changes.iter().chain(reads) {
            let apart = old.bytes & new.bytes == 0 || old.access.event == new.access.event;
            if apart || !old.access.kind.conflicts(new.access.kind) {
                continue;
            }
            if !after.clock.knows(after.cluster, old.access.epoch) {
                return Some(Conflict { old: old.access, of_lanes: false });
            }
            of_lanes = of_lanes.or_else(|| unordered_lane(old, new, after));
        }
        of_lanes.map(|old| Conflict { old, of_lanes: true })
    }
}

/// The part of an access that another lane of the same warp made, if nothing orders it before the new access.
fn unordered_lane(old: &CellAccess, new: &CellAccess, after: &After<'_>) -> Option<Access> {
    let (made, now) = (old.access, new.access);
    let same_warp = (made.epoch.cluster, made.warp) == (after.cluster, now.warp);
    if !same_warp
        || !made.origin.ends_with_its_lane()
        || !now.origin.is_of_a_lane()
        || after.lanes.is_past(made.event)
    {
        return None;
    }
    let both = old.bytes & new.bytes;
    let mut bytes = (0..CELL).filter(|byte| both >> byte & 1 == 1);
    let unordered =
        bytes.find(|byte| !after.lanes.orders(old.lanes[byte / 2], made.event, new.lanes[byte / 2]));
    unordered.map(|byte| Access { lane: old.lanes[byte / 2], ..made })
}

/// Adds an access to the records of its kind: to its instruction's record, in place of a record that it supersedes, or
/// at the end.
fn remember(records: &mut SmallVec<[CellAccess; 1]>, new: CellAccess, order: &LaneOrder, limit: usize) {
    for old in records.iter_mut() {
        if old.access.event == new.access.event && old.access.kind == new.access.kind {
            old.add_lanes(&new);
            old.bytes |= new.bytes;
            return;
        }
        if supersedes(new, *old) {
            let CellAccess { access, bytes, .. } = new;
            if order.is_past(old.access.event) {
                *old = new;
            } else {
                old.add_lanes(&new);
                (old.access, old.bytes) = (access, bytes);
            }
            return;
        }
    }
    if records.len() == limit {
        records.remove(0);
    }
    records.push(new);
}

impl CellAccess {
    /// Notes the lanes of another access to the record's bytes, where lanes matter.
    fn add_lanes(&mut self, new: &CellAccess) {
        if !self.access.origin.ends_with_its_lane() || self.lanes == new.lanes {
            return;
        }
        for (pair, (lane, &new_lane)) in self.lanes.iter_mut().zip(&new.lanes).enumerate() {
            let of_pair = |bytes: u16| bytes >> (2 * pair) & 0b11 != 0;
            if of_pair(new.bytes) {
                let had = of_pair(self.bytes & new.bytes);
                *lane = if had && *lane != new_lane { Lane::SEVERAL } else { new_lane };
            }
        }
    }
}

/// Whether everything that is ordered after `new` is ordered after `old`, on the same bytes.
fn supersedes(new: CellAccess, old: CellAccess) -> bool {
    let (of_new, of_old) = (new.access.epoch, old.access.epoch);
    (of_new.cluster, of_new.component) == (of_old.cluster, of_old.component)
        && new.access.kind == old.access.kind
        && new.access.origin == old.access.origin
        && old.bytes & !new.bytes == 0
}

#[cfg(test)]
mod tests;
