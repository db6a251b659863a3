//! The builder: Rust functions call its methods, and the kernel grows statement by statement.

use std::fmt::Display;
use std::ops::Range;
use std::panic::Location;

use crate::watch::Watch;
use crate::{
    Arg, B32, B64, Barrier, BarrierInfo, Block, BoxShape, Class, Condition, Elem, F32, Fault, Inst, Kernel,
    LaneOp, Launch, MemInst, Node, Param, ParamInfo, ParamKind, Pred, Reg, Region, RegionKind, Role,
    RoleBody, SmemPlan, Source, Stmt, Ty, V, Value, ValueInfo, Var,
};

/// A parameter that is a tensor map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TensorMap(pub Param);

/// Builds one [`Kernel`].
///
/// What is built outside [`Builder::role`] is the prologue, which every warp runs. Methods of the instruction
/// families append one instruction each; the methods here declare things and build control flow.
#[derive(Debug)]
pub struct Builder {
    kernel: Kernel,
    /// The block that statements are appended to.
    block: Block,
    /// Whether that is the prologue itself.
    at_top: bool,
    /// The warps that run it.
    warps: Range<u32>,
    /// The line of the kernel that is being served, when the floor above builds several statements for it.
    source: Option<Source>,
    /// What must still be done, and what is in flight.
    pub(crate) watch: Watch,
}

/// Declarations.
impl Builder {
    /// An empty kernel.
    pub fn new(name: &str, launch: Launch) -> Builder {
        let kernel = Kernel {
            name: name.to_owned(),
            launch,
            params: Vec::new(),
            values: Vec::new(),
            smem: SmemPlan::default(),
            barriers: Vec::new(),
            prologue: Block::new(),
            roles: Vec::new(),
            misuse: Vec::new(),
        };
        Builder {
            kernel,
            block: Block::new(),
            at_top: true,
            warps: 0..launch.warps(),
            source: None,
            watch: Watch::new(),
        }
    }

    /// The kernel, not yet verified: [`crate::verify()`] or [`crate::ptx::emit`] say whether it is sound.
    pub fn finish(mut self) -> Kernel {
        self.kernel.prologue = self.block;
        self.kernel.misuse = self.watch.finish();
        self.kernel
    }

    fn param(&mut self, name: &str, kind: ParamKind) -> Param {
        self.kernel.params.push(ParamInfo { name: name.to_owned(), kind });
        Param(self.kernel.params.len() as u32 - 1)
    }

    #[track_caller]
    fn loaded_param<T: Class>(&mut self, name: &str, kind: ParamKind) -> V<T> {
        let param = self.param(name, kind);
        let dst = self.define(T::TY);
        self.push(Inst::Mem(MemInst::LoadParam { dst, param, ty: T::TY }));
        self.name(V::new(dst), name)
    }

    /// Declares a parameter of 32 bits and loads it.
    #[track_caller]
    pub fn param_u32(&mut self, name: &str) -> V<B32> {
        self.loaded_param(name, ParamKind::U32)
    }

    /// Declares a parameter of 64 bits and loads it.
    #[track_caller]
    pub fn param_u64(&mut self, name: &str) -> V<B64> {
        self.loaded_param(name, ParamKind::U64)
    }

    /// Declares a binary32 parameter and loads it.
    #[track_caller]
    pub fn param_f32(&mut self, name: &str) -> V<F32> {
        self.loaded_param(name, ParamKind::F32)
    }

    /// Declares a parameter that is the address of an array in global memory, and loads it.
    #[track_caller]
    pub fn param_pointer(&mut self, name: &str, elem: Elem) -> V<B64> {
        self.loaded_param(name, ParamKind::Pointer(elem))
    }

    /// Declares a parameter that is a tensor map, whose copies move boxes of this shape.
    pub fn param_tensor_map(&mut self, name: &str, shape: BoxShape) -> TensorMap {
        TensorMap(self.param(name, ParamKind::TensorMap(shape)))
    }

    /// Declares `bytes` of shared memory, aligned to `align`.
    pub fn region(&mut self, name: &str, bytes: u32, align: u32) -> Region {
        self.kernel.smem.append(name, bytes, align, RegionKind::Bytes)
    }

