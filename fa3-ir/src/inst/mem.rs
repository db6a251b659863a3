//! Loads, stores, atomics, and copies of 16 bytes that bypass registers (cp.async).

use crate::inst::Access;
use crate::lang::{Arg, B32, Builder, Class, F32, Stored, V, Var};
use crate::names::Names;
use crate::{Address, GlobalAddr, Inst, Operand, Param, SharedAddr, Ty, Value};

/// How a load treats caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cache {
    /// Memory that this kernel may write.
    Coherent,
    /// Global memory that is not written while the kernel runs (`.nc`).
    ReadOnly,
}

/// The operation of an atomic on memory m with the operand a. All atomics are relaxed and GPU-scoped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AtomicOp {
    /// m + a, integers of 32 bits.
    AddU32,
    /// m + a, binary32. Subnormals are flushed in global memory and kept in shared memory.
    AddF32,
    /// The unsigned maximum of m and a.
    MaxU32,
    /// 0 if m ≥ a, else m + 1.
    IncU32,
    /// a, which replaces m.
    ExchangeB32,
}

impl AtomicOp {
    /// The class of m and a.
    pub const fn ty(self) -> Ty {
        match self {
            AtomicOp::AddF32 => Ty::F32,
            AtomicOp::AddU32 | AtomicOp::MaxU32 | AtomicOp::IncU32 | AtomicOp::ExchangeB32 => Ty::B32,
        }
    }

    const fn ptx(self) -> &'static str {
        match self {
            AtomicOp::AddU32 => "add.u32",
            AtomicOp::AddF32 => "add.f32",
            AtomicOp::MaxU32 => "max.u32",
            AtomicOp::IncU32 => "inc.u32",
            AtomicOp::ExchangeB32 => "exch.b32",
        }
    }
}

/// Loads, stores, atomics, cp.async.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are the operands of the PTX instruction that the variant names")]
pub enum MemInst {
    /// `ld.param`.
    LoadParam { dst: Value, param: Param, ty: Ty },
    /// `ld.{global,shared}`, of 1, 2 or 4 elements.
    Load { dst: Vec<Value>, ty: Ty, addr: Address, cache: Cache },
    /// `st.{global,shared}`, of 1, 2 or 4 elements.
    Store { src: Vec<Operand>, ty: Ty, addr: Address },
    /// `ld.acquire.gpu.global.b32`.
    LoadAcquire { dst: Value, addr: GlobalAddr },
    /// `st.release.gpu.global.b32`.
    StoreRelease { src: Operand, addr: GlobalAddr },
    /// `atom`: returns the old value.
    Atomic { op: AtomicOp, dst: Value, addr: Address, src: Operand },
    /// `red.add`: an addition without a result.
    ReduceAdd { ty: Ty, addr: Address, src: Operand },
    /// `prefetch.global.L2`: prefetches the line of an address to L2.
    Prefetch { addr: GlobalAddr },
    /// `cp.async.cg`: copies 16 bytes, of which the first `src_bytes` are read and the others are zero.
    CopyAsync { dst: SharedAddr, src: GlobalAddr, src_bytes: Operand },
    /// `cp.async.commit_group`.
    CopyAsyncCommit,
    /// `cp.async.wait_group`: waits until at most `pending` groups are unfinished.
    CopyAsyncWait { pending: u32 },
}

impl MemInst {
    pub(crate) fn visit(&self, see: &mut dyn FnMut(Access)) {
        match self {
            MemInst::LoadParam { dst, param, ty } => {
                see(Access::Param(*param, *ty));
                see(Access::Write(*dst, *ty));
            }
            MemInst::Load { dst, ty, addr, cache: _ } => {
                let bytes = ty.bytes() * dst.len() as u32;
                see(Access::Vector { width: dst.len(), ty: *ty });
                addr.visit(bytes, bytes, see);
                dst.iter().for_each(|&value| see(Access::Write(value, *ty)));
            }
            MemInst::Store { src, ty, addr } => {
                let bytes = ty.bytes() * src.len() as u32;
                see(Access::Vector { width: src.len(), ty: *ty });
                addr.visit(bytes, bytes, see);
                src.iter().for_each(|&operand| see(Access::Read(operand, *ty)));
            }
            MemInst::LoadAcquire { dst, addr } => {
                addr.visit(see);
                see(Access::Write(*dst, Ty::B32));
            }
            MemInst::StoreRelease { src, addr } => {
                addr.visit(see);
                see(Access::Read(*src, Ty::B32));
            }
            MemInst::Atomic { op, dst, addr, src } => {
                addr.visit(4, 4, see);
                see(Access::Read(*src, op.ty()));
                see(Access::Write(*dst, op.ty()));
            }
            MemInst::ReduceAdd { ty, addr, src } => {
                addr.visit(4, 4, see);
                see(Access::Read(*src, *ty));
            }
            MemInst::Prefetch { addr } => addr.visit(see),
            MemInst::CopyAsync { dst, src, src_bytes } => {
                dst.visit(16, 16, see);
                src.visit(see);
                see(Access::Read(*src_bytes, Ty::B32));
                if let Some(given) = src_bytes.constant() {
                    see(Access::Limit { what: "cp.async source bytes", given, min: 0, max: 16, multiple: 1 });
                }
            }
            MemInst::CopyAsyncCommit | MemInst::CopyAsyncWait { .. } => {}
        }
    }

