//! A kernel as the simulator runs it: for each role one flat list of steps, with registers in numbered slots.

mod slots;

use fa3_ir::{
    Block, Condition, Inst, Kernel, LaneOp, Mma, Node, Operand, Source, Stmt, Ty, Value, WgmmaInst,
};

use slots::Lifetimes;

/// A decoded kernel.
#[derive(Debug)]
pub(crate) struct Decoded<'k> {
    pub(crate) kernel: &'k Kernel,
    /// One code for each role; one code for a kernel without roles.
    pub(crate) codes: Vec<Code<'k>>,
    /// For each byte of shared memory, whether it belongs to a region.
    in_a_region: Vec<bool>,
}

/// Code that the warps of a role run: the prologue, then the role.
#[derive(Debug)]
pub(crate) struct Code<'k> {
    /// The role's name.
    pub(crate) role: &'k str,
    pub(crate) steps: Vec<Step<'k>>,
    /// The slot of each value.
    pub(crate) slots: Vec<u32>,
    /// Number of slots.
    pub(crate) registers: usize,
    /// Slots that hold constants, and the constants.
    pub(crate) constants: Vec<(u32, u64)>,
    /// For each slot, whether it is a variable, which keeps its content in lanes without an assignment.
    pub(crate) mutable: Vec<bool>,
    /// For each slot, whether products use it.
    pub(crate) watched: Vec<bool>,
}

#[derive(Debug)]
pub(crate) struct Step<'k> {
    pub(crate) op: Op<'k>,
    /// The lanes that execute it.
    pub(crate) guard: Option<Guard>,
    pub(crate) source: Source,
}

/// The lanes where a predicate has a value.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Guard {
    pub(crate) slot: u32,
    pub(crate) negate: bool,
}

#[derive(Debug)]
pub(crate) enum Op<'k> {
    Lane(LaneStep),
    Set {
        dst: u32,
        src: u32,
        watched: bool,
    },
    Inst(&'k Inst),
    Mma {
        mma: &'k Mma,
        /// The slots of the product's accumulators.
        d: Vec<u32>,
    },
    /// Enters a branch; `otherwise` is its first step, `end` the step that ends the statement.
    If {
        condition: Guard,
        uniform: bool,
        otherwise: u32,
        end: u32,
    },
    /// Ends the branch that is taken first; `end` is the step that ends the statement.
    Else {
        end: u32,
    },
    EndIf,
    Loop,
    Repeat {
        start: u32,
    },
    Break {
        condition: Guard,
        /// The step after the loop.
        end: u32,
    },
    Exit,
}

/// A lane operation with its slots.
#[derive(Debug)]
pub(crate) struct LaneStep {
    pub(crate) op: LaneOp,
    pub(crate) src: [u32; 3],
    pub(crate) inputs: usize,
    pub(crate) dst: [u32; 2],
    pub(crate) outputs: usize,
    /// Whether products use any of the slots.
    pub(crate) watched: bool,
    /// Whether the operation computes with floating-point numbers.
    pub(crate) float: bool,
}

impl Decoded<'_> {
    pub(crate) fn new(kernel: &Kernel) -> Decoded<'_> {
        let nothing: &Block = const { &Block::new() };
        let codes = if kernel.roles.is_empty() {
            vec![Code::new(kernel, &kernel.name, nothing)]
        } else {
            kernel.roles.iter().map(|role| Code::new(kernel, &role.name, &role.block)).collect()
        };
        let mut in_a_region = vec![false; kernel.smem.bytes() as usize];
        for region in &kernel.smem.regions {
            in_a_region[region.offset as usize..region.end() as usize].fill(true);
        }
        Decoded { kernel, codes, in_a_region }
    }

    /// Whether a byte of shared memory belongs to a region.
    pub(crate) fn is_in_a_region(&self, offset: u32) -> bool {
        self.in_a_region.get(offset as usize).is_some_and(|&known| known)
    }

    /// The index of the code that a warp runs.
    pub(crate) fn code_of(&self, warp: u32) -> usize {
        self.kernel.roles.iter().position(|role| role.warps.contains(&warp)).unwrap_or(0)
    }
}

