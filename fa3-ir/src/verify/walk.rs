//! Rules about statements, checked by one walk in the order of the text: V-1 to V-12, V-14, V-21, V-22.

use std::fmt::Display;
use std::ops::Range;

use super::{Fault, VerifyError};
use crate::{
    Access, Barrier, Block, Condition, Inst, Kernel, MbarrierInst, Node, Operand, Param, ParamKind,
    RegionKind, SharedAddr, SharedBase, Source, Stmt, TensorMap, Ty, Value, ValueInfo,
};

/// All violations of these rules.
pub(super) fn check(kernel: &Kernel) -> Vec<VerifyError> {
    let mut walk = Walk {
        kernel,
        errors: Vec::new(),
        known: vec![false; kernel.values.len()],
        assigned: vec![false; kernel.values.len()],
        loops: Vec::new(),
        divergence: 0,
        warps: 0..kernel.launch.warps(),
        source: None,
    };
    // The prologue is a block whose values every role sees: they stay visible.
    walk.statements(&kernel.prologue);
    let after_prologue = walk.known.clone();
    for role in &kernel.roles {
        walk.known.clone_from(&after_prologue);
        walk.warps = role.warps.clone();
        walk.statements(&role.block);
    }
    walk.errors
}

/// A loop around the current statement.
struct LoopState {
    /// Number of branches around the loop that lanes may take differently.
    divergence: u32,
    /// The values and variables that are known at each of the loop's breaks.
    exits: Vec<Vec<bool>>,
}

struct Walk<'k> {
    kernel: &'k Kernel,
    errors: Vec<VerifyError>,
    /// The values that the current statement may read, and the variables that are assigned on every path to it.
    known: Vec<bool>,
    /// The values that some earlier instruction assigns.
    assigned: Vec<bool>,
    loops: Vec<LoopState>,
    /// Number of branches around the current statement that lanes may take differently.
    divergence: u32,
    /// The warps that run the current statement.
    warps: Range<u32>,
    source: Option<Source>,
}

impl<'k> Walk<'k> {
    fn fault(&mut self, fault: Fault) {
        self.errors.push(VerifyError { fault, source: self.source });
    }

    fn statements(&mut self, block: &Block) {
        for stmt in block {
            self.source = Some(stmt.source);
            self.stmt(stmt);
        }
    }

    fn stmt(&mut self, stmt: &Stmt) {
        match &stmt.node {
            Node::Inst { guard, inst } => self.inst(*guard, inst),
            Node::If { condition, uniform, then, otherwise } => {
                self.read_condition(*condition);
                self.divergence += u32::from(!uniform);
                let before = self.known.clone();
                self.statements(then);
                let after_then = std::mem::replace(&mut self.known, before.clone());
                self.statements(otherwise);
                let after_otherwise = std::mem::replace(&mut self.known, before);
                self.join(&[after_then, after_otherwise]);
                self.divergence -= u32::from(!uniform);
            }
            Node::Loop { body } => {
                self.loops.push(LoopState { divergence: self.divergence, exits: Vec::new() });
                let before = self.known.clone();
                self.statements(body);
                self.known = before;
                let exits = self.loops.pop().map(|state| state.exits).unwrap_or_default();
                self.source = Some(stmt.source);
                if exits.is_empty() {
                    self.fault(Fault::EndlessLoop);
                }
                self.join(&exits);
            }
            Node::Break { condition } => {
                self.read_condition(*condition);
                let (known, divergence) = (self.known.clone(), self.divergence);
                match self.loops.last_mut() {
                    None => self.fault(Fault::BreakOutsideLoop),
                    Some(state) => {
                        state.exits.push(known);
                        if divergence > state.divergence {
                            self.fault(Fault::BreakDiverged);
                        }
                    }
                }
            }
        }
    }

    /// Marks the variables that are assigned on all of `ways` as known. Values defined on a way end with its block.
    fn join(&mut self, ways: &[Vec<bool>]) {
        for (index, info) in self.kernel.values.iter().enumerate() {
            if info.mutable && !ways.is_empty() && ways.iter().all(|way| way[index]) {
                self.known[index] = true;
            }
        }
    }