    /// Declares a region that begins where the first of `over` does and may share bytes with all of them.
    pub fn overlay(&mut self, name: &str, over: &[Region], bytes: u32, align: u32) -> Region {
        self.kernel.smem.overlay(name, over, bytes, align)
    }

    /// Declares `count` mbarriers, 8 bytes each, to be initialised for `arrivals` a phase.
    pub fn mbarriers(&mut self, name: &str, count: u32, arrivals: u32) -> Region {
        self.kernel.smem.append(name, count.saturating_mul(8), 8, RegionKind::Mbarriers { arrivals })
    }

    /// Declares a named barrier of `threads` threads; numbers are given from 1 on.
    pub fn barrier(&mut self, name: &str, threads: u32) -> Barrier {
        let id = self.kernel.barriers.len() as u32 + 1;
        self.kernel.barriers.push(BarrierInfo { name: name.to_owned(), id, threads });
        Barrier(id - 1)
    }

    /// Declares `count` named barriers of `threads` threads; gives the first one's hardware number, to compute with.
    pub fn barriers(&mut self, name: &str, count: u32, threads: u32) -> u32 {
        let first = self.kernel.barriers.len() as u32 + 1;
        (0..count).for_each(|index| _ = self.barrier(&format!("{name} {index}"), threads));
        first
    }

    /// The hardware number of a named barrier, to compute with.
    pub fn barrier_id(&self, barrier: Barrier) -> u32 {
        barrier.0 + 1
    }

    /// Names a value in the printed kernel.
    pub fn name<T: Class>(&mut self, value: V<T>, name: &str) -> V<T> {
        // A value of another kernel is V-5's matter.
        if let Some(info) = self.kernel.values.get_mut(value.value().0 as usize) {
            info.name = Some(name.to_owned());
        }
        value
    }

    /// The address of a region, in a register.
    #[track_caller]
    pub fn address(&mut self, region: Region) -> V<B32> {
        let dst = self.define(Ty::B32);
        self.push(Inst::RegionAddress { dst, region });
        V::new(dst)
    }
}

/// Variables: registers that may be assigned again.
impl Builder {
    /// A variable that holds `initial`.
    #[track_caller]
    pub fn var<T: Class>(&mut self, name: &str, initial: impl Arg<Ty = T>) -> Var<T> {
        let var = self.uninitialised(name);
        self.set(var, initial);
        var
    }

    /// A variable that holds nothing yet.
    pub fn uninitialised<T: Class>(&mut self, name: &str) -> Var<T> {
        Var::new(self.register(ValueInfo { ty: T::TY, name: Some(name.to_owned()), mutable: true }))
    }

    /// Variables that hold nothing yet: an accumulator.
    pub fn accumulator(&mut self, name: &str, registers: u32) -> Vec<Var<F32>> {
        (0..registers).map(|_| self.uninitialised(name)).collect()
    }

    /// What the variable holds now.
    #[track_caller]
    pub fn get<T: Class>(&mut self, var: Var<T>) -> V<T> {
        let copy = match T::TY {
            Ty::Pred => LaneOp::MovPred,
            Ty::B16 => LaneOp::MovB16,
            Ty::B32 => LaneOp::MovB32,
            Ty::B64 => LaneOp::MovB64,
            Ty::F32 => LaneOp::MovF32,
        };
        self.lane_value(copy, vec![var.operand()])
    }

    /// Assigns to a variable.
    #[track_caller]
    pub fn set<T: Class>(&mut self, var: Var<T>, src: impl Arg<Ty = T>) {
        self.push(Inst::Set { var: var.value(), ty: T::TY, src: src.operand() });
    }
}

/// Control flow.
impl Builder {
    /// Runs `then` where `condition` holds. All lanes of a warp agree on it.
    #[track_caller]
    pub fn if_uniform(&mut self, condition: impl Into<Condition>, then: impl FnOnce(&mut Builder)) {
        self.branch(condition.into(), true, then, |_| ());
    }

