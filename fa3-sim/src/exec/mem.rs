//! Loads, stores, atomics.

use fa3_ir::{Address, ArgValue, AtomicOp, Cache, GlobalAddr, MemInst, Operand, Param, Ty, Value};

use super::Flow;
use super::shared::SharedPlace;
use crate::clock::Exported;
use crate::data::Lanes;
use crate::data::float::canonical;
use crate::machine::{At, Machine};
use crate::memory::{GlobalPlace, state};
use crate::rule::Rule;
use crate::shadow::{Access, Kind};
use crate::warp::each;

/// The place in memory that a lane accesses.
#[derive(Clone, Copy)]
pub(super) enum MemPlace {
    Shared(SharedPlace),
    Global(GlobalPlace, u64),
}

impl<'a> Machine<'a> {
    pub(super) fn mem(&mut self, at: At, inst: &'a MemInst, active: u32) -> Flow {
        match inst {
            MemInst::LoadParam { dst, param, ty } => self.load_param(at, *dst, *param, *ty, active),
            MemInst::Load { dst, ty, addr, cache } => self.load(at, dst, *ty, *addr, *cache, active),
            MemInst::Store { src, ty, addr } => self.store(at, src, *ty, *addr, active),
            MemInst::LoadAcquire { dst, addr } => {
                self.load_acquire(at, *dst, *addr, active);
                return Flow::Poll;
            }
            MemInst::StoreRelease { src, addr } => self.store_release(at, *src, *addr, active),
            MemInst::Atomic { op, dst, addr, src } => {
                let flush = matches!(addr, Address::Global(_));
                self.atomic(at, Some(*dst), *addr, active, *src, &|old, src| apply(*op, flush, old, src));
                return Flow::Poll;
            }
            MemInst::ReduceAdd { ty, addr, src } => {
                let op = if *ty == Ty::F32 { AtomicOp::AddF32 } else { AtomicOp::AddU32 };
                let flush = matches!(addr, Address::Global(_));
                self.atomic(at, None, *addr, active, *src, &|old, src| apply(op, flush, old, src));
            }
            MemInst::CopyAsync { dst, src, src_bytes } => self.copy_async(at, *dst, *src, *src_bytes, active),
            MemInst::Prefetch { .. } => {}
            MemInst::CopyAsyncCommit => self.copy_async_commit(at, active),
            MemInst::CopyAsyncWait { pending } => self.copy_async_wait(at, active, *pending),
        }
        Flow::Next
    }

    pub(super) fn assign(&mut self, at: At, dst: Value, lanes: &Lanes, active: u32) {
        let code = &self.program.codes[self.warp(at).code];
        let slot = code.slot(dst);
        self.warp(at).assign(slot, lanes, active, code.mutable[slot as usize]);
    }

    fn load_param(&mut self, at: At, dst: Value, Param(index): Param, _: Ty, active: u32) {
        let bits = match self.args.get(index as usize) {
            Some(ArgValue::U32(x)) => u64::from(*x),
            Some(ArgValue::U64(x) | ArgValue::Pointer(x)) => *x,
            Some(ArgValue::F32(x)) => x.to_bits().into(),
            Some(ArgValue::Tensor(_)) | None => 0,
        };
        self.assign(at, dst, &[bits; 32], active);
    }

    /// The places where the lanes of `active` access `bytes` bytes each.
    pub(super) fn places(
        &mut self,
        at: At,
        addr: Address,
        active: u32,
        bytes: u32,
    ) -> [Option<MemPlace>; 32] {
        let mut places = [None; 32];
        match addr {
            Address::Shared(addr) => {
                let addresses = self.shared_addresses(at, addr);
                self.count_wavefronts(at, &addresses, active, bytes);
                for lane in each(active) {
                    let place = self.resolve(at, addresses[lane], bytes, bytes, Rule::Bounds);
                    places[lane] = place.map(MemPlace::Shared);
                }
            }
            Address::Global(addr) => {
                let addresses = self.global_addresses(at, addr);
                for lane in each(active) {
                    let place = self.locate(at, addresses[lane], bytes, bytes);
                    places[lane] = place.map(|place| MemPlace::Global(place, addresses[lane]));
                }
            }
        }
        places
    }

    fn peek(&self, at: At, place: MemPlace, bytes: u32) -> &[u8] {
        match place {
            MemPlace::Shared(SharedPlace { cta, offset }) => {
                self.clusters[at.cluster].ctas[cta].shared.read(offset, bytes)
            }
            MemPlace::Global(place, _) => {
                &self.memory.allocations[place.allocation].bytes[place.offset..place.offset + bytes as usize]
            }
        }
    }

