//! Matrix products of a warpgroup. Each warp computes its part: 16 rows of A and D, all of B.

use std::collections::VecDeque;

use fa3_ir::{Major, Mma, Operand as Src, ScaleD, WgmmaA, WgmmaInst};

use super::operand::{CHUNK, Part};
use crate::clock::Epoch;
use crate::data::matrix::{a_position, d_position};
use crate::data::tensor_core::{Arithmetic, Product, multiply};
use crate::decoded::Op;
use crate::flight::{Accumulator, Pending, Use};
use crate::lanes::Lane;
use crate::machine::{At, Machine};
use crate::rule::Rule;
use crate::shadow::{Access, Kind, Origin};
use crate::simulation::Mode;
use crate::trace::Factors;
use crate::warp::ALL;

/// Instructions that some warps of a warpgroup have executed, and that its other warps must execute alike.
#[derive(Clone, Debug, Default)]
pub(crate) struct WarpgroupLog {
    /// Number of instructions that all four warps have executed, and that are not kept.
    forgotten: usize,
    steps: VecDeque<WarpgroupStep>,
}

/// A warpgroup instruction as one warp executed it: its step, and the operands that must be equal in all four warps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct WarpgroupStep {
    pc: usize,
    operands: [u64; 3],
}

impl<'a> Machine<'a> {
    pub(super) fn warpgroup(&mut self, at: At, inst: &WgmmaInst) {
        self.agree(at, [0; 3]);
        match inst {
            WgmmaInst::Fence => self.warp(at).flight.fence(),
            WgmmaInst::Commit => self.warp(at).flight.commit(),
            WgmmaInst::Wait { pending } => {
                self.warp(at).flight.wait(*pending);
                let retired = self.warp(at).flight.retired;
                self.compute(at, retired);
                self.retire_groups(at, retired);
            }
            // A product is decoded to a step of its own.
            WgmmaInst::Mma(_) => {}
        }
    }

    /// Rule W7: the four warps execute the same instructions.
    fn agree(&mut self, at: At, operands: [u64; 3]) {
        let flight = &mut self.warp(at).flight;
        let index = flight.sequence;
        flight.sequence += 1;
        let step = WarpgroupStep { pc: self.warp(at).pc, operands };
        let cta = self.cta(at);
        let done_by_all =
            cta.warpgroup_of(at.warp).iter().map(|warp| warp.flight.sequence).min().unwrap_or(0);
        let log = &mut cta.warpgroups[at.warp / 4];
        let other = log.steps.get(index - log.forgotten).copied();
        if other.is_none() {
            log.steps.push_back(step);
        }
        while log.forgotten < done_by_all {
            log.steps.pop_front();
            log.forgotten += 1;
        }
        match other {
            None => {}
            Some(other) if other == step => {}
            Some(other) => {
                let what = if other.pc == step.pc {
                    format!("operands {operands:x?} in this warp, {:x?} in another", other.operands)
                } else {
                    "another warp of the warpgroup executes another instruction".to_owned()
                };
                self.find(Rule::W7, at, what);
            }
        }
    }

    /// Rule W7 at the end: all four warps have executed the same number of instructions.
    pub(super) fn check_warpgroup_exit(&mut self, at: At) {
        let cta = self.cta(at);
        let log = &cta.warpgroups[at.warp / 4];
        let (done, all) = (cta.warps[at.warp].flight.sequence, log.forgotten + log.steps.len());
        let warps = cta.warpgroup_of(at.warp);
        let over = warps.iter().all(|warp| warp.state == crate::warp::State::Exited);
        let differ = warps.iter().any(|warp| warp.flight.sequence != all);
        let limits = warps.iter().any(|warp| warp.limits != warps[0].limits);
        if over && differ {
            let what = format!("one warp executes {done} warpgroup instructions, another {all}");
            self.find(Rule::W7, at, what);
        }
        if over && limits {
            self.find(Rule::R1, at, "setmaxnreg is not the same in the four warps of a warpgroup");
        }
    }

    pub(super) fn product(&mut self, at: At, mma: &'a Mma, d: &[u32]) {
        let accumulate = match mma.scale_d {
            ScaleD::Overwrite => false,
            ScaleD::Accumulate => true,
            ScaleD::AccumulateIf(pred) => self.scale(at, pred),
        };
        let a = match mma.a {
            WgmmaA::Shared { desc, .. } => self.descriptor(at, desc),
            WgmmaA::Registers(_) => 0,
        };
        let b = self.descriptor(at, mma.b);
        self.agree(at, [a, b, accumulate.into()]);
        self.use_registers(at, mma, d, accumulate);
        self.read_operands(at, mma, a, b);
        self.trace_factors(at, |machine| machine.factors(at, mma, a, b));
        if at.warp.is_multiple_of(4) {
            self.counters.products += 1;
            self.counters.product_flops += 2 * 64 * u64::from(mma.n) * u64::from(mma.ty.k());
        }

        let pc = self.warp(at).pc;
        let program = self.program;
        let code = &program.codes[self.warp(at).code];
        let flight = &mut self.warp(at).flight;
        flight.open += 1;
        let group = flight.group();
        let known =
            flight.accumulators.iter_mut().find(|accumulator| same_registers(code, accumulator.pc, d));
        match known {
            Some(accumulator) => accumulator.group = group,
            None => self.take_off(at, d, accumulate, Accumulator { pc, values: Vec::new(), group }),
        }
        self.warp(at).flight.queue.push_back(Pending { pc, group, a, b, accumulate });
        if self.schedule.at_once() {
            self.compute(at, group);
        }
    }

