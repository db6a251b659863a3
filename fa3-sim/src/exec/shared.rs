//! Accesses to shared memory.

use fa3_ir::{SharedAddr, SharedBase};

use crate::clock::{Epoch, Space};
use crate::data::bank;
use crate::lanes::Lane;
use crate::machine::{At, Cta, Machine};
use crate::rule::Rule;
use crate::shadow::{Access, Conflict, Kind, Origin};
use crate::shared::{Shared, WINDOW, split};
use crate::warp::Warp;

/// A place in the shared memory of a cluster: the CTA's index, and the offset in its plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SharedPlace {
    pub(crate) cta: usize,
    pub(crate) offset: u32,
}

impl Machine<'_> {
    /// The address that each lane gives.
    pub(crate) fn shared_addresses(&mut self, at: At, addr: SharedAddr) -> [u32; 32] {
        let code = &self.program.codes[self.warp(at).code];
        match addr.base {
            SharedBase::Region(region) => {
                let start = self.program.kernel.smem.get(region).map_or(0, |info| info.offset);
                [(WINDOW + start).wrapping_add_signed(addr.offset); 32]
            }
            SharedBase::Value(value) => {
                let lanes = self.warp(at).value(code, value);
                lanes.map(|lane| (lane as u32).wrapping_add_signed(addr.offset))
            }
        }
    }

    /// The place of an address in the CTA's own shared memory. Reports `rule` if it is not aligned, and
    /// [`Rule::Bounds`] if it is not in that memory.
    pub(crate) fn resolve(
        &mut self,
        at: At,
        address: u32,
        bytes: u32,
        align: u32,
        rule: Rule,
    ) -> Option<SharedPlace> {
        let place = self.resolve_in_cluster(at, address, bytes, align, rule)?;
        if place.cta != at.cta {
            self.find(Rule::Bounds, at, format!("shared address {address:#x} is another cta's"));
            return None;
        }
        Some(place)
    }

    /// The place of a shared address anywhere in the cluster. Reports an address that has no place.
    pub(crate) fn resolve_in_cluster(
        &mut self,
        at: At,
        address: u32,
        bytes: u32,
        align: u32,
        rule: Rule,
    ) -> Option<SharedPlace> {
        let (rank, offset) = split(address);
        let cta = rank.map_or(at.cta, |rank| rank as usize);
        let ctas = &self.clusters[at.cluster].ctas;
        let inside =
            ctas.get(cta).is_some_and(|cta| offset.is_some_and(|offset| cta.shared.contains(offset, bytes)));
        let Some(offset) = offset.filter(|_| inside) else {
            let size = self.program.kernel.smem.bytes();
            let what = match offset {
                None => format!("shared address {address:#x} is before the kernel's shared memory"),
                Some(offset) => {
                    let end = u64::from(offset) + u64::from(bytes);
                    format!("bytes {offset} to {end} of cta {cta} are outside its {size} of shared memory")
                }
            };
            self.find(Rule::Bounds, at, what);
            return None;
        };
        let end = offset.saturating_add(bytes.max(1) - 1);
        if !self.program.is_in_a_region(offset) || !self.program.is_in_a_region(end) {
            let end = offset + bytes;
            self.find(Rule::Bounds, at, format!("shared bytes {offset} to {end} lie in no region"));
            return None;
        }
        if !offset.is_multiple_of(align) {
            self.find(rule, at, format!("shared offset {offset} is not aligned to {align}"));
            return None;
        }
        Some(SharedPlace { cta, offset })
    }

    /// Records an access, and reports an earlier access if the new access is not ordered after it.
    pub(crate) fn access_shared(&mut self, at: At, place: SharedPlace, bytes: u32, access: Access) {
        let SharedPlace { cta, offset } = place;
        let id = self.clusters[at.cluster].id;
        if access.origin != Origin::Product
            && self.clusters[at.cluster].ctas[cta].shared.holds_mbarrier(offset, bytes)
        {
            let end = offset + bytes;
            self.find(Rule::M1, at, format!("bytes {offset} to {end} hold an mbarrier that lives"));
        }
        let (shared, warp) = self.shared_and_warp(at, cta);
        let after = Machine::after(id, warp, access.origin, Space::Shared);
        let mut batch = shared.shadow.batch(access, &after);
        let conflict = shared.shadow.access(offset as usize, bytes as usize, &mut batch);
        if let Some(conflict) = conflict {
            self.conflict_in_shared(at, conflict, access, (offset, bytes));
        }
        if cta != at.cta {
            self.visit(at, cta, access, access.epoch);
        }
    }

    /// The shared memory of a CTA of the warp's cluster, and the warp.
    fn shared_and_warp(&mut self, at: At, cta: usize) -> (&mut Shared, &Warp) {
        let ctas = &mut self.clusters[at.cluster].ctas;
        if cta == at.cta {
            let Cta { shared, warps, .. } = &mut ctas[cta];
            return (shared, &warps[at.warp]);
        }
        let [other, own] = ctas.get_disjoint_mut([cta, at.cta]).expect("both are in the cluster");
        (&mut other.shared, &own.warps[at.warp])
    }

    /// Records a product's access to `bytes` bytes from each offset in the shared memory of the warp's CTA. Reports
    /// bytes that are not initialised, and earlier accesses that do not happen before it.
    pub(crate) fn access_operand(&mut self, at: At, offsets: &[u32], bytes: u32, access: Access) {
        let id = self.clusters[at.cluster].id;
        let (shared, warp) = self.shared_and_warp(at, at.cta);
        let after = Machine::after(id, warp, access.origin, Space::Shared);
        let mut batch = shared.shadow.batch(access, &after);
        let mut conflicts = Vec::new();
        let note = |offset, conflict| conflicts.push((offset, conflict));
        shared.shadow.access_each(offsets, bytes as usize, &mut batch, note);
        if conflicts.is_empty() && offsets.iter().all(|&offset| shared.is_valid(offset, bytes)) {
            return;
        }
        let mut conflicts = conflicts.into_iter().peekable();
        for &offset in offsets {
            self.need_shared(at, SharedPlace { cta: at.cta, offset }, bytes);
            while let Some((_, conflict)) = conflicts.next_if(|(of, _)| *of == offset) {
                self.conflict_in_shared(at, conflict, access, (offset, bytes));
            }
        }
    }

    fn conflict_in_shared(
        &mut self,
        at: At,
        conflict: Conflict,
        access: Access,
        (offset, bytes): (u32, u32),
    ) {
        let region = self.region_at(offset);
        let what = format!("{offset}..{} ({region})", offset + bytes);
        self.conflict(at, conflict, access, Space::Shared, what);
    }

    /// Records a use of another CTA's shared memory. That CTA must not have exited at the access, and must not exit
    /// until the access or `end` has happened.
    pub(crate) fn visit(&mut self, at: At, cta: usize, access: Access, end: Epoch) {
        if self.clusters[at.cluster].ctas[cta].exited() {
            let number = self.clusters[at.cluster].ctas[cta].number;
            self.find(Rule::T5, at, format!("the shared memory of cta {number} is used after it has exited"));
        } else {
            self.clusters[at.cluster].ctas[cta].visits.push((access, end));
        }
    }

    /// The regions that an offset is in.
    pub(crate) fn region_at(&self, offset: u32) -> String {
        let regions = &self.program.kernel.smem.regions;
        let names: Vec<String> = regions
            .iter()
            .filter(|region| (region.offset..region.end()).contains(&offset))
            .map(|region| format!("{}+{}", region.name, offset - region.offset))
            .collect();
        names.join(", ")
    }

    /// A generic access at this moment, by the lanes that execute the warp's instruction. [`Access::of`] makes it the
    /// access of one lane.
    pub(crate) fn generic(&mut self, at: At, kind: Kind) -> Access {
        let (epoch, event) = (self.epoch(at), self.event(at));
        Access {
            epoch,
            event,
            kind,
            origin: Origin::Thread,
            warp: self.warp(at).component,
            lane: Lane::SEVERAL,
        }
    }

    /// Reports bytes of shared memory that are not initialised.
    pub(crate) fn need_shared(&mut self, at: At, SharedPlace { cta, offset }: SharedPlace, bytes: u32) {
        let shared = &self.clusters[at.cluster].ctas[cta].shared;
        if !shared.is_valid(offset, bytes) {
            let (region, end) = (self.region_at(offset), offset + bytes);
            if region.is_empty() {
                return self.find(
                    Rule::Bounds,
                    at,
                    format!("shared bytes {offset} to {end} lie in no region"),
                );
            }
            self.find(Rule::I1, at, format!("shared bytes {offset} to {end} ({region}) hold nothing"));
        }
    }

    /// Counts the wavefronts of an access of `bytes` bytes by each lane of `active`.
    pub(crate) fn count_wavefronts(&mut self, at: At, addresses: &[u32; 32], active: u32, bytes: u32) {
        let given = std::array::from_fn(|lane| (active >> lane & 1 == 1).then_some(addresses[lane]));
        let (ideal, actual) = (bank::ideal_wavefronts(&given, bytes), bank::wavefronts(&given, bytes));
        let &mut Warp { code, pc, .. } = self.warp(at);
        let wavefronts = &mut self.wavefronts[code][pc];
        wavefronts.accesses += 1;
        wavefronts.ideal += u64::from(ideal);
        wavefronts.actual += u64::from(actual);
        self.trace_wavefronts(at, actual);
    }
}
