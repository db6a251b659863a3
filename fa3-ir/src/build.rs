//! The builder: Rust functions call its methods, and the kernel grows statement by statement.

mod guard;

use std::cell::{RefCell, RefMut};
use std::fmt::Display;
use std::ops::Range;
use std::panic::Location;

use crate::lang::{Arg, B32, B64, Class, F32, V, Var};
use crate::watch::Watch;
use crate::{
    Barrier, BarrierInfo, Block, BoxShape, Condition, Elem, Fault, Inst, Kernel, LaneOp, Launch, MemInst,
    Node, Param, ParamInfo, ParamKind, Region, RegionKind, Role, RoleBody, SmemPlan, Source, Stmt, Ty, Value,
    ValueInfo,
};

/// A parameter that is a tensor map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TensorMap(pub Param);

/// Builds one [`Kernel`]. [`Kernel::build`] passes it to the function that describes the kernel.
///
/// A builder is shared: values, variables, tiles and tokens hold a reference to it. Code that is built outside
/// [`Builder::role`] is the prologue, which every warp runs. Methods of the instruction families append one instruction
/// each; the methods here declare things and build control flow.
#[derive(Debug)]
pub struct Builder {
    state: RefCell<State>,
}

/// The kernel so far.
#[derive(Debug)]
struct State {
    kernel: Kernel,
    /// The block that statements are appended to.
    block: Block,
    /// Whether `block` is the prologue.
    at_top: bool,
    /// The warps that run `block`.
    warps: Range<u32>,
    /// The source line that statements are attributed to, while a method builds several statements for its caller.
    source: Option<Source>,
    /// Notes on tokens that must be given back, and on products in flight.
    watch: Watch,
    /// Whether [`Builder::once_per_warp`] also guards instructions without side effects.
    guards_all: bool,
}

/// A scope: until its end, statements are attributed to one source line. Dropping it restores `outer`.
#[must_use]
pub(crate) struct OnBehalf<'k> {
    builder: &'k Builder,
    outer: Option<Source>,
}

impl Drop for OnBehalf<'_> {
    fn drop(&mut self) {
        self.builder.state().source = self.outer;
    }
}

impl Kernel {
    /// The kernel that `body` builds, not yet verified: [`crate::verify()`] or [`crate::ptx::emit`]
    /// say whether it is sound.
    pub fn build(name: &str, launch: Launch, body: impl FnOnce(&Builder)) -> Kernel {
        let builder = Builder::new(name, launch);
        body(&builder);
        builder.finish()
    }
}

/// The parts of [`Kernel::build`] that do not depend on the body, and so are compiled once.
impl Builder {
    fn new(name: &str, launch: Launch) -> Builder {
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
        let (block, watch) = (Block::new(), Watch::default());
        let state = State {
            kernel,
            block,
            at_top: true,
            warps: 0..launch.warps(),
            source: None,
            watch,
            guards_all: false,
        };
        Builder { state: RefCell::new(state) }
    }

    fn finish(self) -> Kernel {
        let State { mut kernel, block, watch, .. } = self.state.into_inner();
        kernel.prologue = block;
        kernel.misuse = watch.finish();
        kernel
    }
}

