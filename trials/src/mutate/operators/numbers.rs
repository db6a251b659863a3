//! Operators on numbers: off-by-one bounds, selections replaced by one operand, values of other lanes, and unavailable
//! registers.

use fa3_ir::{BarrierInst, Inst, LaneInst, LaneOp, MemInst, MiscInst, Operand, ParamKind, Ty, WarpInst};
use fa3_sim::Rule::{self, *};

use super::{constant, sites};
use crate::mutate::anatomy::touches;
use crate::mutate::edit::Edit;
use crate::mutate::kinds::{is_load, is_mma};
use crate::mutate::{Anatomy, Operator, Site};

/// Rules that notice that a kernel reads or writes too much or too little. Wrong results show it, too.
const CHOICES: &[Rule] = &[Bounds, I1, Race];

/// Selections between two numbers or addresses, each with the operation that copies one of them.
const SELECTS: &[(LaneOp, LaneOp)] =
    &[(LaneOp::SelectF32, LaneOp::MovF32), (LaneOp::SelectB64, LaneOp::MovB64)];

/// Conjunctions of two predicates, each with the operation that copies a predicate.
const ANDS: &[(LaneOp, LaneOp)] = &[(LaneOp::AndPred, LaneOp::MovPred)];

/// Selections between two integers, each with the operation that copies one of them.
const NUMBERS: &[(LaneOp, LaneOp)] = &[
    (LaneOp::SelectB32, LaneOp::MovB32),
    (LaneOp::MinU32, LaneOp::MovB32),
    (LaneOp::MaxU32, LaneOp::MovB32),
];

/// Comparisons, each with its opposite.
const OPPOSITES: &[(LaneOp, LaneOp)] =
    &[(LaneOp::EqB32, LaneOp::NeB32), (LaneOp::NeB32, LaneOp::EqB32), (LaneOp::GtU32, LaneOp::LeU32)];

/// Rules that notice that warps disagree about a number or that an address is wrong. Wrong results show it, too.
const LOST: &[Rule] = &[Bounds, I1, Race, Uniform, Deadlock];

pub(super) const OPERATORS: &[Operator] = &[
    Operator::new("bound: one more", &[Bounds, I1, Race, Lanes, Deadlock, T5], |kernel| {
        sites(comparisons(kernel), |line| one_more(kernel, line))
    })
    .or_result(),
    Operator::new("bound: one less", &[I1, Deadlock], |kernel| {
        sites(comparisons(kernel), |line| one_less(kernel, line))
    })
    .or_result(),
    Operator::new("bound: select gives the first", CHOICES, |kernel| chosen(kernel, SELECTS, 0)).or_result(),
    Operator::new("bound: select gives the second", CHOICES, |kernel| chosen(kernel, SELECTS, 1)).or_result(),
    Operator::new("bound: and gives the first", CHOICES, |kernel| chosen(kernel, ANDS, 0)).or_result(),
    Operator::new("bound: and gives the second", CHOICES, |kernel| chosen(kernel, ANDS, 1)).or_result(),
    Operator::new("number: select, min or max gives the first", LOST, |kernel| chosen(kernel, NUMBERS, 0))
        .or_result(),
    Operator::new("number: select, min or max gives the second", LOST, |kernel| chosen(kernel, NUMBERS, 1))
        .or_result(),
    Operator::new("comparison: the opposite", LOST, |kernel| {
        sites(0..kernel.len(), |line| opposite(kernel, line))
    })
    .or_result(),
    Operator::new("number: shuffle leaves each lane its own", LOST, |kernel| {
        sites(0..kernel.len(), |line| kept(kernel, line))
    })
    .or_result(),
    Operator::new("setmaxnreg: + 8", &[], |kernel| {
        let changes = kernel.find(sets_registers);
        sites(changes, |line| more_registers(kernel, line))
    })
    .or_verifier(&["V-16", "V-6"]),
];

/// An unsigned comparison: a < b as a guard, or a >= b as the end of a loop.
fn comparison<'k>(kernel: &Anatomy<'k>, line: usize) -> Option<&'k LaneInst> {
    let Inst::Lane(lane) = kernel.inst(line)? else { return None };
    matches!(lane.op, LaneOp::LtU32 | LaneOp::GeU32).then_some(lane)
}

fn comparisons(kernel: &Anatomy<'_>) -> Vec<usize> {
    (0..kernel.len()).filter(|&line| comparison(kernel, line).is_some()).collect()
}