    /// Runs `then` where `condition` holds and `otherwise` elsewhere. All lanes of a warp agree on it.
    #[track_caller]
    pub fn if_else_uniform(
        &mut self,
        condition: impl Into<Condition>,
        then: impl FnOnce(&mut Builder),
        otherwise: impl FnOnce(&mut Builder),
    ) {
        self.branch(condition.into(), true, then, otherwise);
    }

    /// Runs `then` in the lanes where `condition` holds. Nothing in it may need the whole warp.
    #[track_caller]
    pub fn if_lanes(&mut self, condition: impl Into<Condition>, then: impl FnOnce(&mut Builder)) {
        self.branch(condition.into(), false, then, |_| ());
    }

    /// Runs `then` in the lanes where `condition` holds, `otherwise` in the others. Nothing in them may need the
    /// whole warp.
    #[track_caller]
    pub fn if_else_lanes(
        &mut self,
        condition: impl Into<Condition>,
        then: impl FnOnce(&mut Builder),
        otherwise: impl FnOnce(&mut Builder),
    ) {
        self.branch(condition.into(), false, then, otherwise);
    }

    #[track_caller]
    fn branch(
        &mut self,
        condition: Condition,
        uniform: bool,
        then: impl FnOnce(&mut Builder),
        otherwise: impl FnOnce(&mut Builder),
    ) {
        let (then, otherwise) = (self.block(then), self.block(otherwise));
        self.append(Node::If { condition, uniform, then, otherwise });
    }

    /// Predicates the instructions that `body` builds: only the lanes where `condition` holds execute them, and
    /// what they define is undefined in the others. A body with control flow becomes [`Builder::if_lanes`].
    #[track_caller]
    pub fn guarded(&mut self, condition: impl Into<Condition>, body: impl FnOnce(&mut Builder)) {
        let condition = self.kept(condition.into());
        let mut body = self.block(body);
        let predicable = |stmt: &Stmt| matches!(stmt.node, Node::Inst { guard: None, .. });
        if body.iter().all(predicable) {
            for stmt in &mut body {
                if let Node::Inst { guard, .. } = &mut stmt.node {
                    *guard = Some(condition);
                }
            }
            self.block.append(&mut body);
        } else {
            self.append(Node::If { condition, uniform: false, then: body, otherwise: Block::new() });
        }
    }

    /// The condition as it is now, also where the body assigns the variable that it came from.
    #[track_caller]
    fn kept(&mut self, condition: Condition) -> Condition {
        let mutable = self.kernel.values.get(condition.pred.0 as usize).is_some_and(|info| info.mutable);
        if !mutable {
            return condition;
        }
        Condition { pred: self.get(Var::<Pred>::new(condition.pred)).value(), ..condition }
    }

    /// Repeats `body` until a [`Builder::break_if`] in it.
    #[track_caller]
    pub fn repeat(&mut self, body: impl FnOnce(&mut Builder)) {
        let body = self.block(body);
        self.append(Node::Loop { body });
    }

    /// Leaves the innermost loop where `condition` holds. All lanes that run the loop agree on it.
    #[track_caller]
    pub fn break_if(&mut self, condition: impl Into<Condition>) {
        self.append(Node::Break { condition: condition.into() });
    }

    /// Runs `body` for the unsigned numbers `first`, `first + step`, ... below `end`, the same in all lanes. `step` must
    /// not be 0, `end` + `step` must be below 2³². What the body changes for the next round must be a variable.
    #[track_caller]
    pub fn for_each(
        &mut self,
        (first, end): (impl Arg<Ty = B32>, impl Arg<Ty = B32>),
        step: u32,
        body: impl FnOnce(&mut Builder, V<B32>),
    ) {
        let (served, here) = (self.source, Some(self.source.unwrap_or(Location::caller())));
        if step == 0 {
            self.fault(Fault::Limit {
                what: "the step of a loop",
                given: 0,
                min: 1,
                max: u32::MAX,
                multiple: 1,
            });
        }
        self.on_behalf_of(here, |b| {
            let next = b.var("next", first);
            b.repeat(|b| {
                let done = b.ge_u32(next, end);
                b.break_if(done);
                let index = b.get(next);
                b.on_behalf_of(served, |b| body(b, index));
                let after = b.add(index, step);
                b.set(next, after);
            });
        });
    }