impl<'k> Code<'k> {
    fn new(kernel: &'k Kernel, role: &'k str, block: &'k Block) -> Code<'k> {
        let (steps, constants, loops) = (Vec::new(), Vec::new(), Vec::new());
        let mut decoder = Decoder { kernel, steps, constants, lifetimes: Lifetimes::new(kernel), loops };
        decoder.block(&kernel.prologue);
        decoder.block(block);
        let last = block.last().or(kernel.prologue.last());
        let end = last.map_or(std::panic::Location::caller(), |stmt| stmt.source);
        decoder.push(Op::Exit, None, end);
        decoder.finish(role)
    }

    pub(crate) fn slot(&self, value: Value) -> u32 {
        self.slots[value.0 as usize]
    }
}

/// Builds a [`Code`]. Until it is finished, slots in steps are numbers of values, followed by numbers of constants.
struct Decoder<'k> {
    kernel: &'k Kernel,
    steps: Vec<Step<'k>>,
    constants: Vec<u64>,
    lifetimes: Lifetimes,
    /// For each enclosing loop, the breaks whose targets are not known yet.
    loops: Vec<Vec<usize>>,
}

impl<'k> Decoder<'k> {
    fn push(&mut self, op: Op<'k>, guard: Option<Guard>, source: Source) -> usize {
        self.steps.push(Step { op, guard, source });
        self.steps.len() - 1
    }

    fn here(&self) -> u32 {
        self.steps.len() as u32
    }

    fn block(&mut self, block: &'k Block) {
        block.iter().for_each(|stmt| self.stmt(stmt));
    }

    fn stmt(&mut self, stmt: &'k Stmt) {
        let source = stmt.source;
        match &stmt.node {
            Node::Inst { guard, inst } => {
                let guard = guard.map(|guard| self.condition(guard));
                self.inst(guard, inst, source);
            }
            Node::If { condition, uniform, then, otherwise } => {
                let condition = self.condition(*condition);
                let branch = Op::If { condition, uniform: *uniform, otherwise: 0, end: 0 };
                let branch = self.push(branch, None, source);
                self.block(then);
                let middle = self.push(Op::Else { end: 0 }, None, source);
                let else_starts = self.here();
                self.block(otherwise);
                let ends = self.push(Op::EndIf, None, source) as u32;
                if let Op::If { otherwise, end, .. } = &mut self.steps[branch].op {
                    (*otherwise, *end) = (else_starts, ends);
                }
                if let Op::Else { end } = &mut self.steps[middle].op {
                    *end = ends;
                }
            }
            Node::Loop { body } => {
                let start = self.push(Op::Loop, None, source);
                self.loops.push(Vec::new());
                self.block(body);
                let last = self.push(Op::Repeat { start: start as u32 + 1 }, None, source);
                self.lifetimes.repeat(start, last);
                let after = self.here();
                for at in self.loops.pop().unwrap_or_default() {
                    if let Op::Break { end, .. } = &mut self.steps[at].op {
                        *end = after;
                    }
                }
            }
            Node::Break { condition } => {
                let condition = self.condition(*condition);
                let at = self.push(Op::Break { condition, end: 0 }, None, source);
                if let Some(breaks) = self.loops.last_mut() {
                    breaks.push(at);
                }
            }
        }
    }

