//! Accesses to global memory.

use fa3_ir::GlobalAddr;

use crate::clock::Space;
use crate::machine::{At, Machine};
use crate::memory::{Demand, GlobalPlace, state};
use crate::rule::Rule;
use crate::shadow::{Access, Kind};

impl Machine<'_> {
    /// The address that each lane gives.
    pub(crate) fn global_addresses(&mut self, at: At, addr: GlobalAddr) -> [u64; 32] {
        let code = &self.program.codes[self.warp(at).code];
        self.warp(at).value(code, addr.base).map(|lane| lane.wrapping_add_signed(addr.offset.into()))
    }

    /// The place of an address. Reports an address that is in no allocation or not aligned.
    pub(crate) fn locate(&mut self, at: At, address: u64, bytes: u32, align: u32) -> Option<GlobalPlace> {
        match self.memory.locate(address, bytes.into()) {
            Err(nearest) => {
                let what = self.nowhere(address, bytes, nearest);
                self.find(Rule::Bounds, at, what);
                None
            }
            Ok(_) if !address.is_multiple_of(align.into()) => {
                self.find(Rule::Bounds, at, format!("global address {address:#x} is not aligned to {align}"));
                None
            }
            Ok(place) => Some(place),
        }
    }

    fn nowhere(&self, address: u64, bytes: u32, nearest: Option<(usize, u64)>) -> String {
        match nearest {
            None => format!("{bytes} bytes at global address {address:#x} are before every allocation"),
            Some((allocation, offset)) => {
                let allocation = &self.memory.allocations[allocation];
                let (name, size) = (&allocation.name, allocation.bytes.len());
                format!("{bytes} bytes at offset {offset} of {name} are outside its {size}")
            }
        }
    }

    /// Records an access, and reports an earlier access if the new access is not ordered after it.
    pub(crate) fn access_global(&mut self, at: At, place: GlobalPlace, bytes: u32, access: Access) {
        let id = self.clusters[at.cluster].id;
        let warp = &self.clusters[at.cluster].ctas[at.cta].warps[at.warp];
        let after = Machine::after(id, warp, access.origin, Space::Global);
        let shadow = &mut self.global[place.allocation];
        let mut batch = shadow.batch(access, &after);
        let conflict = shadow.access(place.offset, bytes as usize, &mut batch);
        let again = match access.kind {
            Kind::Read | Kind::StrongRead => false,
            Kind::Write => {
                self.memory.allocations[place.allocation].mark(place.offset, bytes as usize, state::WRITTEN)
            }
            Kind::Strong | Kind::Reduction => {
                self.memory.allocations[place.allocation].mark(place.offset, bytes as usize, state::REDUCED)
            }
        };
        let allocation = &self.memory.allocations[place.allocation];
        let (name, start, end) = (&allocation.name, place.offset, place.offset + bytes as usize);
        if let Some(conflict) = conflict {
            let bytes = format!("{start}..{end} of {name}");
            self.conflict(at, conflict, access, Space::Global, bytes);
        } else if again && allocation.demand != Demand::None {
            let what = format!("bytes {start} to {end} of {name} are written twice");
            self.find(Rule::I1, at, what);
        }
    }

    /// Reports bytes of global memory that are not initialised.
    pub(crate) fn need_global(&mut self, at: At, place: GlobalPlace, bytes: u32) {
        let allocation = &self.memory.allocations[place.allocation];
        if !allocation.is_valid(place.offset, bytes as usize) {
            let (name, offset) = (&allocation.name, place.offset);
            let what = format!("bytes {offset} to {} of {name} hold nothing", offset + bytes as usize);
            self.find(Rule::I1, at, what);
        }
    }
}
