//! cp.async: 16 bytes to shared memory, through the generic proxy.

use fa3_ir::{GlobalAddr, Operand, SharedAddr};

use crate::clock::Epoch;
use crate::copies::Copy16;
use crate::lanes::Lane;
use crate::machine::{At, Machine};
use crate::memory::POISON;
use crate::rule::Rule;
use crate::shadow::{Access, Kind, Origin};
use crate::warp::each;

impl Machine<'_> {
    pub(super) fn copy_async(
        &mut self,
        at: At,
        dst: SharedAddr,
        src: GlobalAddr,
        valid: Operand,
        active: u32,
    ) {
        let (targets, sources) = (self.shared_addresses(at, dst), self.global_addresses(at, src));
        let valid = self.operand(at, valid);
        let (cluster, warp, event) = (self.clusters[at.cluster].id, self.warp(at).component, self.event(at));
        self.warp(at).copies.issued += 1;
        let number = self.warp(at).copies.issued;
        self.same_target(at, &targets, &sources, &valid, active);
        for lane in each(active) {
            let component = self.component(at, |warp| &mut warp.copies.lanes[lane].component);
            let epoch = Epoch { cluster, component, value: number };
            let access =
                |kind| Access { epoch, event, kind, origin: Origin::CopyAsync, warp, lane: Lane::of(lane) };
            let Some(to) = self.resolve(at, targets[lane], 16, 16, Rule::Bounds) else { continue };
            let valid = valid[lane].min(16);
            if valid > 0 {
                let Some(from) = self.locate(at, sources[lane], valid, 1) else { continue };
                if !sources[lane].is_multiple_of(16) {
                    let address = sources[lane];
                    self.find(Rule::Bounds, at, format!("global address {address:#x} is not aligned to 16"));
                    continue;
                }
                self.need_global(at, from, valid);
                self.access_global(at, from, valid, access(Kind::Read));
            }
            self.access_shared(at, to, 16, access(Kind::Write));
            self.cta(at).shared.write(to.offset, &[POISON; 16]);
            let copy = Copy16 { number, target: to.offset, source: sources[lane], valid };
            self.warp(at).copies.lanes[lane].pending.push_back(copy);
        }
        if self.schedule.at_once() {
            each(active).for_each(|lane| self.perform_copies(at, lane, number));
        }
    }

    /// Reports lanes that copy different bytes to the same place.
    fn same_target(&mut self, at: At, to: &[u32; 32], from: &[u64; 32], valid: &[u32; 32], active: u32) {
        let mut lanes: Vec<usize> = each(active).collect();
        lanes.sort_unstable_by_key(|&lane| to[lane]);
        let what = |lane: usize| (valid[lane].min(16) > 0).then_some((from[lane], valid[lane].min(16)));
        let clash =
            lanes.windows(2).find(|pair| to[pair[0]] == to[pair[1]] && what(pair[0]) != what(pair[1]));
        if let Some(&[first, second]) = clash {
            let what = format!("lanes {first} and {second} of one cp.async write the same bytes");
            self.find(Rule::Lanes, at, what);
        }
    }

    pub(super) fn copy_async_commit(&mut self, at: At, active: u32) {
        let copies = &mut self.warp(at).copies;
        each(active).for_each(|lane| copies.lanes[lane].groups.push_back(copies.issued));
    }

    pub(super) fn copy_async_wait(&mut self, at: At, active: u32, pending: u32) {
        for lane in each(active) {
            let copies = &mut self.warp(at).copies.lanes[lane];
            let done = copies.groups.len().saturating_sub(pending as usize);
            let (upto, component) = (copies.groups.drain(..done).next_back(), copies.component);
            let (Some(upto), Some(component)) = (upto, component) else { continue };
            self.perform_copies(at, lane, upto);
            // The copy goes through the generic proxy, so it includes no fence between the proxies.
            self.warp(at).bundle.generic.raise(component, upto);
        }
    }

    /// Performs a lane's copies up to number `upto`.
    pub(super) fn perform_copies(&mut self, at: At, lane: usize, upto: u32) {
        loop {
            let pending = &mut self.warp(at).copies.lanes[lane].pending;
            if pending.front().is_none_or(|copy| copy.number > upto) {
                return;
            }
            let Some(copy) = pending.pop_front() else { return };
            let mut data = [0; 16];
            if let Ok(place) = self.memory.locate(copy.source, copy.valid.into()) {
                let bytes = &self.memory.allocations[place.allocation].bytes;
                let valid = copy.valid as usize;
                data[..valid].copy_from_slice(&bytes[place.offset..place.offset + valid]);
            }
            self.cta(at).shared.write(copy.target, &data);
        }
    }
}
