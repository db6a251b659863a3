//! Records a trace: an instruction when a warp reaches it, and what only its execution shows when it is executed.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashSet};

use fa3_ir::{Access, Address, Inst, MemInst, MiscInst, Operand, TmaInst, WarpInst, WgmmaA, WgmmaInst};

use super::{Action, Factors, Gate, Pipe, Trace, TraceRecord, WarpTrace};
use crate::Line;
use crate::copies::Target;
use crate::decoded::{Code, Decoded, Op};
use crate::exec::SharedPlace;
use crate::machine::{At, Machine};

/// The cluster that is traced.
const CLUSTER: u32 = 0;

/// A trace under construction.
pub(crate) struct Recorder {
    trace: Trace,
    /// For each warp, the slots of results that are still to come.
    coming: Vec<HashSet<u32>>,
    /// Number of warps of a CTA.
    warps: usize,
}

impl Recorder {
    pub(crate) fn new(program: &Decoded<'_>) -> Recorder {
        let launch = program.kernel.launch;
        let warp = |cta, warp| {
            let role = program.codes[program.code_of(warp)].role.to_owned();
            WarpTrace { cta, warp, role, records: Vec::new() }
        };
        let ctas = 0..launch.cluster.max(1);
        let warps: Vec<WarpTrace> =
            ctas.flat_map(|cta| (0..launch.warps()).map(move |of| warp(cta, of))).collect();
        let coming = vec![HashSet::new(); warps.len()];
        let trace = Trace { kernel: program.kernel.name.clone(), warps, products: BTreeMap::new() };
        Recorder { trace, coming, warps: launch.warps() as usize }
    }

    pub(crate) fn finish(self) -> Trace {
        self.trace
    }
}

