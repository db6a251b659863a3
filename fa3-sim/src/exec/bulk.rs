//! Copies from shared to global memory. Each thread has its own bulk groups.

use fa3_ir::{Elem, SharedAddr, Swizzle};

use super::load::each_chunk;
use crate::clock::Epoch;
use crate::copies::{BulkCopy, BulkThread, Piece};
use crate::data::convert;
use crate::data::float::canonical;
use crate::lanes::Lane;
use crate::machine::{At, Machine};
use crate::rule::Rule;
use crate::shadow::{Access, Kind, Origin};
use crate::simulation::Mode;
use crate::trace::Action;
use crate::warp::each;

impl Machine<'_> {
    /// The bulk groups of a lane, which begin with its first copy or commit.
    fn bulk_thread(&mut self, at: At, lane: usize) -> &mut BulkThread {
        let known = self.warp(at).bulk.iter().position(|thread| thread.lane == lane);
        let index = known.unwrap_or_else(|| {
            let cluster = &mut self.clusters[at.cluster];
            let (read, write) = (cluster.component(), cluster.component());
            let warp = self.warp(at);
            warp.bulk.push(BulkThread { lane, read, write, ..BulkThread::default() });
            warp.bulk.len() - 1
        });
        &mut self.warp(at).bulk[index]
    }

    /// Begins a copy, or an addition, of the `pieces` of a lane.
    pub(super) fn bulk_copy(
        &mut self,
        at: At,
        lane: usize,
        src: SharedAddr,
        add: Option<Elem>,
        (pieces, swizzle, align): (Vec<Piece>, Swizzle, u32),
    ) {
        let bytes: u32 = pieces.iter().map(|piece| piece.bytes).sum();
        let source = self.shared_addresses(at, src)[lane];
        let Some(place) = self.resolve(at, source, bytes, align, Rule::T1) else { return };
        let event = self.event(at);
        let count = if add.is_some() { &mut self.counters.reductions } else { &mut self.counters.stores };
        count.add(bytes);
        self.trace(at, Action::Store { bytes });
        let (cluster, warp) = (self.clusters[at.cluster].id, self.warp(at).component);
        let thread = self.bulk_thread(at, lane);
        let group = thread.committed + 1;
        thread.open += 1;
        let epoch = |component| Epoch { cluster, component, value: group };
        let (read, write) = (epoch(thread.read), epoch(thread.write));
        let access =
            |epoch, kind| Access { epoch, event, kind, origin: Origin::Store, warp, lane: Lane::of(lane) };
        self.need_shared(at, place, bytes);
        self.access_shared(at, place, bytes, access(read, Kind::Read));
        let kind = if add.is_some() { Kind::Reduction } else { Kind::Write };
        for piece in &pieces {
            let Some(address) = piece.global else { continue };
            if let Some(place) = self.locate(at, address, piece.bytes, 1) {
                if add.is_some() {
                    self.need_global(at, place, piece.bytes);
                }
                self.access_global(at, place, piece.bytes, access(write, kind));
            }
        }
        let copy = BulkCopy { group, source: place.offset, swizzle, pieces, add, data: None };
        self.bulk_thread(at, lane).copies.push_back(copy);
        if self.schedule.at_once() {
            self.read_copies(at, lane, group);
            if self.schedule.at_once() {
                self.write_copies(at, lane, group);
            }
        }
    }

    /// Commits the open groups of the lanes of `active`. Lanes without copies have nothing to commit.
    pub(super) fn bulk_commit(&mut self, at: At, active: u32) {
        let commits = |thread: &BulkThread| active >> thread.lane & 1 == 1;
        let bulk = &mut self.warp(at).bulk;
        let nothing = !bulk.iter().any(|thread| commits(thread) && thread.open > 0);
        let forgotten =
            bulk.iter().find(|thread| !commits(thread) && thread.open > 0).map(|thread| thread.lane);
        for thread in bulk.iter_mut().filter(|thread| commits(thread)) {
            thread.committed += 1;
            thread.open = 0;
        }
        if let Some(lane) = forgotten.filter(|_| nothing) {
            self.find(Rule::T3, at, format!("a commit of nothing: the open bulk copies are lane {lane}'s"));
        }
    }

    pub(super) fn bulk_wait(&mut self, at: At, active: u32, pending: u32, read: bool) {
        for lane in each(active) {
            if let Some(index) = self.warp(at).bulk.iter().position(|thread| thread.lane == lane) {
                self.wait_thread(at, index, pending, read);
            }
        }
        // A wait by a thread without groups is useless if another thread's groups are unfinished.
        let waits = |lane: usize| active >> lane & 1 == 1;
        let bulk = &self.warp(at).bulk;
        let mine = bulk.iter().any(|thread| waits(thread.lane));
        let unfinished = |thread: &BulkThread| {
            thread.committed > if read { thread.waited_read } else { thread.waited_write }
        };
        let forgotten = bulk.iter().position(|thread| !waits(thread.lane) && unfinished(thread));
        if let Some(index) = forgotten
            && !mine
        {
            let lane = bulk[index].lane;
            self.find(
                Rule::T3,
                at,
                format!("a wait for bulk groups, which are lane {lane}'s, by other lanes"),
            );
            self.wait_thread(at, index, pending, read);
        }
    }

    fn wait_thread(&mut self, at: At, index: usize, pending: u32, read: bool) {
        let thread = &mut self.warp(at).bulk[index];
        let (lane, done) = (thread.lane, thread.committed.saturating_sub(pending));
        let (component, of_write) = (thread.read, thread.write);
        thread.waited_read = thread.waited_read.max(done);
        if !read {
            thread.waited_write = thread.waited_write.max(done);
        }
        self.read_copies(at, lane, done);
        let bundle = &mut self.warp(at).bundle;
        bundle.complete(component, done);
        if !read {
            bundle.complete(of_write, done);
            self.write_copies(at, lane, done);
        }
    }

    /// Performs the remaining copies when the warp's cluster is done.
    pub(crate) fn finish_copies(&mut self, at: At) {
        for index in 0..self.warp(at).bulk.len() {
            let lane = self.warp(at).bulk[index].lane;
            self.read_copies(at, lane, u32::MAX);
            self.write_copies(at, lane, u32::MAX);
        }
    }

    /// Lets the copies of groups up to `upto` read their sources.
    fn read_copies(&mut self, at: At, lane: usize, upto: u32) {
        let cta = &mut self.clusters[at.cluster].ctas[at.cta];
        let mut threads = cta.warps[at.warp].bulk.iter_mut();
        let Some(thread) = threads.find(|thread| thread.lane == lane) else { return };
        let unread = thread.copies.iter_mut().filter(|copy| copy.group <= upto && copy.data.is_none());
        for copy in unread {
            let bytes: u32 = copy.pieces.iter().map(|piece| piece.bytes).sum();
            let mut data = vec![0; bytes as usize];
            for piece in &copy.pieces {
                each_chunk(copy.source, piece, copy.swizzle, |offset, range| {
                    let start = piece.shared as usize + range.start;
                    let bytes = range.len() as u32;
                    if cta.shared.contains(offset, bytes) {
                        data[start..start + range.len()].copy_from_slice(cta.shared.read(offset, bytes));
                    }
                });
            }
            copy.data = Some(data);
        }
    }

    /// Lets the copies of groups up to `upto` write what they have read.
    fn write_copies(&mut self, at: At, lane: usize, upto: u32) {
        loop {
            let thread = self.bulk_thread(at, lane);
            if thread.copies.front().is_none_or(|copy| copy.group > upto) {
                return;
            }
            let copy = thread.copies.pop_front();
            let Some(BulkCopy { pieces, add, data: Some(data), .. }) = copy else { return };
            self.progress += 1;
            if self.mode == Mode::Skeleton {
                continue;
            }
            for piece in pieces {
                let Some(address) = piece.global else { continue };
                let Ok(place) = self.memory.locate(address, piece.bytes.into()) else { continue };
                let to = &mut self.memory.allocations[place.allocation].bytes
                    [place.offset..place.offset + piece.bytes as usize];
                let from = &data[piece.shared as usize..(piece.shared + piece.bytes) as usize];
                match add {
                    None => to.copy_from_slice(from),
                    Some(elem) => add_all(elem, to, from),
                }
            }
        }
    }
}