    fn poke(&mut self, at: At, place: MemPlace, bytes: &[u8]) {
        if self.peek(at, place, bytes.len() as u32) != bytes {
            self.progress += 1;
        }
        match place {
            MemPlace::Shared(SharedPlace { cta, offset }) => {
                self.clusters[at.cluster].ctas[cta].shared.write(offset, bytes);
            }
            MemPlace::Global(place, _) => {
                let allocation = &mut self.memory.allocations[place.allocation];
                allocation.bytes[place.offset..place.offset + bytes.len()].copy_from_slice(bytes);
            }
        }
    }

    fn need_bytes(&mut self, at: At, place: MemPlace, bytes: u32) {
        match place {
            MemPlace::Shared(place) => self.need_shared(at, place, bytes),
            MemPlace::Global(place, _) => self.need_global(at, place, bytes),
        }
    }

    fn access(&mut self, at: At, place: MemPlace, bytes: u32, access: Access) {
        match place {
            MemPlace::Shared(place) => self.access_shared(at, place, bytes, access),
            MemPlace::Global(place, _) => self.access_global(at, place, bytes, access),
        }
    }

    fn load(&mut self, at: At, dst: &[Value], ty: Ty, addr: Address, cache: Cache, active: u32) {
        let (size, bytes) = (ty.bytes(), ty.bytes() * dst.len() as u32);
        let places = self.places(at, addr, active, bytes);
        let access = self.generic(at, Kind::Read);
        let mut lanes = [[0u64; 32]; 4];
        for lane in each(active) {
            let Some(place) = places[lane] else { continue };
            self.need_bytes(at, place, bytes);
            if let (MemPlace::Global(place, _), Cache::ReadOnly) = (place, cache) {
                self.need_unwritten(at, place, bytes);
            }
            self.access(at, place, bytes, access.of(lane));
            let data = self.peek(at, place, bytes);
            for (index, part) in data.chunks_exact(size as usize).enumerate() {
                let mut bits = [0; 8];
                bits[..part.len()].copy_from_slice(part);
                lanes[index][lane] = u64::from_le_bytes(bits);
            }
        }
        for (&dst, lanes) in dst.iter().zip(&lanes) {
            self.assign(at, dst, lanes, active);
        }
    }

    /// Reports a read-only load of bytes that the kernel writes.
    fn need_unwritten(&mut self, at: At, place: GlobalPlace, bytes: u32) {
        let states = &self.memory.allocations[place.allocation].state;
        let written = |byte: &u8| byte & (state::WRITTEN | state::REDUCED) != 0;
        if states[place.offset..place.offset + bytes as usize].iter().any(written) {
            self.find(Rule::Race, at, "a read-only load of bytes that the kernel writes");
        }
    }

    fn store(&mut self, at: At, src: &[Operand], ty: Ty, addr: Address, active: u32) {
        let (size, bytes) = (ty.bytes() as usize, ty.bytes() * src.len() as u32);
        let code = &self.program.codes[self.warp(at).code];
        let places = self.places(at, addr, active, bytes);
        let access = self.generic(at, Kind::Write);
        let mut data = [[0u8; 16]; 32];
        for (index, &operand) in src.iter().enumerate() {
            let lanes = self.warp(at).operand(code, operand);
            for lane in each(active) {
                data[lane][index * size..][..size].copy_from_slice(&lanes[lane].to_le_bytes()[..size]);
            }
        }
        self.same_place(at, &places, &data, bytes as usize);
        for lane in each(active) {
            let Some(place) = places[lane] else { continue };
            self.access(at, place, bytes, access.of(lane));
            self.poke(at, place, &data[lane][..bytes as usize]);
        }
    }

    /// Reports lanes of one store that write different values to the same bytes: any of the values may remain. Equal
    /// values are allowed. The places of one instruction are aligned to its size, so two places overlap only if they
    /// are equal.
    pub(super) fn same_place(
        &mut self,
        at: At,
        places: &[Option<MemPlace>; 32],
        data: &[[u8; 16]; 32],
        bytes: usize,
    ) {
        let key = |place: MemPlace| match place {
            MemPlace::Shared(place) => (place.cta, u64::from(place.offset)),
            MemPlace::Global(_, address) => (usize::MAX, address),
        };
        let mut order: Vec<((usize, u64), usize)> =
            (0..32).filter_map(|lane| places[lane].map(|place| (key(place), lane))).collect();
        order.sort_unstable();
        let clash = order
            .windows(2)
            .find(|pair| pair[0].0 == pair[1].0 && data[pair[0].1][..bytes] != data[pair[1].1][..bytes]);
        if let Some(pair) = clash {
            let (first, second) = (pair[0].1, pair[1].1);
            let what =
                format!("lanes {first} and {second} of one store write different values to the same bytes");
            self.find(Rule::Lanes, at, what);
        }
    }

