//! Instructions: one file per family, each with its data, its operands, its PTX and its builder methods.

pub(crate) mod barrier;
pub(crate) mod cluster;
pub(crate) mod fence;
pub(crate) mod mbarrier;
pub(crate) mod mem;
pub(crate) mod misc;
pub(crate) mod observe;
pub(crate) mod special;
pub(crate) mod tma;
pub(crate) mod warp;
pub(crate) mod wgmma;

use std::collections::HashSet;

use crate::lane::LaneInst;
use crate::names::Names;
use crate::{
    Barrier, BarrierInst, ClusterInst, FenceInst, MbarrierInst, MemInst, MiscInst, ObserveInst, Operand,
    Param, Region, SharedAddr, Special, TensorMap, TmaInst, Ty, Value, WarpInst, WgmmaInst,
};

/// An instruction.
#[derive(Clone, Debug, PartialEq)]
pub enum Inst {
    /// A pure operation of each lane, from the table.
    Lane(LaneInst),
    /// Assigns to a variable.
    Set {
        /// The variable.
        var: Value,
        /// Its class.
        ty: Ty,
        /// The new value.
        src: Operand,
    },
    /// Reads a special register.
    Special {
        /// The result.
        dst: Value,
        /// The special register.
        register: Special,
    },
    /// The address of a region in shared memory.
    RegionAddress {
        /// The result, 32 bits.
        dst: Value,
        /// The region.
        region: Region,
    },
    /// Loads, stores, atomics, cp.async.
    Mem(MemInst),
    /// Exchange between the lanes of a warp.
    Warp(WarpInst),
    /// Named barriers.
    Barrier(BarrierInst),
    /// mbarriers.
    Mbarrier(MbarrierInst),
    /// Tensor and bulk copies.
    Tma(TmaInst),
    /// Warpgroup matrix products.
    Wgmma(WgmmaInst),
    /// Fences.
    Fence(FenceInst),
    /// Clusters.
    Cluster(ClusterInst),
    /// Register pool, dependent launches, trap.
    Misc(MiscInst),
    /// Probes and assertions, which PTX does not have.
    Observe(ObserveInst),
}

/// An effect of an instruction on one of its operands, as [`Inst::visit`] reports it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Access {
    /// Reads an operand of this class.
    Read(Operand, Ty),
    /// Assigns a value or a variable of this class.
    Write(Value, Ty),
    /// Reads a variable of this class and assigns it.
    Update(Value, Ty),
    /// Touches shared memory.
    Shared {
        /// The address.
        addr: SharedAddr,
        /// Bytes touched: 1 if only known at run time, 0 if the instruction only takes the address.
        bytes: u32,
        /// Alignment of the address.
        align: u32,
    },
    /// Touches the box of a tensor map in shared memory.
    SharedBox {
        /// The address.
        addr: SharedAddr,
        /// The map that defines the box.
        map: TensorMap,
    },
    /// Uses an mbarrier.
    Mbarrier {
        /// The address.
        addr: SharedAddr,
        /// The arrivals per phase, if the instruction initialises the mbarrier.
        arrivals: Option<u32>,
    },
    /// Loads a parameter into a register of this class.
    Param(Param, Ty),
    /// Uses a tensor map.
    TensorMap {
        /// The map.
        map: TensorMap,
        /// Number of coordinates, if the instruction takes some.
        coords: Option<usize>,
    },
    /// Uses a declared named barrier.
    Barrier(Barrier),
    /// Has a constant that PTX restricts.
    Limit {
        /// Name of the constant.
        what: &'static str,
        /// The constant.
        given: u32,
        /// The smallest that PTX allows.
        min: u32,
        /// The largest that PTX allows.
        max: u32,
        /// Number that divides the constant.
        multiple: u32,
    },
    /// Has a number of registers that its shape determines.
    Count {
        /// Name of the registers.
        what: &'static str,
        /// Number of registers that it has.
        given: usize,
        /// Number of registers that it needs.
        expected: usize,
    },
    /// Moves a vector of registers.
    Vector {
        /// Number of registers.
        width: usize,
        /// Their class.
        ty: Ty,
    },
    /// Has a constant where PTX takes a register.
    Constant(&'static str),
    /// Multiplies 8-bit operands of which one is not K-major.
    MajorOf8Bit,
}

impl Access {
    /// The register that the access reads or assigns, if any.
    pub const fn value(self) -> Option<Value> {
        let (Access::Read(Operand::Value(value), _) | Access::Write(value, _) | Access::Update(value, _)) =
            self
        else {
            return None;
        };
        Some(value)
    }
}

