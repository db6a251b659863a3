//! Copies from global to shared memory: they write their data, then signal their mbarriers.

use fa3_ir::{LoadOptions, SharedAddr, Swizzle};

use super::shared::SharedPlace;
use crate::copies::{AsyncEvent, LoadCopy, Piece, Target};
use crate::lanes::Lane;
use crate::machine::{At, Machine};
use crate::memory::POISON;
use crate::rule::Rule;
use crate::shadow::Kind;
use crate::shared::{WINDOW, map};
use crate::simulation::Mode;

impl Machine<'_> {
    /// Begins a copy of the `pieces` of a lane.
    pub(super) fn load_copy(
        &mut self,
        at: At,
        lane: usize,
        dst: SharedAddr,
        mbarrier: SharedAddr,
        options: &LoadOptions,
        (pieces, swizzle, align): (Vec<Piece>, Swizzle, u32),
    ) {
        let bytes: u32 = pieces.iter().map(|piece| piece.bytes).sum();
        let (dst, mbarrier) =
            (self.shared_addresses(at, dst)[lane], self.shared_addresses(at, mbarrier)[lane]);
        let event = self.event(at);
        self.counters.loads.add(bytes);
        let mut targets = Vec::new();
        for rank in self.targets(at, options, lane) {
            let (dst, mbarrier) = match rank {
                None => (dst, mbarrier),
                Some(rank) => (map(dst, rank), map(mbarrier, rank)),
            };
            if let Some(target) = self.target(at, (dst, mbarrier), (bytes, align), event, lane) {
                targets.push(target);
            }
        }
        let Some(first) = targets.first().copied() else { return };
        self.trace_load(at, bytes, &targets);
        self.read_source(at, &pieces, first, event, lane);
        let mut load = LoadCopy { pieces, bytes, swizzle, targets, landed: false, event };
        if self.schedule.loads_at_once() {
            self.land(at.cluster, &mut load);
            self.signal_targets(at.cluster, &load);
        } else {
            self.clusters[at.cluster].events.push(AsyncEvent::Load(load));
        }
    }

    /// The ranks of the CTAs that a multicast goes to; `None` for the warp's own CTA.
    fn targets(&mut self, at: At, options: &LoadOptions, lane: usize) -> Vec<Option<u32>> {
        let Some(mask) = options.multicast else { return vec![None] };
        let mask = self.operand(at, mask)[lane];
        let size = self.program.kernel.launch.cluster;
        if mask == 0 || mask >> size != 0 {
            self.find(Rule::T1, at, format!("a multicast to mask {mask:#x} in a cluster of {size}"));
        }
        (0..size).filter(|rank| mask >> rank & 1 == 1).map(Some).collect()
    }

    /// The copy to one CTA, if it can be made.
    fn target(
        &mut self,
        at: At,
        (dst, mbarrier): (u32, u32),
        (bytes, align): (u32, u32),
        event: u32,
        lane: usize,
    ) -> Option<Target> {
        let place = self.resolve_in_cluster(at, dst, bytes, align, Rule::T1)?;
        let signal = self.resolve_in_cluster(at, mbarrier, 8, 8, Rule::M1)?;
        if !self.use_mbarrier(at, signal, true) {
            return None;
        }
        let issuer = self.warp(at).component;
        let mbarrier = self.clusters[at.cluster].mbarrier(signal)?;
        let (phase, component) = (mbarrier.issue(issuer, bytes), mbarrier.component);
        let by = (issuer, Lane::of(lane));
        let access = self.load_access(at.cluster, (component, phase), event, Kind::Write, by);
        self.access_shared(at, place, bytes, access);
        let shared = &mut self.clusters[at.cluster].ctas[place.cta].shared;
        if self.mode != Mode::Skeleton {
            shared.bytes[place.offset as usize..(place.offset + bytes) as usize].fill(POISON);
        }
        // The bytes count as initialised: reading them early is a missing wait, not a missing value.
        shared.mark(place.offset, bytes, true);
        Some(Target { cta: place.cta, offset: place.offset, mbarrier: signal.offset, phase })
    }

    /// Records that the copy reads global memory until it completes.
    fn read_source(&mut self, at: At, pieces: &[Piece], target: Target, event: u32, lane: usize) {
        let mbarrier = self.clusters[at.cluster].ctas[target.cta].mbarrier(target.mbarrier);
        let Some(component) = mbarrier.map(|mbarrier| mbarrier.component) else { return };
        let by = (self.warp(at).component, Lane::of(lane));
        let access = self.load_access(at.cluster, (component, target.phase), event, Kind::Read, by);
        for piece in pieces {
            let Some(address) = piece.global else { continue };
            if let Some(place) = self.locate(at, address, piece.bytes, 1) {
                self.need_global(at, place, piece.bytes);
                self.access_global(at, place, piece.bytes, access);
            }
        }
    }

    /// Completes the event at `index` of a cluster, or half of it: the data first, then the signal.
    pub(crate) fn happen(&mut self, cluster: usize, index: usize) {
        match self.clusters[cluster].events.swap_remove(index) {
            AsyncEvent::Load(mut load) if !load.landed => {
                self.land(cluster, &mut load);
                self.clusters[cluster].events.push(AsyncEvent::Load(load));
            }
            AsyncEvent::Load(load) => self.signal_targets(cluster, &load),
            AsyncEvent::Store(store) => self.stored(cluster, store),
            arrival @ AsyncEvent::Arrive { .. } => self.copied(cluster, &arrival),
        }
    }

    fn signal_targets(&mut self, cluster: usize, load: &LoadCopy) {
        for target in &load.targets {
            let place = SharedPlace { cta: target.cta, offset: target.mbarrier };
            self.signal(cluster, place, load.bytes, target.phase, load.event);
        }
    }

    /// Writes the data of a copy.
    fn land(&mut self, cluster: usize, load: &mut LoadCopy) {
        load.landed = true;
        if self.mode == Mode::Skeleton {
            return;
        }
        for piece in &load.pieces {
            let data = match piece.global {
                None => vec![0; piece.bytes as usize],
                Some(address) => match self.memory.locate(address, piece.bytes.into()) {
                    Err(_) => continue,
                    Ok(place) => {
                        let bytes = &self.memory.allocations[place.allocation].bytes;
                        bytes[place.offset..place.offset + piece.bytes as usize].to_vec()
                    }
                },
            };
            for target in &load.targets {
                let shared = &mut self.clusters[cluster].ctas[target.cta].shared;
                each_chunk(target.offset, piece, load.swizzle, |offset, range| {
                    if shared.contains(offset, range.len() as u32) {
                        shared.write(offset, &data[range]);
                    }
                });
            }
        }
    }
}

/// Calls `part` for each part of a piece that swizzling moves as a whole, where the box begins at `start`.
pub(super) fn each_chunk(
    start: u32,
    piece: &Piece,
    swizzle: Swizzle,
    mut part: impl FnMut(u32, std::ops::Range<usize>),
) {
    let mut done = 0;
    while done < piece.bytes {
        let linear = start + piece.shared + done;
        let length = (16 - linear % 16).min(piece.bytes - done);
        // The permutation applies to the address in the shared window.
        let offset = swizzle.apply(WINDOW + linear) - WINDOW;
        part(offset, done as usize..(done + length) as usize);
        done += length;
    }
}