    pub(crate) fn text(&self, names: &Names) -> String {
        let address = |addr: &Address| match *addr {
            Address::Shared(addr) => names.shared(addr),
            Address::Global(addr) => names.global(addr),
        };
        match self {
            MemInst::LoadParam { dst, param, ty } => {
                format!("ld.param.{ty} {}, [{}]", names.value(*dst), names.param(*param))
            }
            MemInst::Load { dst, ty, addr, cache } => {
                let cache = if *cache == Cache::ReadOnly { ".nc" } else { "" };
                let dst: Vec<Operand> = dst.iter().map(|&value| Operand::Value(value)).collect();
                let (width, to) = (width(dst.len()), names.vector(&dst));
                format!("ld.{}{cache}{width}.{ty} {to}, {}", addr.space(), address(addr))
            }
            MemInst::Store { src, ty, addr } => {
                let (width, from) = (width(src.len()), names.vector(src));
                format!("st.{}{width}.{ty} {}, {from}", addr.space(), address(addr))
            }
            MemInst::LoadAcquire { dst, addr } => {
                format!("ld.acquire.gpu.global.b32 {}, {}", names.value(*dst), names.global(*addr))
            }
            MemInst::Prefetch { addr } => format!("prefetch.global.L2 {}", names.global(*addr)),
            MemInst::StoreRelease { src, addr } => {
                format!("st.release.gpu.global.b32 {}, {}", names.global(*addr), names.operand(*src))
            }
            MemInst::Atomic { op, dst, addr, src } => {
                let (dst, src) = (names.value(*dst), names.operand(*src));
                format!("atom.relaxed.gpu.{}.{} {dst}, {}, {src}", addr.space(), op.ptx(), address(addr))
            }
            MemInst::ReduceAdd { ty, addr, src } => {
                let ty = if *ty == Ty::F32 { "f32" } else { "u32" };
                let src = names.operand(*src);
                format!("red.relaxed.gpu.{}.add.{ty} {}, {src}", addr.space(), address(addr))
            }
            MemInst::CopyAsync { dst, src, src_bytes } => {
                let (dst, src) = (names.shared(*dst), names.global(*src));
                format!("cp.async.cg.shared.global {dst}, {src}, 16, {}", names.operand(*src_bytes))
            }
            MemInst::CopyAsyncCommit => "cp.async.commit_group".to_owned(),
            MemInst::CopyAsyncWait { pending } => format!("cp.async.wait_group {pending}"),
        }
    }
}

fn width(elements: usize) -> String {
    if elements == 1 { String::new() } else { format!(".v{elements}") }
}