/// Declarations.
impl Builder {
    /// The kernel so far. No closure of the caller may run while this borrow lives.
    fn state(&self) -> RefMut<'_, State> {
        self.state.borrow_mut()
    }

    pub(crate) fn watch(&self) -> RefMut<'_, Watch> {
        RefMut::map(self.state(), |state| &mut state.watch)
    }

    fn param(&self, name: &str, kind: ParamKind) -> Param {
        let params = &mut self.state().kernel.params;
        params.push(ParamInfo { name: name.to_owned(), kind });
        Param(params.len() as u32 - 1)
    }

    #[track_caller]
    fn loaded_param<T: Class>(&self, name: &str, kind: ParamKind) -> V<'_, T> {
        let param = self.param(name, kind);
        self.result(|dst| Inst::Mem(MemInst::LoadParam { dst, param, ty: T::TY })).named(name)
    }

    /// Declares a parameter of 32 bits and loads it.
    #[track_caller]
    pub fn param_u32(&self, name: &str) -> V<'_, B32> {
        self.loaded_param(name, ParamKind::U32)
    }

    /// Declares a parameter of 64 bits and loads it.
    #[track_caller]
    pub fn param_u64(&self, name: &str) -> V<'_, B64> {
        self.loaded_param(name, ParamKind::U64)
    }

    /// Declares a binary32 parameter and loads it.
    #[track_caller]
    pub fn param_f32(&self, name: &str) -> V<'_, F32> {
        self.loaded_param(name, ParamKind::F32)
    }

    /// Declares a parameter that is the address of an array in global memory, and loads it.
    #[track_caller]
    pub fn param_pointer(&self, name: &str, elem: Elem) -> V<'_, B64> {
        self.loaded_param(name, ParamKind::Pointer(elem))
    }

    /// Declares a parameter that is a tensor map, whose copies move boxes of this shape.
    pub fn param_tensor_map(&self, name: &str, shape: BoxShape) -> TensorMap {
        TensorMap(self.param(name, ParamKind::TensorMap(shape)))
    }

    /// Declares `bytes` of shared memory, aligned to `align`.
    pub fn region(&self, name: &str, bytes: u32, align: u32) -> Region {
        self.state().kernel.smem.append(name, bytes, align, RegionKind::Bytes)
    }

    /// Declares a region that begins where the first of `over` begins, and that may share bytes with all of `over`.
    pub fn overlay(&self, name: &str, over: &[Region], bytes: u32, align: u32) -> Region {
        self.state().kernel.smem.overlay(name, over, bytes, align)
    }

    /// Declares `count` mbarriers of 8 bytes each, to be initialised for `arrivals` per phase.
    pub fn mbarriers(&self, name: &str, count: u32, arrivals: u32) -> Region {
        self.state().kernel.smem.append(name, count.saturating_mul(8), 8, RegionKind::Mbarriers { arrivals })
    }

    /// Declares a named barrier of `threads` threads. Hardware numbers start at 1.
    pub fn barrier(&self, name: &str, threads: u32) -> Barrier {
        let barriers = &mut self.state().kernel.barriers;
        let id = barriers.len() as u32 + 1;
        barriers.push(BarrierInfo { name: name.to_owned(), id, threads });
        Barrier(id - 1)
    }

    /// Declares `count` named barriers of `threads` threads. Returns the first barrier's hardware number.
    pub fn barriers(&self, name: &str, count: u32, threads: u32) -> u32 {
        let first = self.state().kernel.barriers.len() as u32 + 1;
        (0..count).for_each(|index| _ = self.barrier(&format!("{name} {index}"), threads));
        first
    }

    /// The hardware number of a named barrier, to compute with.
    pub fn barrier_id(&self, barrier: Barrier) -> u32 {
        barrier.0 + 1
    }

    /// Names a register in the printed kernel.
    pub(crate) fn name(&self, register: Value, name: &str) {
        // A register of another kernel may have no entry here. V-5 reports it.
        if let Some(info) = self.state().kernel.values.get_mut(register.0 as usize) {
            info.name = Some(name.to_owned());
        }
    }

    /// The address of a region, in a register.
    #[track_caller]
    pub fn address(&self, region: Region) -> V<'_, B32> {
        self.result(|dst| Inst::RegionAddress { dst, region })
    }
}

/// Variables: registers that may be assigned again.
impl Builder {
    /// A variable that holds `initial`.
    #[track_caller]
    pub fn var<T: Class>(&self, name: &str, initial: impl Arg<Ty = T>) -> Var<'_, T> {
        let var = self.uninitialised(name);
        var.set(initial);
        var
    }

    /// A variable that holds nothing yet.
    pub fn uninitialised<T: Class>(&self, name: &str) -> Var<'_, T> {
        Var::new(self, self.register(ValueInfo { ty: T::TY, name: Some(name.to_owned()), mutable: true }))
    }

    /// The variables of an accumulator, which hold nothing yet.
    pub fn accumulator(&self, name: &str, registers: u32) -> Vec<Var<'_, F32>> {
        (0..registers).map(|_| self.uninitialised(name)).collect()
    }

    /// `x` as a value to compute with. A constant stays a constant.
    pub fn value<A: Arg>(&self, x: A) -> V<'_, A::Ty> {
        V::of(self, x)
    }

    /// `x` in a register of its own: a constant, or the present content of a variable.
    #[track_caller]
    pub fn copy<A: Arg>(&self, x: A) -> V<'_, A::Ty> {
        V::new(self, self.copied(x))
    }

    #[track_caller]
    pub(crate) fn copied<A: Arg>(&self, x: A) -> Value {
        let op = match A::Ty::TY {
            Ty::Pred => LaneOp::MovPred,
            Ty::B16 => LaneOp::MovB16,
            Ty::B32 => LaneOp::MovB32,
            Ty::B64 => LaneOp::MovB64,
            Ty::F32 => LaneOp::MovF32,
        };
        self.lane(op, &[x.operand()])
    }

    /// Assigns to a variable.
    #[track_caller]
    pub(crate) fn set<T: Class>(&self, var: Value, src: impl Arg<Ty = T>) {
        self.push(Inst::Set { var, ty: T::TY, src: src.operand() });
    }
}