impl Machine<'_> {
    /// The line of a warp's current step, if the warp is traced.
    fn traced_line(&self, at: At) -> Option<Line> {
        self.recorder.as_ref().filter(|_| self.clusters[at.cluster].id == CLUSTER)?;
        let warp = &self.clusters[at.cluster].ctas[at.cta].warps[at.warp];
        Some(self.program.codes[warp.code].steps[warp.pc].source.into())
    }

    /// Records an action of a warp at its current step.
    pub(crate) fn trace(&mut self, at: At, action: Action) {
        let Some(line) = self.traced_line(at) else { return };
        let Some(recorder) = &mut self.recorder else { return };
        let index = at.cta * recorder.warps + at.warp;
        let records = &mut recorder.trace.warps[index].records;
        if !records.last_mut().is_some_and(|last| last.line == line && last.action.absorb(&action)) {
            records.push(TraceRecord { action, line });
        }
    }

    /// Records the factors of a product that a warp begins.
    pub(crate) fn trace_factors(&mut self, at: At, factors: impl FnOnce(&mut Self) -> Option<Factors>) {
        let Some(line) = self.traced_line(at) else { return };
        let factors = factors(self);
        let Some(recorder) = &mut self.recorder else { return };
        match recorder.trace.products.entry(line) {
            Entry::Vacant(new) => _ = new.insert(factors),
            Entry::Occupied(mut known) if *known.get() != factors => _ = known.insert(None),
            Entry::Occupied(_) => {}
        }
    }

    /// Records a step that a warp begins, with what is known before the step is executed.
    pub(crate) fn trace_step(&mut self, at: At, active: u32) {
        if self.recorder.is_none() || self.clusters[at.cluster].id != CLUSTER {
            return;
        }
        let program = self.program;
        let warp = &self.clusters[at.cluster].ctas[at.cta].warps[at.warp];
        let code = &program.codes[warp.code];
        let op = &code.steps[warp.pc].op;
        self.trace_results(at, code, op);
        if let Some(action) = action(op, active) {
            self.trace(at, action);
        }
    }

    /// Records a use of pending results, and remembers new pending results.
    fn trace_results(&mut self, at: At, code: &Code<'_>, op: &Op<'_>) {
        let Some(recorder) = &mut self.recorder else { return };
        let coming = &mut recorder.coming[at.cta * recorder.warps + at.warp];
        let needed = !coming.is_empty() && reads(code, op, &mut |slot| coming.contains(&slot));
        if needed {
            coming.clear();
        }
        if let Op::Inst(inst) = op
            && is_late(inst)
        {
            inst.visit(&mut |access| {
                if let Access::Write(value, _) = access {
                    coming.insert(code.slot(value));
                }
            });
        }
        if needed {
            self.trace(at, Action::Use);
        }
    }

    /// Records an arrival at the mbarrier at a place.
    pub(crate) fn trace_arrival(&mut self, at: At, place: SharedPlace) {
        if let Some(gate) = self.gate(at, place, 0) {
            self.trace(at, Action::Signal { gate, count: 1 });
        }
    }

    /// Records a wait that passed because the phase before the current one is complete.
    pub(crate) fn trace_pass(&mut self, at: At, place: SharedPlace) {
        if let Some(gate) = self.gate(at, place, 1) {
            self.trace(at, Action::Await(gate));
        }
    }

    /// Records an arrival that follows the completion of the warp's cp.async.
    pub(crate) fn trace_copied(&mut self, at: At, place: SharedPlace) {
        if let Some(gate) = self.gate(at, place, 0) {
            self.trace(at, Action::CopyAsyncSignal { gate, count: 1 });
        }
    }

    /// The gate for the phase that is `before` phases before the current one, of the mbarrier at a place.
    fn gate(&mut self, at: At, place: SharedPlace, before: u32) -> Option<Gate> {
        self.recorder.as_ref()?;
        let mbarrier = self.clusters[at.cluster].ctas[place.cta].mbarrier(place.offset)?;
        let phase = mbarrier.phase.checked_sub(before)?;
        Some(Gate::Mbarrier { cta: place.cta as u32, offset: place.offset, phase })
    }

    /// Records an arrival at a barrier, and a wait there.
    pub(crate) fn trace_barrier(&mut self, at: At, gate: Gate, waits: bool) {
        self.trace(at, Action::Signal { gate, count: 1 });
        if waits {
            self.trace(at, Action::Await(gate));
        }
    }

    /// Records an access to shared memory.
    pub(crate) fn trace_wavefronts(&mut self, at: At, wavefronts: u32) {
        if self.recorder.is_some() {
            let (code, pc) = (self.warp(at).code, self.warp(at).pc);
            let op = &self.program.codes[code].steps[pc].op;
            let loads = matches!(op, Op::Inst(inst) if is_late(inst));
            self.trace(at, Action::Shared { wavefronts, loads });
        }
    }

    /// Records a load that signals its targets.
    pub(crate) fn trace_load(&mut self, at: At, bytes: u32, targets: &[Target]) {
        let gate = |&Target { cta, mbarrier: offset, phase, .. }: &Target| Gate::Mbarrier {
            cta: cta as u32,
            offset,
            phase,
        };
        if self.recorder.is_some() {
            self.trace(at, Action::Load { bytes, signals: targets.iter().map(gate).collect() });
        }
    }
}

/// Whether a step reads a slot that `is` accepts.
fn reads(code: &Code<'_>, op: &Op<'_>, is: &mut dyn FnMut(u32) -> bool) -> bool {
    match op {
        Op::Lane(lane) => lane.src[..lane.inputs].iter().any(|&slot| is(slot)),
        Op::Set { src, .. } => is(*src),
        Op::Inst(inst) => {
            let mut any = false;
            inst.visit(&mut |access| {
                if let Access::Read(Operand::Value(value), _) = access {
                    any |= is(code.slot(value));
                }
            });
            any
        }
        Op::If { condition, .. } | Op::Break { condition, .. } => is(condition.slot),
        Op::Mma { .. } | Op::Else { .. } | Op::EndIf | Op::Loop | Op::Repeat { .. } | Op::Exit => false,
    }
}

/// Whether an instruction's results come later than the next instruction.
fn is_late(inst: &Inst) -> bool {
    matches!(
        inst,
        Inst::Mem(MemInst::Load { .. } | MemInst::LoadAcquire { .. } | MemInst::Atomic { .. })
            | Inst::Warp(WarpInst::Shfl { .. } | WarpInst::Ldmatrix { .. })
    )
}