    fn inst(&mut self, guard: Option<Condition>, inst: &Inst) {
        if let Some(condition) = guard {
            self.read_condition(condition);
            if matches!(inst, Inst::Mbarrier(MbarrierInst::Wait { .. })) {
                self.fault(Fault::GuardedWait);
            }
        }
        if inst.is_collective() && (self.divergence > 0 || guard.is_some()) {
            self.fault(Fault::CollectiveDiverged);
        }
        let Range { start, end } = self.warps;
        if inst.is_warpgroup() && !(start.is_multiple_of(4) && end.is_multiple_of(4)) {
            self.fault(Fault::Warpgroup { start, end });
        }
        inst.visit(&mut |access| self.access(access, guard.is_some()));
    }

    fn access(&mut self, access: Access, guarded: bool) {
        match access {
            Access::Read(operand, ty) => self.read(operand, ty),
            Access::Write(value, ty) => self.write(value, ty, guarded),
            Access::Update(value, ty) => {
                self.read(Operand::Value(value), ty);
                self.write(value, ty, guarded);
            }
            Access::Shared { addr, bytes, align } => {
                self.shared(addr, bytes, align);
                self.data(addr, bytes);
            }
            Access::SharedBox { addr, map } => self.shared_box(addr, map),
            Access::Mbarrier { addr, arrivals } => self.mbarrier(addr, arrivals),
            Access::Param(param, ty) => self.param(param, ty),
            Access::TensorMap { map, coords } => self.tensor_map(map, coords),
            Access::Barrier(Barrier(index)) => {
                let count = self.kernel.barriers.len();
                if index as usize >= count {
                    self.fault(Fault::Unknown { what: "barrier", index, count });
                }
            }
            Access::Limit { what, given, min, max, multiple } => {
                if !(min..=max).contains(&given) || !given.is_multiple_of(multiple) {
                    self.fault(Fault::Limit { what, given, min, max, multiple });
                }
            }
            Access::Count { what, given, expected } => {
                if given != expected {
                    self.fault(Fault::Count { what, given, expected });
                }
            }
            Access::Vector { width, ty } => {
                if ![1, 2, 4].contains(&width) || width as u32 * ty.bytes() > 16 {
                    self.fault(Fault::Vector { width, ty });
                }
            }
            Access::Constant(op) => self.fault(Fault::Constant { op }),
            Access::MajorOf8Bit => self.fault(Fault::MajorOf8Bit),
        }
    }

    fn read_condition(&mut self, condition: Condition) {
        self.read(Operand::Value(condition.pred), Ty::Pred);
    }

    fn read(&mut self, operand: Operand, expected: Ty) {
        match operand {
            Operand::Imm(imm) => self.check_type(format_args!("constant {imm:?}"), imm.ty(), expected),
            Operand::Value(value) => {
                let Some(info) = self.info(value) else { return };
                self.check_type(value, info.ty, expected);
                if !self.known[value.0 as usize] {
                    let fault =
                        if info.mutable { Fault::Unassigned { value } } else { Fault::NotVisible { value } };
                    self.fault(fault);
                }
            }
        }
    }

    fn write(&mut self, value: Value, expected: Ty, guarded: bool) {
        let Some(info) = self.info(value) else { return };
        self.check_type(value, info.ty, expected);
        let index = value.0 as usize;
        if !info.mutable && self.assigned[index] {
            self.fault(Fault::AssignedTwice { value });
        }
        self.assigned[index] = true;
        self.known[index] |= !(info.mutable && guarded);
    }

    fn check_type(&mut self, operand: impl Display, given: Ty, expected: Ty) {
        if given != expected {
            self.fault(Fault::Type { operand: operand.to_string(), given, expected });
        }
    }