/// Replaces a < b by a <= b, and a >= b by a > b.
fn one_more(kernel: &Anatomy<'_>, line: usize) -> Option<Site> {
    let lane = comparison(kernel, line)?;
    let op = if lane.op == LaneOp::LtU32 { LaneOp::LeU32 } else { LaneOp::GtU32 };
    let changed = Inst::Lane(LaneInst { op, ..lane.clone() });
    Some(Site::replaced(line, changed).equivalent(harmless_round(kernel, line)))
}

/// Replaces a by a + 1.
fn one_less(kernel: &Anatomy<'_>, line: usize) -> Option<Site> {
    let lane = comparison(kernel, line)?;
    let (next, mut edits) = Edit::compute(kernel, line, LaneOp::AddU32, vec![lane.src[0], constant(1)]);
    let changed = LaneInst { src: vec![next, lane.src[1]], ..lane.clone() };
    edits.push(Edit::Inst(line, Inst::Lane(changed)));
    Some(Site::new(line, edits).equivalent(whole_steps(kernel, line)))
}

/// Replaces operations by a copy of one operand.
fn chosen(kernel: &Anatomy<'_>, copies: &[(LaneOp, LaneOp)], operand: usize) -> Vec<Site> {
    let copied = |line: usize| {
        let Inst::Lane(LaneInst { op: from, dst, src }) = kernel.inst(line)? else { return None };
        let &(_, op) = copies.iter().find(|(op, _)| op == from)?;
        let copied = LaneInst { op, dst: dst.clone(), src: vec![*src.get(operand)?] };
        Some(Site::replaced(line, Inst::Lane(copied)))
    };
    sites(0..kernel.len(), copied)
}

/// Replaces a comparison by its opposite, such as a == b by a != b.
fn opposite(kernel: &Anatomy<'_>, line: usize) -> Option<Site> {
    let Inst::Lane(lane) = kernel.inst(line)? else { return None };
    let &(_, op) = OPPOSITES.iter().find(|(op, _)| *op == lane.op)?;
    Some(Site::replaced(line, Inst::Lane(LaneInst { op, ..lane.clone() })))
}

/// Replaces an integer shuffle by a copy of the lane's own value.
fn kept(kernel: &Anatomy<'_>, line: usize) -> Option<Site> {
    let Inst::Warp(WarpInst::Shfl { ty: Ty::B32, dst, src, .. }) = kernel.inst(line)? else { return None };
    let kept = LaneInst { op: LaneOp::MovB32, dst: vec![*dst], src: vec![Operand::Value(*src)] };
    Some(Site::replaced(line, Inst::Lane(kept)))
}

/// Whether the bounds of a kernel are dimensions of matrices.
fn of_matrices(kernel: &Anatomy<'_>) -> bool {
    kernel
        .kernel
        .params
        .iter()
        .any(|param| param.kind == ParamKind::U32 && ["n", "k"].contains(&&*param.name))
}

