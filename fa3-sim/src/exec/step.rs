//! One step of a warp: the check of its registers, control flow, the instruction.

use fa3_ir::{Access, Inst};

use super::Flow;
use crate::data::{self, Lanes};
use crate::decoded::{Guard, LaneStep, Op};
use crate::machine::{At, Machine};
use crate::rule::Rule;
use crate::simulation::Mode;
use crate::warp::{Frame, State};

const ZEROS: Lanes = [0; 32];

impl<'a> Machine<'a> {
    /// Runs the current step of a warp. Returns whether the warp can continue at once.
    pub(crate) fn step(&mut self, at: At) -> bool {
        let program = self.program;
        let warp = &self.clusters[at.cluster].ctas[at.cta].warps[at.warp];
        let (index, pc) = (warp.code, warp.pc);
        let code = &program.codes[index];
        let step = &code.steps[pc];
        if let Some(guard) = step.guard {
            self.need(at, guard.slot, self.clusters[at.cluster].ctas[at.cta].warps[at.warp].mask);
        }
        let active = self.clusters[at.cluster].ctas[at.cta].warps[at.warp].active(step.guard);
        self.warp(at).active = active;
        self.trace_step(at, active);
        let flow = match &step.op {
            Op::Lane(lane) => {
                self.counters.warp_instructions += 1;
                if active != 0 {
                    self.lane(at, lane, active);
                }
                Flow::Next
            }
            Op::Set { dst, src, watched } => {
                self.counters.warp_instructions += 1;
                if active != 0 {
                    self.set(at, *dst, *src, *watched, active);
                }
                Flow::Next
            }
            Op::Inst(_) | Op::Mma { .. } if active == 0 => Flow::Next,
            Op::Inst(inst) => {
                self.counters.warp_instructions += 1;
                self.check_registers(at, inst, active);
                self.inst(at, inst, active)
            }
            Op::Mma { mma, d } => {
                self.counters.warp_instructions += 1;
                self.product(at, mma, d);
                Flow::Next
            }
            Op::If { condition, uniform, otherwise, end } => {
                return self.branch(at, *condition, *uniform, *otherwise, *end);
            }
            Op::Else { end } => return self.other_side(at, *end),
            Op::EndIf => {
                let warp = self.warp(at);
                if let Some(Frame::If { all, .. }) = warp.frames.pop() {
                    warp.mask = all;
                }
                Flow::Next
            }
            Op::Loop => {
                let warp = self.warp(at);
                warp.frames.push(Frame::Loop { all: warp.mask, iteration: 1 });
                Flow::Next
            }
            Op::Repeat { start } => {
                let warp = self.warp(at);
                if let Some(Frame::Loop { iteration, .. }) = warp.frames.last_mut() {
                    *iteration += 1;
                }
                warp.pc = *start as usize;
                return true;
            }
            Op::Break { condition, end } => return self.leave(at, *condition, *end),
            Op::Exit => {
                self.exit(at);
                return false;
            }
        };
        let warp = self.warp(at);
        match flow {
            Flow::Next => warp.pc += 1,
            Flow::Poll => {
                warp.pc += 1;
                warp.polling = true;
            }
            Flow::Stay => {}
        }
        flow == Flow::Next
    }

    fn inst(&mut self, at: At, inst: &'a Inst, active: u32) -> Flow {
        match inst {
            Inst::Special { dst, register } => self.special(at, *dst, *register, active),
            Inst::RegionAddress { dst, region } => self.region_address(at, *dst, *region, active),
            Inst::Mem(inst) => return self.mem(at, inst, active),
            Inst::Warp(inst) => self.exchange(at, inst),
            Inst::Barrier(inst) => return self.barrier(at, inst),
            Inst::Mbarrier(inst) => return self.mbarrier(at, inst, active),
            Inst::Tma(inst) => self.tensor(at, inst, active),
            Inst::Wgmma(inst) => self.warpgroup(at, inst),
            Inst::Fence(fence) => self.fence(at, *fence),
            Inst::Cluster(inst) => return self.cluster(at, inst, active),
            Inst::Misc(inst) => return self.misc(at, inst, active),
            Inst::Observe(inst) => self.observe(at, inst, active),
            // These instructions are decoded to steps of their own.
            Inst::Lane(_) | Inst::Set { .. } => {}
        }
        Flow::Next
    }

    /// Reports a register that is not initialised in some lane of `mask`.
    #[inline]
    pub(crate) fn need(&mut self, at: At, slot: u32, mask: u32) {
        if !self.warp(at).defined(slot, mask) {
            self.warp(at).define(slot);
            self.find(Rule::I1, at, "a register is read that holds nothing in this lane");
        }
    }

