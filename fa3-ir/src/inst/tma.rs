//! Copies by the tensor memory accelerator: boxes of tensors, and flat ranges.

use crate::inst::Access;
use crate::lang::{Arg, B16, B32, Builder};
use crate::names::Names;
use crate::{GlobalAddr, Inst, Operand, SharedAddr, TensorMap, Ty};

/// Options of a load to shared memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadOptions {
    /// The CTAs of the cluster that get the box, each at the same offset, as a 16-bit mask.
    pub multicast: Option<Operand>,
}

impl LoadOptions {
    /// Multicasts to the CTAs of `mask`.
    #[must_use]
    pub fn multicast(mask: impl Arg<Ty = B16>) -> LoadOptions {
        LoadOptions { multicast: Some(mask.operand()) }
    }
}

/// Tensor and bulk copies. Coordinates count elements, innermost dimension first.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are the operands of the PTX instruction that the variant names")]
pub enum TmaInst {
    /// `cp.async.bulk.tensor` from global to shared memory.
    Load { dst: SharedAddr, map: TensorMap, coords: Vec<Operand>, mbarrier: SharedAddr, options: LoadOptions },
    /// `cp.async.bulk.tensor` from shared to global memory.
    Store { map: TensorMap, coords: Vec<Operand>, src: SharedAddr },
    /// `cp.reduce.async.bulk.tensor.add` from shared to global memory.
    ReduceAdd { map: TensorMap, coords: Vec<Operand>, src: SharedAddr },
    /// `cp.async.bulk` from global to shared memory.
    BulkLoad { dst: SharedAddr, src: GlobalAddr, bytes: Operand, mbarrier: SharedAddr, options: LoadOptions },
    /// `cp.async.bulk` from shared to global memory.
    BulkStore { dst: GlobalAddr, src: SharedAddr, bytes: Operand },
    /// `cp.reduce.async.bulk.add.f32` from shared to global memory.
    BulkReduceAddF32 { dst: GlobalAddr, src: SharedAddr, bytes: Operand },
    /// `prefetch.tensormap`: prefetches a tensor map for the copies that read it.
    Prefetch { map: TensorMap },
    /// `cp.async.bulk.commit_group`.
    Commit,
    /// `cp.async.bulk.wait_group`: waits until at most `pending` groups are unfinished or, if `read`, still have to
    /// read shared memory.
    Wait { pending: u32, read: bool },
}

impl TmaInst {
    pub(crate) fn visit(&self, see: &mut dyn FnMut(Access)) {
        match self {
            TmaInst::Load { dst, map, coords, mbarrier, options } => {
                visit_tensor(*map, coords, see);
                visit_box(*dst, *map, see);
                visit_mbarrier(*mbarrier, see);
                options.visit(see);
            }
            TmaInst::Store { map, coords, src } | TmaInst::ReduceAdd { map, coords, src } => {
                visit_tensor(*map, coords, see);
                visit_box(*src, *map, see);
            }
            TmaInst::BulkLoad { dst, src, bytes, mbarrier, options } => {
                dst.visit(visit_bytes(*bytes, see), 16, see);
                src.visit(see);
                visit_mbarrier(*mbarrier, see);
                options.visit(see);
            }
            TmaInst::BulkStore { dst, src, bytes } | TmaInst::BulkReduceAddF32 { dst, src, bytes } => {
                src.visit(visit_bytes(*bytes, see), 16, see);
                dst.visit(see);
            }
            TmaInst::Prefetch { map } => see(Access::TensorMap { map: *map, coords: None }),
            TmaInst::Commit | TmaInst::Wait { .. } => {}
        }
    }