/// Reason why a < b may become a <= b: it only chooses between 0 and b - a, or between a and b.
fn chooses_among_equals(kernel: &Anatomy<'_>, lane: &LaneInst) -> Option<&'static str> {
    let pred = Operand::Value(*lane.dst.first()?);
    let uses = kernel.find(|inst| touches(inst, lane.dst[0]) && *inst != Inst::Lane(lane.clone()));
    let chooses = |&line: &usize| matches!(kernel.inst(line), Some(Inst::Lane(LaneInst { op: LaneOp::SelectB32, src, .. })) if src.contains(&pred));
    (!uses.is_empty() && uses.iter().all(chooses))
        .then_some("what it chooses between is equal where the two numbers are")
}

/// Reason why a loop may have an additional iteration: that iteration finds nothing to do.
fn harmless_round(kernel: &Anatomy<'_>, line: usize) -> Option<&'static str> {
    let lane = comparison(kernel, line)?;
    if let Some(reason) = chooses_among_equals(kernel, lane) {
        return Some(reason);
    }
    if !of_matrices(kernel) {
        return None;
    }
    if lane.op == LaneOp::LtU32 {
        return is_first(kernel, line, lane.src[0])
            .then_some("k is at least one, so that the first step is always inside");
    }
    let body = kernel.innermost_loop(line)?;
    let is_access = |inst: &Inst| matches!(inst, Inst::Mem(_));
    let guarded = |&line: &usize| kernel.guard(line).is_some();
    let accesses = kernel.within(body, is_access);
    if !accesses.is_empty() && accesses.iter().all(guarded) {
        return Some("the round has no columns: all it does is guarded by their own bound");
    }
    let serial = kernel.has_one_role() && kernel.has(body, is_load) && kernel.has(body, is_mma);
    let alone = kernel.has(body, |inst| matches!(inst, Inst::Barrier(BarrierInst::SyncCta)));
    (serial && alone).then_some("the round's tiles lie outside the matrices: their products are zeros")
}

/// Reason why a bound may be smaller by one: the loop's steps are larger than one.
fn whole_steps(kernel: &Anatomy<'_>, line: usize) -> Option<&'static str> {
    let lane = comparison(kernel, line)?;
    if !of_matrices(kernel) {
        return steps(kernel, lane);
    }
    if kernel.is_called(lane.src[1], "n") && !kernel.find(stores_pairs).is_empty() {
        return Some("columns are stored in pairs, and n is even");
    }
    let steps = if lane.op == LaneOp::GeU32 {
        kernel.is_called(lane.src[0], "next") && !kernel.is_called(lane.src[1], "n")
    } else {
        kernel.after(line, is_load).is_some()
    };
    steps.then_some("k is a multiple of 8, and a step 64 or 128")
}

/// Reason why a bound may be smaller by one in a loop over KV blocks. Only kernels with products have such loops; in
/// the loops of other kernels, warps take turns.
fn steps(kernel: &Anatomy<'_>, lane: &LaneInst) -> Option<&'static str> {
    kernel.find(is_mma).first()?;
    let Operand::Value(counter) = lane.src[0] else { return None };
    let sums = kernel.find(|inst| matches!(inst, Inst::Set { var, .. } if *var == counter)).into_iter();
    let by_more = sums.filter_map(|line| {
        let Inst::Set { src: Operand::Value(sum), .. } = kernel.inst(line)? else { return None };
        kernel.inst(kernel.definition(*sum)?)
    });
    let step = |inst: &Inst| {
        let Inst::Lane(LaneInst { op: LaneOp::AddU32, src, .. }) = inst else { return None };
        src[1].constant()
    };
    let mut steps = by_more.filter_map(step);
    (lane.op == LaneOp::GeU32 && steps.any(|step| step > 1)).then_some("it and its bound count whole blocks")
}

/// Whether the first column of a loading step is column 0, which is another number plus zero.
fn is_first(kernel: &Anatomy<'_>, line: usize, operand: Operand) -> bool {
    let Operand::Value(value) = operand else { return false };
    let inst = kernel.definition(value).and_then(|line| kernel.inst(line));
    matches!(inst, Some(Inst::Lane(LaneInst { op: LaneOp::AddU32, src, .. })) if src[1] == constant(0))
        && kernel.after(line, is_load).is_some()
}

/// Whether fragments are stored in pairs of columns.
fn stores_pairs(inst: &Inst) -> bool {
    matches!(inst, Inst::Mem(MemInst::Store { src, .. }) if src.len() == 2)
}

fn sets_registers(inst: &Inst) -> bool {
    matches!(inst, Inst::Misc(MiscInst::SetMaxRegisters { .. }))
}

fn more_registers(kernel: &Anatomy<'_>, line: usize) -> Option<Site> {
    let mut inst = kernel.inst(line)?.clone();
    let Inst::Misc(MiscInst::SetMaxRegisters { registers, .. }) = &mut inst else { return None };
    *registers += 8;
    let registers = *registers;
    Some(Site::replaced(line, inst).equivalent(spare_registers(kernel, line, registers)))
}

/// Reason why a warpgroup may take more registers: the pool has enough of them.
fn spare_registers(kernel: &Anatomy<'_>, line: usize, registers: u32) -> Option<&'static str> {
    // All threads start with the same number of registers, a multiple of 8.
    let launch = kernel.kernel.launch;
    let pool = launch.entry_registers() * launch.threads;
    let changes = kernel.find(sets_registers);
    let of = |change: usize| match kernel.inst(change) {
        Some(Inst::Misc(MiscInst::SetMaxRegisters { registers, .. })) => *registers,
        _ => 0,
    };
    let shares = changes.iter().zip(&kernel.kernel.roles).map(|(&change, role)| {
        let warps = role.warps.end - role.warps.start;
        32 * warps * if change == line { registers } else { of(change) }
    });
    (registers <= 256 && shares.sum::<u32>() <= pool).then_some("the pool has registers to spare")
}