impl Inst {
    /// Reports every access, reads before writes.
    pub fn visit(&self, see: &mut dyn FnMut(Access)) {
        match self {
            Inst::Lane(inst) => inst.visit(see),
            Inst::Set { var, ty, src } => {
                see(Access::Read(*src, *ty));
                see(Access::Write(*var, *ty));
            }
            Inst::Special { dst, register } => see(Access::Write(*dst, register.ty())),
            Inst::RegionAddress { dst, region } => {
                see(Access::Shared { addr: region.at(0), bytes: 0, align: 1 });
                see(Access::Write(*dst, Ty::B32));
            }
            Inst::Mem(inst) => inst.visit(see),
            Inst::Warp(inst) => inst.visit(see),
            Inst::Barrier(inst) => inst.visit(see),
            Inst::Mbarrier(inst) => inst.visit(see),
            Inst::Tma(inst) => inst.visit(see),
            Inst::Wgmma(inst) => inst.visit(see),
            Inst::Fence(_) => {}
            Inst::Cluster(inst) => inst.visit(see),
            Inst::Misc(inst) => inst.visit(see),
            Inst::Observe(inst) => inst.visit(see),
        }
    }

    /// Whether all lanes may execute the instruction, guarded or not: it only computes a value from operands, none of
    /// which is in `undefined`.
    pub(crate) fn is_harmless(&self, undefined: &HashSet<Value>) -> bool {
        let mut defined = true;
        self.visit(&mut |access| {
            if let Access::Read(Operand::Value(value), _) = access {
                defined &= !undefined.contains(&value);
            }
        });
        defined && matches!(self, Inst::Lane(_) | Inst::Special { .. } | Inst::RegionAddress { .. })
    }

    /// Whether the instruction does nothing but define values.
    pub(crate) fn only_computes(&self) -> bool {
        matches!(
            self,
            Inst::Lane(_)
                | Inst::Special { .. }
                | Inst::RegionAddress { .. }
                | Inst::Mem(MemInst::LoadParam { .. } | MemInst::Load { .. })
                | Inst::Warp(
                    WarpInst::Shfl { .. }
                        | WarpInst::Vote { .. }
                        | WarpInst::Ballot { .. }
                        | WarpInst::Elect { .. }
                )
        )
    }

    /// Whether all lanes of a warp must execute the instruction together (`.aligned`, or a mask of all lanes).
    pub fn is_collective(&self) -> bool {
        match self {
            Inst::Warp(_) | Inst::Wgmma(_) | Inst::Barrier(_) => true,
            Inst::Cluster(inst) => inst.is_collective(),
            Inst::Misc(inst) => inst.is_collective(),
            Inst::Lane(_)
            | Inst::Set { .. }
            | Inst::Special { .. }
            | Inst::RegionAddress { .. }
            | Inst::Mem(_)
            | Inst::Mbarrier(_)
            | Inst::Tma(_)
            | Inst::Fence(_)
            | Inst::Observe(_) => false,
        }
    }

    /// Whether the four warps of a warpgroup must execute the instruction together.
    pub fn is_warpgroup(&self) -> bool {
        matches!(self, Inst::Wgmma(_) | Inst::Misc(MiscInst::SetMaxRegisters { .. }))
    }

    /// The instruction's line of text, without a guard and without the semicolon.
    pub(crate) fn text(&self, names: &Names) -> String {
        match self {
            Inst::Lane(inst) => inst.text(names),
            Inst::Set { var, ty, src } => {
                format!("mov.{ty} {}, {}", names.value(*var), names.operand(*src))
            }
            Inst::Special { dst, register } => {
                let ty = if register.ty() == Ty::B64 { "u64" } else { "u32" };
                format!("mov.{ty} {}, {}", names.value(*dst), register.ptx())
            }
            Inst::RegionAddress { dst, region } => names.region_address(*dst, *region),
            Inst::Mem(inst) => inst.text(names),
            Inst::Warp(inst) => inst.text(names),
            Inst::Barrier(inst) => inst.text(names),
            Inst::Mbarrier(inst) => inst.text(names),
            Inst::Tma(inst) => inst.text(names),
            Inst::Wgmma(inst) => inst.text(names),
            Inst::Fence(inst) => inst.ptx().to_owned(),
            Inst::Cluster(inst) => inst.text(names),
            Inst::Misc(inst) => inst.text(),
            Inst::Observe(inst) => inst.text(names),
        }
    }
}