    fn info(&mut self, value: Value) -> Option<&'k ValueInfo> {
        let info = self.kernel.values.get(value.0 as usize);
        if info.is_none() {
            let count = self.kernel.values.len();
            self.fault(Fault::Unknown { what: "value", index: value.0, count });
        }
        info
    }

    /// Checks V-21 for `bytes` bytes at an address.
    fn shared(&mut self, addr: SharedAddr, bytes: u32, align: u32) {
        let SharedBase::Region(region) = addr.base else { return };
        let Some(info) = self.kernel.smem.get(region) else {
            let count = self.kernel.smem.regions.len();
            return self.fault(Fault::Unknown { what: "region", index: region.0, count });
        };
        let (start, end) = (i64::from(addr.offset), i64::from(addr.offset) + i64::from(bytes));
        if start < 0 || end > i64::from(info.bytes) {
            self.fault(Fault::OutsideRegion { region: info.name.clone(), start, end, size: info.bytes });
        }
        if align > 0 && (i64::from(info.offset) + start) % i64::from(align) != 0 {
            self.fault(Fault::Misaligned { region: info.name.clone(), offset: addr.offset, align });
        }
    }

    /// Checks V-21 for a tensor copy. V-10 checks that the map is a tensor map.
    fn shared_box(&mut self, addr: SharedAddr, TensorMap(Param(index)): TensorMap) {
        if let Some(ParamKind::TensorMap(shape)) =
            self.kernel.params.get(index as usize).map(|param| param.kind)
        {
            self.shared(addr, shape.bytes(), 128);
            self.data(addr, shape.bytes());
        }
    }

    /// Checks V-22 for an instruction that is no mbarrier operation.
    fn data(&mut self, addr: SharedAddr, bytes: u32) {
        let SharedBase::Region(region) = addr.base else { return };
        let Some(info) = self.kernel.smem.get(region) else { return };
        if bytes > 0 && matches!(info.kind, RegionKind::Mbarriers { .. }) {
            let region = info.name.clone();
            self.fault(Fault::DataOnMbarrier { region });
        }
    }

    /// Checks V-22 for an mbarrier operation.
    fn mbarrier(&mut self, addr: SharedAddr, arrivals: Option<u32>) {
        self.shared(addr, 8, 8);
        let SharedBase::Region(region) = addr.base else { return };
        let Some(info) = self.kernel.smem.get(region) else { return };
        let region = info.name.clone();
        match (info.kind, arrivals) {
            (RegionKind::Bytes, _) => self.fault(Fault::NoMbarrier { region }),
            (RegionKind::Mbarriers { arrivals: declared }, Some(given)) if given != declared => {
                self.fault(Fault::Arrivals { region, given, declared });
            }
            (RegionKind::Mbarriers { .. }, _) => {}
        }
    }

    fn param(&mut self, Param(index): Param, ty: Ty) {
        let Some(info) = self.kernel.params.get(index as usize) else {
            let count = self.kernel.params.len();
            return self.fault(Fault::Unknown { what: "parameter", index, count });
        };
        let given = match info.kind {
            ParamKind::U32 => Ty::B32,
            ParamKind::U64 | ParamKind::Pointer(_) => Ty::B64,
            ParamKind::F32 => Ty::F32,
            ParamKind::TensorMap(_) => {
                let param = info.name.clone();
                return self.fault(Fault::ParamKind { param, expected: "number" });
            }
        };
        self.check_type(format_args!("parameter {}", info.name), given, ty);
    }

    /// Checks V-10 for a copy with `coords` coordinates.
    fn tensor_map(&mut self, TensorMap(Param(index)): TensorMap, coords: Option<usize>) {
        let Some(info) = self.kernel.params.get(index as usize) else {
            let count = self.kernel.params.len();
            return self.fault(Fault::Unknown { what: "parameter", index, count });
        };
        let param = info.name.clone();
        match info.kind {
            ParamKind::TensorMap(shape) => match coords {
                Some(coords) if coords != shape.rank() as usize => {
                    self.fault(Fault::Rank { param, coords, rank: shape.rank() });
                }
                Some(_) | None => {}
            },
            ParamKind::U32 | ParamKind::U64 | ParamKind::F32 | ParamKind::Pointer(_) => {
                self.fault(Fault::ParamKind { param, expected: "tensor map" });
            }
        }
    }
}
