//! cp.async: 16 bytes to shared memory, through the generic proxy.

use fa3_ir::{GlobalAddr, Operand, SharedAddr};

use crate::clock::Epoch;
use crate::copies::Copy16;
use crate::machine::{At, Machine};
use crate::memory::POISON;
use crate::rule::Rule;
use crate::shadow::{Access, By, Kind};
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
        let component = self.component(at, |warp| &mut warp.copies.component);
        let (cluster, event) = (self.clusters[at.cluster].id, self.event(at));
        self.warp(at).copies.issued += 1;
        let number = self.warp(at).copies.issued;
        let epoch = Epoch { cluster, component, value: number };
        for lane in each(active) {
            let Some(to) = self.resolve(at, targets[lane], 16, 16, Rule::Bounds) else { continue };
            let valid = valid[lane].min(16);
            if valid > 0 {
                let Some(from) = self.locate(at, sources[lane], valid, 1) else { continue };
                if !sources[lane].is_multiple_of(16) {
                    self.find(
                        Rule::Bounds,
                        at,
                        format!("global address {:#x} is not aligned to 16", sources[lane]),
                    );
                    continue;
                }
                self.need_global(at, from, valid);
                self.access_global(
                    at,
                    from,
                    valid,
                    Access { epoch, event, kind: Kind::Read, by: By::CopyAsync },
                );
            }
            self.access_shared(at, to, 16, Access { epoch, event, kind: Kind::Write, by: By::CopyAsync });
            self.cta(at).shared.write(to.offset, &[POISON; 16]);
            let copy = Copy16 { number, target: to.offset, source: sources[lane], valid };
            self.warp(at).copies.pending.push_back(copy);
        }
        if self.schedule.at_once() {
            self.perform_copies(at, number);
        }
    }

    pub(super) fn copy_async_commit(&mut self, at: At) {
        let copies = &mut self.warp(at).copies;
        copies.groups.push_back(copies.issued);
    }

    pub(super) fn copy_async_wait(&mut self, at: At, pending: u32) {
        let copies = &mut self.warp(at).copies;
        let mut upto = None;
        while copies.groups.len() > pending as usize {
            upto = copies.groups.pop_front();
        }
        let (Some(upto), Some(component)) = (upto, copies.component) else { return };
        self.perform_copies(at, upto);
        // Through the generic proxy: no fence between the proxies comes with it.
        self.warp(at).bundle.generic.raise(component, upto);
    }

    /// The copies up to a number bring their data.
    pub(super) fn perform_copies(&mut self, at: At, upto: u32) {
        loop {
            let pending = &mut self.warp(at).copies.pending;
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