    /// What the warps of `role` run after the prologue, with its registers.
    #[track_caller]
    pub fn role(&mut self, role: Role, body: impl FnOnce(&mut Builder)) {
        let source = Location::caller();
        if !self.at_top {
            self.watch.fault(Fault::RoleInside { role: role.name.clone() }, source);
        }
        let entry = self.kernel.launch.entry_registers();
        let everyone = std::mem::replace(&mut self.warps, role.warps.clone());
        let block = self.block(|b| {
            b.on_behalf_of(Some(source), |b| match role.registers {
                Some(registers) if registers < entry => b.set_max_registers_down(registers),
                Some(registers) if registers > entry => b.set_max_registers_up(registers),
                Some(_) | None => {}
            });
            body(b);
        });
        self.warps = everyone;
        self.kernel.roles.push(RoleBody { name: role.name, warps: role.warps, block, source });
    }

    /// How the kernel is launched.
    pub fn launch(&self) -> Launch {
        self.kernel.launch
    }

    /// The regions of mbarriers: how many, for how many arrivals.
    pub(crate) fn mbarrier_regions(&self) -> Vec<(Region, u32, u32)> {
        let regions = self.kernel.smem.regions.iter().zip(0..);
        let mbarriers = regions.filter_map(|(info, index)| match info.kind {
            RegionKind::Mbarriers { arrivals } => Some((Region(index), info.bytes / 8, arrivals)),
            RegionKind::Bytes => None,
        });
        mbarriers.collect()
    }

    /// The warps that run what is being built: those of the role, all of them in the prologue.
    pub(crate) fn warps(&self) -> Range<u32> {
        self.warps.clone()
    }

    /// What `build` appends, as a block of its own.
    fn block(&mut self, build: impl FnOnce(&mut Builder)) -> Block {
        let outer = std::mem::take(&mut self.block);
        let at_top = std::mem::replace(&mut self.at_top, false);
        let watched = self.watch.enter();
        build(self);
        self.watch.leave(watched);
        self.at_top = at_top;
        std::mem::replace(&mut self.block, outer)
    }
}

/// What the methods of the families are made of.
impl Builder {
    fn register(&mut self, info: ValueInfo) -> Value {
        self.kernel.values.push(info);
        Value(self.kernel.values.len() as u32 - 1)
    }

    /// A new value, to be defined by the next instruction.
    pub(crate) fn define(&mut self, ty: Ty) -> Value {
        self.register(ValueInfo { ty, name: None, mutable: false })
    }

    /// Appends an instruction.
    #[track_caller]
    pub(crate) fn push(&mut self, inst: Inst) {
        self.append(Node::Inst { guard: None, inst });
    }

    #[track_caller]
    fn append(&mut self, node: Node) {
        let source = self.source.unwrap_or(Location::caller());
        self.block.push(Stmt { node, source });
    }

    /// What `build` appends is the caller's doing: its line, or that of whom the caller serves, is the source.
    #[track_caller]
    pub(crate) fn as_one<R>(&mut self, build: impl FnOnce(&mut Builder) -> R) -> R {
        self.on_behalf_of(Some(self.source.unwrap_or(Location::caller())), build)
    }

    /// What `build` appends has this source; without one, each statement its own.
    pub(crate) fn on_behalf_of<R>(
        &mut self,
        source: Option<Source>,
        build: impl FnOnce(&mut Builder) -> R,
    ) -> R {
        let outer = std::mem::replace(&mut self.source, source);
        let result = build(self);
        self.source = outer;
        result
    }

    /// Notes a mistake of the caller, or of whom the caller serves.
    #[track_caller]
    pub(crate) fn fault(&mut self, fault: Fault) {
        self.watch.fault(fault, self.source.unwrap_or(Location::caller()));
    }

    /// Notes that `first` and `second` do not fit.
    #[track_caller]
    pub(crate) fn misfit(&mut self, what: &'static str, first: impl Display, second: impl Display) {
        self.fault(Fault::Shapes { what, first: first.to_string(), second: second.to_string() });
    }

    /// On whose behalf statements are appended now.
    pub(crate) fn served(&self) -> Option<Source> {
        self.source
    }
}