    /// The names of the regions that a product's operands lie in.
    fn factors(&mut self, at: At, mma: &Mma, a: u64, b: u64) -> Option<Factors> {
        let a = match part_of_a(at, mma, a) {
            Some(part) => Some(self.factor(&part, Major::Mn)?),
            None => None,
        };
        Some(Factors { a, b: self.factor(&part_of_b(mma, b), Major::K)? })
    }

    /// The name of an operand, with a T if it is stored transposed. Matrices have capital letters.
    fn factor(&mut self, part: &Part, transposed: Major) -> Option<String> {
        let first = *self.chunks_of(part).ok()?.first()?;
        let regions = &self.program.kernel.smem.regions;
        let name = &regions.iter().find(|region| (region.offset..region.end()).contains(&first))?.name;
        let name = if name.len() == 1 { name.to_uppercase() } else { name.clone() };
        Some(if part.major == transposed { name + "ᵀ" } else { name })
    }

    fn scale(&mut self, at: At, pred: fa3_ir::Value) -> bool {
        let code = &self.program.codes[self.warp(at).code];
        self.need(at, code.slot(pred), ALL);
        let lanes = *self.warp(at).value(code, pred);
        if lanes.iter().any(|&lane| lane != lanes[0]) {
            self.find(Rule::Uniform, at, "lanes differ in whether the product accumulates");
        }
        lanes[0] == 1
    }

    fn descriptor(&mut self, at: At, desc: Src) -> u64 {
        let code = &self.program.codes[self.warp(at).code];
        if let Src::Value(value) = desc {
            self.need(at, code.slot(value), ALL);
        }
        let lanes = self.warp(at).operand(code, desc);
        if lanes.iter().any(|&lane| lane != lanes[0]) {
            self.find(Rule::W7, at, "lanes differ in a matrix descriptor");
        }
        lanes[0]
    }

    /// Checks rules W1 and W2, and rule I1 for registers.
    fn use_registers(&mut self, at: At, mma: &Mma, d: &[u32], accumulate: bool) {
        let code = &self.program.codes[self.warp(at).code];
        let columns = mma.n;
        let under_way = self.warp(at).flight.accumulators.iter().any(|of| same_registers(code, of.pc, d));
        let mut broken = None;
        for &slot in d {
            if accumulate && !under_way {
                self.need(at, slot, ALL);
            }
            broken = self.warp(at).flight.product(slot, Use::Accumulator { columns }).or(broken);
        }
        if let WgmmaA::Registers(a) = mma.a {
            for value in a {
                self.need(at, code.slot(value), ALL);
                broken = self.warp(at).flight.product(code.slot(value), Use::Factor).or(broken);
            }
        }
        if let Some(rule) = broken {
            let what = if rule == Rule::W1 {
                "registers were accessed after the last wgmma.fence"
            } else {
                "a product under way uses the same register in another way"
            };
            self.find(rule, at, what);
        }
    }

    /// Checks rule W8, and records the reads of shared memory, so that races are found.
    fn read_operands(&mut self, at: At, mma: &Mma, a: u64, b: u64) {
        let component = self.component(at, |warp| &mut warp.flight.component);
        let (cluster, event) = (self.clusters[at.cluster].id, self.event(at));
        let epoch = Epoch { cluster, component, value: self.warp(at).flight.group() };
        let (warp, lane) = (self.warp(at).component, Lane::SEVERAL);
        let access = Access { epoch, event, kind: Kind::Read, origin: Origin::Product, warp, lane };
        if let Some(part) = part_of_a(at, mma, a) {
            self.read_operand(at, &part, access);
        }
        self.read_operand(at, &part_of_b(mma, b), access);
    }

    fn read_operand(&mut self, at: At, part: &Part, access: Access) {
        let chunks = match self.chunks_of(part) {
            Ok(chunks) => chunks,
            Err(error) => return self.find(Rule::W8, at, error.to_string()),
        };
        let size = self.cta(at).shared.bytes.len() as u32;
        if let Some(&chunk) = chunks.iter().find(|&&chunk| chunk > size.saturating_sub(CHUNK)) {
            let offset = i64::from(chunk.cast_signed());
            let end = offset + 16;
            let what =
                format!("an operand's bytes {offset} to {end} are outside the {size} of shared memory");
            return self.find(Rule::W8, at, what);
        }
        self.access_operand(at, &chunks, CHUNK, access);
    }