/// Adds elements in memory. Subnormals are kept, unlike in atomics on global memory: an H100 keeps them, although the
/// PTX ISA says that binary32 is flushed.
fn add_all(elem: Elem, to: &mut [u8], from: &[u8]) {
    let pairs = to.chunks_exact_mut(elem.bytes() as usize).zip(from.chunks_exact(elem.bytes() as usize));
    for (to, from) in pairs {
        let (mut a, mut b) = ([0; 8], [0; 8]);
        a[..to.len()].copy_from_slice(to);
        b[..from.len()].copy_from_slice(from);
        let (a, b) = (u64::from_le_bytes(a), u64::from_le_bytes(b));
        let sum = match elem {
            Elem::F32 => canonical(f32::from_bits(a as u32) + f32::from_bits(b as u32)).to_bits().into(),
            Elem::F16 => {
                convert::f16_of_f32(convert::f32_of_f16(a as u16) + convert::f32_of_f16(b as u16)).into()
            }
            Elem::Bf16 => {
                convert::bf16_of_f32(convert::f32_of_bf16(a as u16) + convert::f32_of_bf16(b as u16)).into()
            }
            Elem::U8 | Elem::E4m3 | Elem::U32 | Elem::U64 => a.wrapping_add(b),
        };
        to.copy_from_slice(&sum.to_le_bytes()[..to.len()]);
    }
}