    pub(crate) fn text(&self, names: &Names) -> String {
        let tensor = |map: TensorMap, coords: &[Operand]| {
            format!("[{}, {}]", names.tensor_map(map), names.operands(coords))
        };
        match self {
            TmaInst::Load { dst, map, coords, mbarrier, options } => {
                let (suffix, operands) = options.text(names);
                let (rank, from) = (coords.len(), tensor(*map, coords));
                let (dst, mbarrier) = (names.shared(*dst), names.shared(*mbarrier));
                format!(
                    "cp.async.bulk.tensor.{rank}d.{TO_SHARED}{suffix} {dst}, {from}, {mbarrier}{operands}"
                )
            }
            TmaInst::Store { map, coords, src } => {
                let (rank, to, src) = (coords.len(), tensor(*map, coords), names.shared(*src));
                format!("cp.async.bulk.tensor.{rank}d.global.shared::cta.bulk_group {to}, {src}")
            }
            TmaInst::ReduceAdd { map, coords, src } => {
                let (rank, to, src) = (coords.len(), tensor(*map, coords), names.shared(*src));
                format!("cp.reduce.async.bulk.tensor.{rank}d.global.shared::cta.add.bulk_group {to}, {src}")
            }
            TmaInst::BulkLoad { dst, src, bytes, mbarrier, options } => {
                let (suffix, operands) = options.text(names);
                let (dst, src) = (names.shared(*dst), names.global(*src));
                let (bytes, mbarrier) = (names.operand(*bytes), names.shared(*mbarrier));
                format!("cp.async.bulk.{TO_SHARED}{suffix} {dst}, {src}, {bytes}, {mbarrier}{operands}")
            }
            TmaInst::BulkStore { dst, src, bytes } => {
                let (dst, src, bytes) = (names.global(*dst), names.shared(*src), names.operand(*bytes));
                format!("cp.async.bulk.global.shared::cta.bulk_group {dst}, {src}, {bytes}")
            }
            TmaInst::BulkReduceAddF32 { dst, src, bytes } => {
                let (dst, src, bytes) = (names.global(*dst), names.shared(*src), names.operand(*bytes));
                format!("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 {dst}, {src}, {bytes}")
            }
            TmaInst::Prefetch { map } => format!("prefetch.tensormap [{}]", names.tensor_map(*map)),
            TmaInst::Commit => "cp.async.bulk.commit_group".to_owned(),
            TmaInst::Wait { pending, read } => {
                format!("cp.async.bulk.wait_group{} {pending}", if *read { ".read" } else { "" })
            }
        }
    }
}

/// The coordinates of a box: a tuple of 2 to 5 operands of class [`B32`], innermost dimension first.
pub trait Coords {
    /// The operands.
    fn operands(self) -> Vec<Operand>;
}

macro_rules! coords {
    ($($($name:ident)+;)+) => {$(
        impl<$($name: Arg<Ty = B32>),+> Coords for ($($name,)+) {
            #[allow(non_snake_case, reason = "the type parameters name the fields")]
            fn operands(self) -> Vec<Operand> {
                let ($($name,)+) = self;
                vec![$($name.operand()),+]
            }
        }
    )+};
}

coords! {
    A B;
    A B C;
    A B C D;
    A B C D E;
}

/// The completion mechanism of loads to shared memory: an mbarrier counts their bytes.
const TO_SHARED: &str = "shared::cluster.global.mbarrier::complete_tx::bytes";

impl LoadOptions {
    fn visit(&self, see: &mut dyn FnMut(Access)) {
        self.multicast.iter().for_each(|&mask| see(Access::Read(mask, Ty::B16)));
    }

    /// Suffix of the mnemonic, and operand, that the options add.
    fn text(&self, names: &Names) -> (String, String) {
        self.multicast.map_or_else(Default::default, |mask| {
            (".multicast::cluster".to_owned(), format!(", {}", names.operand(mask)))
        })
    }
}

fn visit_tensor(map: TensorMap, coords: &[Operand], see: &mut dyn FnMut(Access)) {
    see(Access::TensorMap { map, coords: Some(coords.len()) });
    coords.iter().for_each(|&coord| see(Access::Read(coord, Ty::B32)));
}

fn visit_box(addr: SharedAddr, map: TensorMap, see: &mut dyn FnMut(Access)) {
    addr.visit_base(see);
    see(Access::SharedBox { addr, map });
}

fn visit_mbarrier(addr: SharedAddr, see: &mut dyn FnMut(Access)) {
    addr.visit_base(see);
    see(Access::Mbarrier { addr, arrivals: None });
}