/// The action of a step, if it is known before the step is executed, and costs anything.
fn action(op: &Op<'_>, active: u32) -> Option<Action> {
    const CONTROL: Action = Action::Issue { pipe: Pipe::Control, count: 1 };
    match op {
        Op::Lane(lane) => Pipe::of(lane.op).map(|(pipe, count)| Action::Issue { pipe, count }),
        Op::If { .. } | Op::Break { .. } | Op::Repeat { .. } | Op::Exit => Some(CONTROL),
        // An assignment to a variable only renames a register.
        Op::Set { .. } | Op::Else { .. } | Op::EndIf | Op::Loop => None,
        Op::Inst(_) | Op::Mma { .. } if active == 0 => Some(CONTROL),
        Op::Inst(inst) => instruction(inst, active, CONTROL),
        Op::Mma { mma, .. } => Some(Action::Product {
            ty: mma.ty,
            n: mma.n,
            a_in_registers: matches!(mma.a, WgmmaA::Registers(_)),
        }),
    }
}

fn instruction(inst: &Inst, active: u32, control: Action) -> Option<Action> {
    match inst {
        Inst::Special { .. } => Some(Action::Issue { pipe: Pipe::Integer, count: 1 }),
        // The results are constants.
        Inst::RegionAddress { .. } => None,
        Inst::Mem(inst) => memory(inst, active),
        // One word per lane goes through the crossbar of shared memory.
        Inst::Warp(WarpInst::Shfl { .. }) => Some(Action::Shared { wavefronts: 1, loads: true }),
        // The wavefronts are counted when the instruction is executed.
        Inst::Warp(WarpInst::Ldmatrix { .. } | WarpInst::Stmatrix { .. }) => None,
        Inst::Warp(
            WarpInst::Vote { .. } | WarpInst::Ballot { .. } | WarpInst::Elect { .. } | WarpInst::Sync,
        ) => Some(control),
        Inst::Wgmma(WgmmaInst::Commit) => Some(Action::Commit),
        Inst::Wgmma(WgmmaInst::Wait { pending }) => Some(Action::Wait { pending: *pending }),
        Inst::Tma(TmaInst::Commit) => Some(Action::StoreCommit),
        Inst::Tma(TmaInst::Wait { pending, read }) => Some(Action::StoreWait { pending: *pending, read: *read }),
        Inst::Wgmma(WgmmaInst::Fence)
        | Inst::Fence(_)
        | Inst::Misc(MiscInst::GridDependencyWait | MiscInst::LaunchDependents) => Some(control),
        // Observations are no instructions of the machine.
        Inst::Observe(_)
        // These are recorded when they are executed, because only then their gates and numbers of bytes are known.
        | Inst::Barrier(_)
        | Inst::Mbarrier(_)
        | Inst::Tma(_)
        | Inst::Cluster(_)
        | Inst::Misc(MiscInst::SetMaxRegisters { .. } | MiscInst::Trap)
        // Products are separate steps.
        | Inst::Wgmma(WgmmaInst::Mma(_))
        | Inst::Lane(_)
        | Inst::Set { .. } => None,
    }
}

fn memory(inst: &MemInst, active: u32) -> Option<Action> {
    let global = |bytes, loads| Some(Action::Global { bytes: active.count_ones() * bytes, loads });
    match inst {
        MemInst::Load { dst, ty, addr: Address::Global(_), cache: _ } => {
            global(ty.bytes() * dst.len() as u32, true)
        }
        MemInst::Store { src, ty, addr: Address::Global(_) } => global(ty.bytes() * src.len() as u32, false),
        MemInst::LoadAcquire { .. } => global(4, true),
        MemInst::Atomic { addr: Address::Global(_), .. } => global(4, true),
        MemInst::StoreRelease { .. } => global(4, false),
        MemInst::ReduceAdd { addr: Address::Global(_), .. } => global(4, false),
        MemInst::CopyAsync { .. } => Some(Action::CopyAsync { bytes: 16 * active.count_ones() }),
        MemInst::CopyAsyncCommit => Some(Action::CopyAsyncCommit),
        MemInst::CopyAsyncWait { pending } => Some(Action::CopyAsyncWait { pending: *pending }),
        // Parameters are operands of other instructions, and the model has no prefetches.
        MemInst::LoadParam { .. } | MemInst::Prefetch { .. } => None,
        // The wavefronts are counted when the instruction is executed.
        MemInst::Load { .. } | MemInst::Store { .. } | MemInst::Atomic { .. } | MemInst::ReduceAdd { .. } => {
            None
        }
    }
}
