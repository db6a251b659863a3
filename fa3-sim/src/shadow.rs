//! Who touched each 16 bytes of memory last, and whether the next access is ordered after it.

use crate::clock::{Clock, Epoch};

/// Bytes of a cell.
pub(crate) const CELL: usize = 16;

/// What an access does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Read,
    Write,
    /// An atomic or a store with release: they never race with each other.
    Strong,
    /// A load with acquire: it does not race with those either.
    StrongRead,
    /// An addition by a bulk copy: commutes with its like and with atomics.
    Reduction,
}

impl Kind {
    fn conflicts(self, other: Kind) -> bool {
        let reads = |kind| matches!(kind, Kind::Read | Kind::StrongRead);
        let commutes = |kind| matches!(kind, Kind::Strong | Kind::StrongRead | Kind::Reduction);
        !((reads(self) && reads(other)) || (commutes(self) && commutes(other)))
    }
}

/// Who makes an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum By {
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
    /// The grid before this one.
    Predecessor,
}

impl By {
    /// Whether it is an access of the async proxy.
    pub(crate) fn asynchronous(self) -> bool {
        matches!(self, By::Load | By::Store | By::Product)
    }
}

/// One access, as cells remember it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Access {
    pub(crate) epoch: Epoch,
    /// The instruction's execution: an index into the log.
    pub(crate) event: u32,
    pub(crate) kind: Kind,
    pub(crate) by: By,
}

#[derive(Clone, Copy, Debug)]
struct Record {
    access: Access,
    /// Which of the 16 bytes, as bits.
    bytes: u16,
}

/// The accesses that the next one to the same 16 bytes must be ordered after. Reads are apart: they are many, and the
/// next read need not look at them.
#[derive(Clone, Debug, Default)]
struct Cell {
    changes: Vec<Record>,
    reads: Vec<Record>,
}

/// The cells of one memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shadow {
    cells: Vec<Cell>,
    /// Accesses that a cell remembers; beyond that it forgets the oldest.
    limit: usize,
}

impl Shadow {
    pub(crate) fn new(bytes: usize, limit: usize) -> Shadow {
        Shadow { cells: vec![Cell::default(); bytes.div_ceil(CELL)], limit }
    }

    /// Marks everything as accessed.
    pub(crate) fn fill(&mut self, access: Access) {
        for cell in &mut self.cells {
            cell.changes = vec![Record { access, bytes: u16::MAX }];
        }
    }

    /// Records an access to `bytes` bytes from `start`, by an agent of `cluster` whose `clock` says what it happens
    /// after. Gives the first earlier access that it is not ordered after, and forgets that, so that it is found once.
    pub(crate) fn access(
        &mut self,
        start: usize,
        bytes: usize,
        access: Access,
        clock: &Clock,
        cluster: u32,
    ) -> Option<Access> {
        let mut found = None;
        let end = start + bytes;
        let mut at = start;
        while at < end {
            let cell = at / CELL;
            let upto = end.min((cell + 1) * CELL);
            let mask = ((1u32 << (upto - at)) - 1) << (at % CELL);
            if let Some(cell) = self.cells.get_mut(cell) {
                let conflict = cell.access(Record { access, bytes: mask as u16 }, clock, cluster, self.limit);
                found = found.or(conflict);
            }
            at = upto;
        }
        found
    }
}

impl Cell {
    fn access(&mut self, new: Record, clock: &Clock, cluster: u32, limit: usize) -> Option<Access> {
        let conflicts = |old: &&Record| {
            old.bytes & new.bytes != 0
                && old.access.kind.conflicts(new.access.kind)
                && old.access.event != new.access.event
                && !clock.knows(cluster, old.access.epoch)
        };
        let mut found = self.changes.iter().find(conflicts).map(|old| old.access);
        if new.access.kind == Kind::Read {
            remember(&mut self.reads, new, limit);
            return found;
        }
        found = found.or(self.reads.iter().find(conflicts).map(|old| old.access));
        if new.access.kind == Kind::Write {
            // Who is ordered after the write is ordered after what the write was.
            for records in [&mut self.changes, &mut self.reads] {
                records.iter_mut().for_each(|old| old.bytes &= !new.bytes);
                records.retain(|old| old.bytes != 0);
            }
        }
        remember(&mut self.changes, new, limit);
        found
    }
}

/// Adds an access to those of its kind: to its own instruction's, in place of what it supersedes, or behind the others.
fn remember(records: &mut Vec<Record>, new: Record, limit: usize) {
    for old in records.iter_mut() {
        if old.access.event == new.access.event && old.access.kind == new.access.kind {
            old.bytes |= new.bytes;
            return;
        }
        if supersedes(new, *old) {
            *old = new;
            return;
        }
    }
    if records.len() == limit {
        records.remove(0);
    }
    records.push(new);
}

/// Whether who is ordered after `new` is ordered after `old`, of the same bytes.
fn supersedes(new: Record, old: Record) -> bool {
    let (of_new, of_old) = (new.access.epoch, old.access.epoch);
    (of_new.cluster, of_new.component) == (of_old.cluster, of_old.component)
        && new.access.kind == old.access.kind
        && new.access.by == old.access.by
        && old.bytes & !new.bytes == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(component: u16, event: u32, kind: Kind) -> Access {
        let epoch = Epoch { cluster: 0, component, value: 1 };
        Access { epoch, event, kind, by: By::Thread }
    }

    #[test]
    fn only_overlapping_unordered_conflicts_are_found() {
        let mut shadow = Shadow::new(64, 8);
        let nothing = Clock::default();
        assert!(shadow.access(4, 8, access(0, 0, Kind::Write), &nothing, 0).is_none());
        assert!(shadow.access(12, 8, access(1, 1, Kind::Write), &nothing, 0).is_none(), "other bytes");
        assert_eq!(shadow.access(8, 4, access(2, 2, Kind::Read), &nothing, 0).unwrap().event, 0);
        let mut knows = Clock::default();
        knows.raise(0, 1);
        assert!(shadow.access(4, 8, access(2, 3, Kind::Read), &knows, 0).is_none(), "ordered");
        assert_eq!(shadow.access(16, 1, access(3, 4, Kind::Write), &knows, 0).unwrap().event, 1);
        knows.raise(1, 1);
        let late = shadow.access(0, 16, access(4, 5, Kind::Write), &knows, 0);
        assert_eq!(late.unwrap().kind, Kind::Read, "a read must be over before its bytes are overwritten");
    }

    #[test]
    fn atomics_do_not_race_with_each_other() {
        let mut shadow = Shadow::new(16, 8);
        let nothing = Clock::default();
        assert!(shadow.access(0, 4, access(0, 0, Kind::Strong), &nothing, 0).is_none());
        assert!(shadow.access(0, 4, access(1, 1, Kind::Strong), &nothing, 0).is_none());
        assert!(shadow.access(0, 4, access(2, 2, Kind::Read), &nothing, 0).is_some());
    }
}