/// Reports the number of bytes. Returns the number if it is constant, and 1 otherwise.
fn visit_bytes(bytes: Operand, see: &mut dyn FnMut(Access)) -> u32 {
    see(Access::Read(bytes, Ty::B32));
    let Some(given) = bytes.constant() else { return 1 };
    see(Access::Limit { what: "bulk copy bytes", given, min: 16, max: (1 << 20) - 16, multiple: 16 });
    given
}

/// Tensor and bulk copies. One thread issues each of them.
impl Builder {
    /// Begins to load a box of a tensor; `mbarrier` counts its bytes.
    #[track_caller]
    pub fn tma_load(
        &self,
        dst: impl Into<SharedAddr>,
        map: TensorMap,
        coords: impl Coords,
        mbarrier: impl Into<SharedAddr>,
        options: LoadOptions,
    ) {
        let (dst, coords, mbarrier) = (dst.into(), coords.operands(), mbarrier.into());
        self.push(Inst::Tma(TmaInst::Load { dst, map, coords, mbarrier, options }));
    }

    /// Begins to store a box of a tensor, in this thread's open bulk group.
    #[track_caller]
    pub fn tma_store(&self, map: TensorMap, coords: impl Coords, src: impl Into<SharedAddr>) {
        self.push(Inst::Tma(TmaInst::Store { map, coords: coords.operands(), src: src.into() }));
    }

    /// Begins to add a box to a tensor, in this thread's open bulk group.
    #[track_caller]
    pub fn tma_reduce_add(&self, map: TensorMap, coords: impl Coords, src: impl Into<SharedAddr>) {
        self.push(Inst::Tma(TmaInst::ReduceAdd { map, coords: coords.operands(), src: src.into() }));
    }

    /// Begins to load `bytes` bytes, a multiple of 16; `mbarrier` counts them.
    #[track_caller]
    pub fn bulk_load(
        &self,
        dst: impl Into<SharedAddr>,
        src: impl Into<GlobalAddr>,
        bytes: impl Arg<Ty = B32>,
        mbarrier: impl Into<SharedAddr>,
        options: LoadOptions,
    ) {
        let (dst, src, bytes, mbarrier) = (dst.into(), src.into(), bytes.operand(), mbarrier.into());
        self.push(Inst::Tma(TmaInst::BulkLoad { dst, src, bytes, mbarrier, options }));
    }

    /// Begins to store `bytes` bytes, a multiple of 16, in this thread's open bulk group.
    #[track_caller]
    pub fn bulk_store(
        &self,
        dst: impl Into<GlobalAddr>,
        src: impl Into<SharedAddr>,
        bytes: impl Arg<Ty = B32>,
    ) {
        let (dst, src, bytes) = (dst.into(), src.into(), bytes.operand());
        self.push(Inst::Tma(TmaInst::BulkStore { dst, src, bytes }));
    }

    /// Begins to add `bytes` bytes of binary32 numbers to global memory, in this thread's open bulk group.
    #[track_caller]
    pub fn bulk_reduce_add_f32(
        &self,
        dst: impl Into<GlobalAddr>,
        src: impl Into<SharedAddr>,
        bytes: impl Arg<Ty = B32>,
    ) {
        let (dst, src, bytes) = (dst.into(), src.into(), bytes.operand());
        self.push(Inst::Tma(TmaInst::BulkReduceAddF32 { dst, src, bytes }));
    }

    /// Prefetches a tensor map, so that the first copy that uses it waits less.
    #[track_caller]
    pub fn prefetch_tensor_map(&self, map: TensorMap) {
        self.push(Inst::Tma(TmaInst::Prefetch { map }));
    }

    /// Commits this thread's open bulk group.
    #[track_caller]
    pub fn bulk_commit(&self) {
        self.push(Inst::Tma(TmaInst::Commit));
    }

    /// Waits until at most `pending` of this thread's bulk groups are unfinished.
    #[track_caller]
    pub fn bulk_wait(&self, pending: u32) {
        self.push(Inst::Tma(TmaInst::Wait { pending, read: false }));
    }

    /// Waits until at most `pending` of this thread's bulk groups still have to read shared memory.
    #[track_caller]
    pub fn bulk_wait_read(&self, pending: u32) {
        self.push(Inst::Tma(TmaInst::Wait { pending, read: true }));
    }
}