/// Control flow.
impl Builder {
    /// Runs `then` where `condition` holds. All lanes of a warp agree on the condition.
    #[track_caller]
    pub fn if_uniform(&self, condition: impl Into<Condition>, then: impl FnOnce()) {
        self.branch(condition.into(), true, then, || ());
    }

    /// Runs `then` where `condition` holds and `otherwise` elsewhere. All lanes of a warp agree on the condition.
    #[track_caller]
    pub fn if_else_uniform(
        &self,
        condition: impl Into<Condition>,
        then: impl FnOnce(),
        otherwise: impl FnOnce(),
    ) {
        self.branch(condition.into(), true, then, otherwise);
    }

    /// Runs `then` in the lanes where `condition` holds. Nothing in it may need the whole warp.
    #[track_caller]
    pub fn if_lanes(&self, condition: impl Into<Condition>, then: impl FnOnce()) {
        self.branch(condition.into(), false, then, || ());
    }

    /// Runs `then` in the lanes where `condition` holds, `otherwise` in the others. Nothing in them may need the
    /// whole warp.
    #[track_caller]
    pub fn if_else_lanes(
        &self,
        condition: impl Into<Condition>,
        then: impl FnOnce(),
        otherwise: impl FnOnce(),
    ) {
        self.branch(condition.into(), false, then, otherwise);
    }

    #[track_caller]
    fn branch(&self, condition: Condition, uniform: bool, then: impl FnOnce(), otherwise: impl FnOnce()) {
        self.watch().begin_branch();
        let (then, otherwise) = (self.block(then), self.block(otherwise));
        self.watch().end_branch();
        self.append(Node::If { condition, uniform, then, otherwise });
    }

    /// Repeats `body` until a [`Builder::break_if`] in it.
    #[track_caller]
    pub fn repeat(&self, body: impl FnOnce()) {
        let body = self.block(body);
        self.append(Node::Loop { body });
    }

    /// Leaves the innermost loop where `condition` holds. All lanes that run the loop agree on the condition.
    #[track_caller]
    pub fn break_if(&self, condition: impl Into<Condition>) {
        self.append(Node::Break { condition: condition.into() });
    }

    /// Runs `body` for the unsigned numbers `first`, `first + step`, ... below `end`, which are the same in all lanes.
    /// `step` must not be 0, and `end` + `step` must be below 2³². State that the body carries to the next round must
    /// be in a variable. The loop of a persistent grid:
    ///
    /// ```
    /// # use fa3_ir::lang::*;
    /// # let kernel = Kernel::build("persistent", Launch::threads(32), |b| {
    /// let tiles = b.param_u32("tiles");
    /// b.for_each((b.cta_x(), tiles), b.grid_x(), |tile| {
    ///     // ...
    /// #   _ = tile;
    /// });
    /// # });
    /// # assert_eq!(fa3_ir::verify(&kernel), Ok(()));
    /// ```
    #[track_caller]
    pub fn for_each<'k>(
        &'k self,
        (first, end): (impl Arg<Ty = B32>, impl Arg<Ty = B32>),
        step: impl Arg<Ty = B32>,
        body: impl FnOnce(V<'k, B32>),
    ) {
        if step.operand().constant() == Some(0) {
            self.fault(Fault::Limit {
                what: "the step of a loop",
                given: 0,
                min: 1,
                max: u32::MAX,
                multiple: 1,
            });
        }
        let served = self.served();
        let _one = self.as_one();
        let next = self.var("next", first);
        self.repeat(|| {
            self.break_if(next.now().ge(end));
            let index = next.get();
            {
                let _whom = self.on_behalf_of(served);
                body(index);
            }
            next.set(index + step);
        });
    }