/// Loads and stores. The type of the address gives the state space: 64-bit registers address global memory, 32-bit
/// registers and regions shared memory.
impl Builder {
    /// Loads one element.
    #[track_caller]
    pub fn load<T: Stored>(&self, addr: impl Into<Address>) -> V<'_, T> {
        let [value] = self.load_vector(addr);
        value
    }

    /// Loads `N` consecutive elements: 1, 2 or 4, at most 16 bytes, aligned to their size.
    #[track_caller]
    pub fn load_vector<T: Stored, const N: usize>(&self, addr: impl Into<Address>) -> [V<'_, T>; N] {
        self.load_from(addr.into(), Cache::Coherent)
    }

    /// Loads like [`Builder::load_vector`], to variables, so that a guard decides whether they keep their contents.
    #[track_caller]
    pub fn load_vector_to<T: Stored, const N: usize>(&self, to: [Var<'_, T>; N], addr: impl Into<Address>) {
        let dst = to.map(Var::register).to_vec();
        self.push(Inst::Mem(MemInst::Load { dst, ty: T::TY, addr: addr.into(), cache: Cache::Coherent }));
    }

    /// Loads `N` elements of global memory that is not written while the kernel runs.
    #[track_caller]
    pub fn load_read_only<T: Stored, const N: usize>(&self, addr: impl Into<GlobalAddr>) -> [V<'_, T>; N] {
        self.load_from(Address::Global(addr.into()), Cache::ReadOnly)
    }

    #[track_caller]
    fn load_from<T: Stored, const N: usize>(&self, addr: Address, cache: Cache) -> [V<'_, T>; N] {
        let dst = [(); N].map(|()| self.define(T::TY));
        self.push(Inst::Mem(MemInst::Load { dst: dst.to_vec(), ty: T::TY, addr, cache }));
        dst.map(|value| V::new(self, value))
    }

    /// Stores one element.
    #[track_caller]
    pub fn store<T: Stored>(&self, addr: impl Into<Address>, src: impl Arg<Ty = T>) {
        self.store_vector(addr, [src]);
    }

    /// Stores `N` consecutive elements: 1, 2 or 4, at most 16 bytes, aligned to their size.
    #[track_caller]
    pub fn store_vector<T: Stored, const N: usize>(
        &self,
        addr: impl Into<Address>,
        src: [impl Arg<Ty = T>; N],
    ) {
        let src = src.map(Arg::operand).to_vec();
        self.push(Inst::Mem(MemInst::Store { src, ty: T::TY, addr: addr.into() }));
    }

    /// Prefetches the cache line of an address to L2, and loads no register.
    #[track_caller]
    pub fn prefetch(&self, addr: impl Into<GlobalAddr>) {
        self.push(Inst::Mem(MemInst::Prefetch { addr: addr.into() }));
    }

    /// Loads 32 bits with acquire semantics on the whole GPU: writes that came before the matching release are visible.
    #[track_caller]
    pub fn load_acquire(&self, addr: impl Into<GlobalAddr>) -> V<'_, B32> {
        self.result(|dst| Inst::Mem(MemInst::LoadAcquire { dst, addr: addr.into() }))
    }

    /// Stores 32 bits with release semantics: a thread that acquires these bits also sees this thread's earlier writes.
    #[track_caller]
    pub fn store_release(&self, addr: impl Into<GlobalAddr>, src: impl Arg<Ty = B32>) {
        self.push(Inst::Mem(MemInst::StoreRelease { src: src.operand(), addr: addr.into() }));
    }

    #[track_caller]
    fn atomic<T: Class>(&self, op: AtomicOp, addr: impl Into<Address>, src: impl Arg<Ty = T>) -> V<'_, T> {
        self.result(|dst| Inst::Mem(MemInst::Atomic { op, dst, addr: addr.into(), src: src.operand() }))
    }

    /// Adds integers in memory and returns the old value.
    #[track_caller]
    pub fn atomic_add_u32(&self, addr: impl Into<Address>, src: impl Arg<Ty = B32>) -> V<'_, B32> {
        self.atomic(AtomicOp::AddU32, addr, src)
    }

    /// Adds binary32 numbers in memory and returns the old value.
    #[track_caller]
    pub fn atomic_add_f32(&self, addr: impl Into<Address>, src: impl Arg<Ty = F32>) -> V<'_, F32> {
        self.atomic(AtomicOp::AddF32, addr, src)
    }

    /// Takes the unsigned maximum in memory and returns the old value.
    #[track_caller]
    pub fn atomic_max_u32(&self, addr: impl Into<Address>, src: impl Arg<Ty = B32>) -> V<'_, B32> {
        self.atomic(AtomicOp::MaxU32, addr, src)
    }

    /// Increments the number in memory, from `last` back to 0, and returns the old value.
    #[track_caller]
    pub fn atomic_inc_u32(&self, addr: impl Into<Address>, last: impl Arg<Ty = B32>) -> V<'_, B32> {
        self.atomic(AtomicOp::IncU32, addr, last)
    }

    /// Exchanges with memory and returns the old value.
    #[track_caller]
    pub fn atomic_exchange(&self, addr: impl Into<Address>, src: impl Arg<Ty = B32>) -> V<'_, B32> {
        self.atomic(AtomicOp::ExchangeB32, addr, src)
    }

    /// Adds integers in memory.
    #[track_caller]
    pub fn reduce_add_u32(&self, addr: impl Into<Address>, src: impl Arg<Ty = B32>) {
        self.push(Inst::Mem(MemInst::ReduceAdd { ty: Ty::B32, addr: addr.into(), src: src.operand() }));
    }

    /// Adds binary32 numbers in memory.
    #[track_caller]
    pub fn reduce_add_f32(&self, addr: impl Into<Address>, src: impl Arg<Ty = F32>) {
        self.push(Inst::Mem(MemInst::ReduceAdd { ty: Ty::F32, addr: addr.into(), src: src.operand() }));
    }

    /// Begins to copy 16 bytes to shared memory, through the generic proxy. The first `src_bytes` are read, the others
    /// become zero.
    #[track_caller]
    pub fn copy_async(
        &self,
        dst: impl Into<SharedAddr>,
        src: impl Into<GlobalAddr>,
        src_bytes: impl Arg<Ty = B32>,
    ) {
        let (dst, src, src_bytes) = (dst.into(), src.into(), src_bytes.operand());
        self.push(Inst::Mem(MemInst::CopyAsync { dst, src, src_bytes }));
    }

    /// Commits this thread's asynchronous copies since the last commit as a group.
    #[track_caller]
    pub fn copy_async_commit(&self) {
        self.push(Inst::Mem(MemInst::CopyAsyncCommit));
    }

    /// Waits until at most `pending` groups of this thread's asynchronous copies are unfinished.
    #[track_caller]
    pub fn copy_async_wait(&self, pending: u32) {
        self.push(Inst::Mem(MemInst::CopyAsyncWait { pending }));
    }
}