    /// Computes the products of groups up to `upto`.
    fn compute(&mut self, at: At, upto: u32) {
        let program = self.program;
        let arithmetic = match self.mode {
            Mode::Exact => Arithmetic::Exact,
            Mode::Fast => Arithmetic::Fast,
            Mode::Skeleton => {
                self.warp(at).flight.queue.retain(|product| product.group > upto);
                return;
            }
        };
        loop {
            let warp = self.warp(at);
            if warp.flight.queue.front().is_none_or(|product| product.group > upto) {
                return;
            }
            let Some(pending) = warp.flight.queue.pop_front() else { return };
            let code = &program.codes[warp.code];
            let Op::Mma { mma, d } = &code.steps[pending.pc].op else { continue };
            let accumulators = &warp.flight.accumulators;
            let found = accumulators.iter().position(|of| same_registers(code, of.pc, d));
            let Some(index) = found else { continue };
            let mut values = std::mem::take(&mut self.warp(at).flight.accumulators[index].values);
            let a = match (mma.a, part_of_a(at, mma, pending.a)) {
                (WgmmaA::Registers(registers), _) => self.gather_factor(at, mma, registers),
                (WgmmaA::Shared { .. }, part) => part.map_or_else(Vec::new, |part| self.gather(at, &part)),
            };
            let b = self.gather(at, &part_of_b(mma, pending.b));
            let product = Product {
                ty: mma.ty,
                n: mma.n as usize,
                negate_a: mma.negate_a,
                negate_b: mma.negate_b,
                accumulate: pending.accumulate,
            };
            multiply(&product, arithmetic, &a, &b, &mut values);
            self.warp(at).flight.accumulators[index].values = values;
        }
    }

    /// Takes an accumulator's registers from the warp: reading them gives NaN.
    fn take_off(&mut self, at: At, d: &[u32], accumulate: bool, mut accumulator: Accumulator) {
        d.iter().for_each(|&slot| self.warp(at).define(slot));
        if self.mode != Mode::Skeleton {
            let n = 2 * d.len();
            accumulator.values = vec![0.0; 16 * n];
            let warp = self.warp(at);
            for (register, &slot) in d.iter().enumerate() {
                for (lane, &bits) in warp.register(slot).iter().enumerate().filter(|_| accumulate) {
                    let (row, column) = d_position(lane as u32, register as u32);
                    accumulator.values[row as usize * n + column as usize] = f32::from_bits(bits as u32);
                }
                warp.assign(slot, &[u32::MAX.into(); 32], ALL, true);
            }
        }
        self.warp(at).flight.accumulators.push(accumulator);
    }

    fn gather_factor(&mut self, at: At, mma: &Mma, registers: [fa3_ir::Value; 4]) -> Vec<u16> {
        let code = &self.program.codes[self.warp(at).code];
        let k = mma.ty.k();
        let (parts, bits) = (k / 8, 32 / (k / 8));
        let mut a = vec![0; 16 * k as usize];
        let warp = self.warp(at);
        for (register, value) in registers.into_iter().enumerate() {
            for (lane, &word) in warp.value(code, value).iter().enumerate() {
                for part in 0..parts {
                    let (row, column) = a_position(mma.ty, lane as u32, register as u32, part);
                    let element = (word >> (part * bits)) & ((1 << bits) - 1);
                    a[(row * k + column) as usize] = element as u16;
                }
            }
        }
        a
    }

    /// Retires the groups up to `retired`: their sums are in registers, and their operands have been read.
    fn retire_groups(&mut self, at: At, retired: u32) {
        let program = self.program;
        let warp = self.warp(at);
        let code = &program.codes[warp.code];
        if let Some(component) = warp.flight.component {
            warp.bundle.complete(component, retired);
        }
        let mut index = 0;
        while index < warp.flight.accumulators.len() {
            if warp.flight.accumulators[index].group > retired {
                index += 1;
                continue;
            }
            let Accumulator { pc, values, .. } = warp.flight.accumulators.swap_remove(index);
            let Op::Mma { d, .. } = &code.steps[pc].op else { continue };
            let n = 2 * d.len();
            for (register, &slot) in d.iter().enumerate() {
                let lanes = std::array::from_fn(|lane| {
                    let (row, column) = d_position(lane as u32, register as u32);
                    values.get(row as usize * n + column as usize).map_or(0, |value| value.to_bits().into())
                });
                warp.assign(slot, &lanes, ALL, true);
            }
        }
    }
}

/// A warp's rows of A, if A is in shared memory.
fn part_of_a(at: At, mma: &Mma, desc: u64) -> Option<Part> {
    let WgmmaA::Shared { major, .. } = mma.a else { return None };
    let first = 16 * (at.warp as u32 % 4);
    Some(Part { desc, major, rows: first..first + 16, k: mma.ty.k() })
}

/// The operand B, which each warp reads as a whole.
fn part_of_b(mma: &Mma, desc: u64) -> Part {
    Part { desc, major: mma.b_major, rows: 0..mma.n, k: mma.ty.k() }
}

/// Whether the product at a step has these accumulators.
fn same_registers(code: &crate::decoded::Code, pc: usize, d: &[u32]) -> bool {
    matches!(&code.steps[pc].op, Op::Mma { d: other, .. } if other == d)
}