    /// Reports an access to a register that a product in flight uses.
    fn touch(&mut self, at: At, slot: u32) {
        if !self.program.codes[self.warp(at).code].watched[slot as usize] {
            return;
        }
        if let Some(rule) = self.warp(at).flight.touch(slot) {
            let what = if rule == Rule::W3 {
                "a register is accessed that a product uses which was never committed"
            } else {
                "a register is accessed that a product under way uses"
            };
            self.find(rule, at, what);
        }
    }

    fn check_registers(&mut self, at: At, inst: &Inst, active: u32) {
        let code = &self.program.codes[self.warp(at).code];
        inst.visit(&mut |access| {
            let Some(value) = access.value() else { return };
            if matches!(access, Access::Read(..)) {
                self.need(at, code.slot(value), active);
            }
            self.touch(at, code.slot(value));
        });
    }

    fn lane(&mut self, at: At, lane: &LaneStep, active: u32) {
        let (src, dst) = (&lane.src[..lane.inputs], &lane.dst[..lane.outputs]);
        let warp = self.warp(at);
        if !src.iter().all(|&slot| warp.defined(slot, active)) {
            src.iter().for_each(|&slot| self.need(at, slot, active));
        }
        if lane.watched {
            src.iter().chain(dst).for_each(|&slot| self.touch(at, slot));
        }
        let warp = &mut self.clusters[at.cluster].ctas[at.cta].warps[at.warp];
        let mutable = &self.program.codes[warp.code].mutable;
        let results = &mut self.results[..lane.outputs];
        if lane.float && self.mode == Mode::Skeleton {
            results.fill(ZEROS);
        } else {
            let operands = [0, 1, 2].map(|index| src.get(index).map_or(&ZEROS, |&slot| warp.register(slot)));
            data::lane::eval(lane.op, &operands[..lane.inputs], results);
        }
        for (&slot, lanes) in dst.iter().zip(&*results) {
            warp.assign(slot, lanes, active, mutable[slot as usize]);
        }
    }

    fn set(&mut self, at: At, dst: u32, src: u32, watched: bool, active: u32) {
        self.need(at, src, active);
        if watched {
            self.touch(at, src);
            self.touch(at, dst);
        }
        let warp = self.warp(at);
        let lanes = *warp.register(src);
        warp.assign(dst, &lanes, active, true);
    }

    /// The lanes of the warp where a condition holds. If lanes must agree, these are all lanes or none.
    fn decide(&mut self, at: At, condition: Guard, uniform: bool) -> u32 {
        let mask = self.warp(at).mask;
        self.need(at, condition.slot, mask);
        self.touch(at, condition.slot);
        let holds = self.warp(at).holds(condition) & mask;
        if !uniform || holds == 0 || holds == mask {
            return holds;
        }
        let what = format!("lanes {holds:#010x} of {mask:#010x} go one way, the others the other");
        self.find(Rule::Uniform, at, what);
        let first = mask & mask.wrapping_neg();
        if holds & first != 0 { mask } else { 0 }
    }

    fn branch(&mut self, at: At, condition: Guard, uniform: bool, otherwise: u32, end: u32) -> bool {
        let yes = self.decide(at, condition, uniform);
        let warp = self.warp(at);
        let (all, no) = (warp.mask, warp.mask & !yes);
        // An empty branch begins where the statement ends.
        let no = if otherwise == end { 0 } else { no };
        if yes != 0 {
            warp.frames.push(Frame::If { all, other: no });
            warp.mask = yes;
            warp.pc += 1;
        } else if no != 0 {
            warp.frames.push(Frame::If { all, other: 0 });
            warp.mask = no;
            warp.pc = otherwise as usize;
        } else {
            warp.pc = end as usize + 1;
        }
        true
    }

    /// Ends the branch that was taken first.
    fn other_side(&mut self, at: At, end: u32) -> bool {
        let warp = self.warp(at);
        if let Some(Frame::If { other, .. }) = warp.frames.last_mut()
            && *other != 0
        {
            warp.mask = std::mem::take(other);
            warp.pc += 1;
            return true;
        }
        warp.pc = end as usize;
        true
    }

    fn leave(&mut self, at: At, condition: Guard, end: u32) -> bool {
        let leaves = self.decide(at, condition, true);
        let warp = self.warp(at);
        if leaves == 0 {
            warp.pc += 1;
            return true;
        }
        while let Some(frame) = warp.frames.pop() {
            if let Frame::Loop { all, .. } = frame {
                warp.mask = all;
                break;
            }
        }
        warp.pc = end as usize;
        true
    }

    /// Ends a warp that has nothing left to do.
    fn exit(&mut self, at: At) {
        self.check_exit(at);
        let warp = self.warp(at);
        warp.state = State::Exited;
        let bundle = warp.bundle.clone();
        self.progress += 1;
        self.cta(at).last_words.join(&bundle);
        self.after_exit(at);
    }
}