    /// Builds the body of `role`. The role's warps run it after the prologue, with the role's registers.
    #[track_caller]
    pub fn role(&self, role: Role, body: impl FnOnce()) {
        let source = Location::caller();
        if !self.state().at_top {
            self.watch().fault(Fault::RoleInside { role: role.name.clone() }, source);
        }
        let entry = self.launch().entry_registers();
        let everyone = std::mem::replace(&mut self.state().warps, role.warps.clone());
        let block = self.block(|| {
            {
                let _whom = self.on_behalf_of(Some(source));
                match role.registers {
                    Some(registers) if registers < entry => self.set_max_registers_down(registers),
                    Some(registers) if registers > entry => self.set_max_registers_up(registers),
                    Some(_) | None => {}
                }
            }
            body();
        });
        let mut state = self.state();
        state.warps = everyone;
        state.kernel.roles.push(RoleBody { name: role.name, warps: role.warps, block, source });
    }

    /// How the kernel is launched.
    pub fn launch(&self) -> Launch {
        self.state().kernel.launch
    }

    /// The regions of mbarriers, each with the number of its mbarriers and their arrivals per phase.
    pub(crate) fn mbarrier_regions(&self) -> Vec<(Region, u32, u32)> {
        let state = self.state();
        let regions = state.kernel.smem.regions.iter().zip(0..);
        let mbarriers = regions.filter_map(|(info, index)| match info.kind {
            RegionKind::Mbarriers { arrivals } => Some((Region(index), info.bytes / 8, arrivals)),
            RegionKind::Bytes => None,
        });
        mbarriers.collect()
    }

    /// The warps that run the code being built: the role's, or all warps in the prologue.
    pub(crate) fn warps(&self) -> Range<u32> {
        self.state().warps.clone()
    }

    /// Builds a separate block from the statements that `build` appends.
    fn block(&self, build: impl FnOnce()) -> Block {
        let (outer, at_top, watched) = {
            let state = &mut *self.state();
            let at_top = std::mem::replace(&mut state.at_top, false);
            (std::mem::take(&mut state.block), at_top, state.watch.enter())
        };
        build();
        let state = &mut *self.state();
        state.watch.leave(watched);
        state.at_top = at_top;
        std::mem::replace(&mut state.block, outer)
    }
}

/// Primitives that the methods of the instruction families call.
impl Builder {
    fn register(&self, info: ValueInfo) -> Value {
        let values = &mut self.state().kernel.values;
        values.push(info);
        Value(values.len() as u32 - 1)
    }

    /// A new value, to be defined by the next instruction.
    pub(crate) fn define(&self, ty: Ty) -> Value {
        self.register(ValueInfo { ty, name: None, mutable: false })
    }

    /// Appends an instruction that defines a new value, and returns the value.
    #[track_caller]
    pub(crate) fn result<T: Class>(&self, inst: impl FnOnce(Value) -> Inst) -> V<'_, T> {
        let dst = self.define(T::TY);
        self.push(inst(dst));
        V::new(self, dst)
    }

    /// Appends an instruction.
    #[track_caller]
    pub(crate) fn push(&self, inst: Inst) {
        self.append(Node::Inst { guard: None, inst });
    }

    #[track_caller]
    fn append(&self, node: Node) {
        let source = self.source();
        self.state().block.push(Stmt { node, source });
    }

    /// The source line that statements are attributed to now: the line of the caller, or of an outer
    /// [`Builder::as_one`].
    #[track_caller]
    pub(crate) fn source(&self) -> Source {
        self.served().unwrap_or(Location::caller())
    }

    /// While the result lives, statements are attributed to the source line of the caller, or of an
    /// outer call of this method.
    #[track_caller]
    pub(crate) fn as_one(&self) -> OnBehalf<'_> {
        self.on_behalf_of(Some(self.source()))
    }

    /// While the result lives, statements are attributed to `source`; with `None`, each statement to its own line.
    pub(crate) fn on_behalf_of(&self, source: Option<Source>) -> OnBehalf<'_> {
        OnBehalf { builder: self, outer: std::mem::replace(&mut self.state().source, source) }
    }

    /// Records a mistake, at the source line that statements are attributed to.
    #[track_caller]
    pub(crate) fn fault(&self, fault: Fault) {
        let source = self.source();
        self.watch().fault(fault, source);
    }

    /// Records a mistake: `first` and `second`, two numbers of the shape `what`, do not fit.
    #[track_caller]
    pub(crate) fn misfit(&self, what: &'static str, first: impl Display, second: impl Display) {
        self.fault(Fault::Shapes { what, first: first.to_string(), second: second.to_string() });
    }

    /// The source line that statements are attributed to now, if a method set one.
    pub(crate) fn served(&self) -> Option<Source> {
        self.state().source
    }
}