    fn load_acquire(&mut self, at: At, dst: Value, addr: GlobalAddr, active: u32) {
        let places = self.places(at, Address::Global(addr), active, 4);
        let access = self.generic(at, Kind::StrongRead);
        let mut lanes = [0; 32];
        for lane in each(active) {
            let Some(place @ MemPlace::Global(_, address)) = places[lane] else { continue };
            self.need_bytes(at, place, 4);
            self.access(at, place, 4, access.of(lane));
            lanes[lane] = self.word(at, place).into();
            let id = self.clusters[at.cluster].id;
            if let Some(flag) = self.flags.get(&(None, 0, address)) {
                flag.acquire(id, &mut self.clusters[at.cluster].ctas[at.cta].warps[at.warp].bundle);
            }
        }
        self.assign(at, dst, &lanes, active);
    }

    fn word(&self, at: At, place: MemPlace) -> u32 {
        u32::from_le_bytes(self.peek(at, place, 4).try_into().unwrap_or_default())
    }

    fn store_release(&mut self, at: At, src: Operand, addr: GlobalAddr, active: u32) {
        let code = &self.program.codes[self.warp(at).code];
        let lanes = self.warp(at).operand(code, src);
        let places = self.places(at, Address::Global(addr), active, 4);
        let access = self.generic(at, Kind::Strong);
        for lane in each(active) {
            let Some(place @ MemPlace::Global(_, address)) = places[lane] else { continue };
            self.access(at, place, 4, access.of(lane));
            self.poke(at, place, &(lanes[lane] as u32).to_le_bytes());
            self.flags.remove(&(None, 0, address));
        }
        self.release(at, addr, active);
        self.warp(at).tick();
        self.progress += 1;
    }

    /// Releases everything that the warp has done so far to all warps that acquire the flags at these addresses.
    fn release(&mut self, at: At, addr: GlobalAddr, active: u32) {
        let id = self.clusters[at.cluster].id;
        let bundle = self.released(at);
        let addresses = self.global_addresses(at, addr);
        for lane in each(active) {
            self.flags.entry((None, 0, addresses[lane])).or_default().add(id, &bundle);
        }
    }

    /// Replaces each lane's number in memory by `change` of that number and the lane's operand, one lane after another.
    fn atomic(
        &mut self,
        at: At,
        dst: Option<Value>,
        addr: Address,
        active: u32,
        src: Operand,
        change: &dyn Fn(u32, u32) -> u32,
    ) {
        let code = &self.program.codes[self.warp(at).code];
        let src = self.warp(at).operand(code, src);
        let places = self.places(at, addr, active, 4);
        let access = self.generic(at, Kind::Strong);
        let id = self.clusters[at.cluster].id;
        let mut before = [0; 32];
        for lane in each(active) {
            let Some(place) = places[lane] else { continue };
            self.need_bytes(at, place, 4);
            self.access(at, place, 4, access.of(lane));
            let key = match place {
                MemPlace::Shared(place) => (Some(id), place.cta, place.offset.into()),
                MemPlace::Global(_, address) => (None, 0, address),
            };
            let old = self.word(at, place);
            before[lane] = old.into();
            self.poke(at, place, &change(old, src[lane] as u32).to_le_bytes());
            self.exchange_knowledge(at, key);
        }
        if let Some(dst) = dst {
            self.assign(at, dst, &before, active);
        }
    }

    /// Lets a relaxed atomic carry what an earlier fence released. A later fence acquires what the atomic has seen.
    fn exchange_knowledge(&mut self, at: At, key: (Option<u32>, usize, u64)) {
        let id = self.clusters[at.cluster].id;
        let warp = &mut self.clusters[at.cluster].ctas[at.cta].warps[at.warp];
        if let Some(flag) = self.flags.get(&key) {
            let seen = if key.0.is_some() { &mut warp.seen_in_cluster } else { &mut warp.seen };
            flag.acquire(id, seen);
        }
        let fenced = if key.0.is_some() { &warp.fenced } else { &warp.fenced_on_gpu };
        if let Some(fenced) = fenced {
            let mut released = Exported::default();
            released.add(id, fenced);
            self.flags.entry(key).or_default().join(&released);
        }
    }
}

/// Result of an atomic in memory. In global memory, additions `flush` subnormals to zero.
fn apply(op: AtomicOp, flush: bool, old: u32, src: u32) -> u32 {
    let float = |bits| if flush { flushed(f32::from_bits(bits)) } else { f32::from_bits(bits) };
    match op {
        AtomicOp::AddU32 => old.wrapping_add(src),
        AtomicOp::AddF32 => {
            let sum = canonical(float(old) + float(src));
            float(sum.to_bits()).to_bits()
        }
        AtomicOp::MaxU32 => old.max(src),
        AtomicOp::IncU32 if old < src => old + 1,
        AtomicOp::IncU32 => 0,
        AtomicOp::ExchangeB32 => src,
    }
}

/// Zero for a subnormal number.
fn flushed(x: f32) -> f32 {
    if x.is_subnormal() { 0.0f32.copysign(x) } else { x }
}