    fn inst(&mut self, guard: Option<Guard>, inst: &'k Inst, source: Source) {
        let at = self.steps.len();
        inst.visit(&mut |access| self.lifetimes.see(at, access));
        let op = match inst {
            Inst::Lane(lane) => {
                let (mut src, mut dst) = ([0; 3], [0; 2]);
                src.iter_mut().zip(&lane.src).for_each(|(slot, &operand)| *slot = self.operand(operand));
                dst.iter_mut().zip(&lane.dst).for_each(|(slot, value)| *slot = value.0);
                let classes = || lane.op.inputs().iter().chain(lane.op.outputs());
                let float = classes().any(|&ty| ty == Ty::F32) || lane.op.ptx().contains("f16x2");
                let (inputs, outputs) = (lane.src.len(), lane.dst.len());
                Op::Lane(LaneStep { op: lane.op, src, inputs, dst, outputs, watched: false, float })
            }
            Inst::Set { var, ty: _, src } => Op::Set { dst: var.0, src: self.operand(*src), watched: false },
            Inst::Wgmma(WgmmaInst::Mma(mma)) => {
                let a = match mma.a {
                    fa3_ir::WgmmaA::Registers(a) => a.to_vec(),
                    fa3_ir::WgmmaA::Shared { .. } => Vec::new(),
                };
                mma.d.iter().chain(&a).for_each(|value| self.lifetimes.watch(*value));
                Op::Mma { mma, d: mma.d.iter().map(|value| value.0).collect() }
            }
            Inst::Special { .. }
            | Inst::RegionAddress { .. }
            | Inst::Mem(_)
            | Inst::Warp(_)
            | Inst::Barrier(_)
            | Inst::Mbarrier(_)
            | Inst::Tma(_)
            | Inst::Wgmma(_)
            | Inst::Fence(_)
            | Inst::Cluster(_)
            | Inst::Misc(_)
            | Inst::Observe(_) => Op::Inst(inst),
        };
        self.push(op, guard, source);
    }

    fn condition(&mut self, Condition { pred, negate }: Condition) -> Guard {
        self.lifetimes.touch(self.steps.len(), pred);
        Guard { slot: pred.0, negate }
    }

    fn operand(&mut self, operand: Operand) -> u32 {
        match operand {
            Operand::Value(value) => value.0,
            Operand::Imm(imm) => {
                let bits = bits_of(imm);
                let known = self.constants.iter().position(|&constant| constant == bits);
                let index = known.unwrap_or(self.constants.len());
                if known.is_none() {
                    self.constants.push(bits);
                }
                (self.kernel.values.len() + index) as u32
            }
        }
    }

    /// Gives every value and constant its slot.
    fn finish(mut self, role: &'k str) -> Code<'k> {
        let (mut slots, mut registers) = self.lifetimes.assign();
        let constants: Vec<(u32, u64)> = (registers as u32..).zip(self.constants).collect();
        registers += constants.len();
        let values = slots.len();
        slots.extend(constants.iter().map(|&(slot, _)| slot));
        let (mut mutable, mut watched) = (vec![false; registers], vec![false; registers]);
        for (value, info) in self.kernel.values.iter().enumerate() {
            mutable[slots[value] as usize] |= info.mutable;
            watched[slots[value] as usize] |= self.lifetimes.watched(value);
        }
        let place = |slot: &mut u32| *slot = slots[*slot as usize];
        for step in &mut self.steps {
            step.guard.iter_mut().for_each(|guard| place(&mut guard.slot));
            match &mut step.op {
                Op::Lane(lane) => {
                    lane.src[..lane.inputs].iter_mut().for_each(place);
                    lane.dst[..lane.outputs].iter_mut().for_each(place);
                    let used = lane.src[..lane.inputs].iter().chain(&lane.dst[..lane.outputs]);
                    lane.watched = used.copied().any(|slot| watched[slot as usize]);
                }
                Op::Set { dst, src, watched: either } => {
                    place(dst);
                    place(src);
                    *either = watched[*dst as usize] || watched[*src as usize];
                }
                Op::Mma { d, .. } => d.iter_mut().for_each(place),
                Op::If { condition, .. } | Op::Break { condition, .. } => place(&mut condition.slot),
                Op::Inst(_) | Op::Else { .. } | Op::EndIf | Op::Loop | Op::Repeat { .. } | Op::Exit => {}
            }
        }
        slots.truncate(values);
        Code { role, steps: self.steps, slots, registers, constants, mutable, watched }
    }
}

/// The bits of a constant, as a lane holds them.
pub(crate) fn bits_of(imm: fa3_ir::Imm) -> u64 {
    match imm {
        fa3_ir::Imm::Pred(truth) => truth.into(),
        fa3_ir::Imm::B16(bits) => bits.into(),
        fa3_ir::Imm::B32(bits) | fa3_ir::Imm::F32(bits) => bits.into(),
        fa3_ir::Imm::B64(bits) => bits,
    }
}
