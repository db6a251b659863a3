//! Bounds that are off by one, and registers that are not there.

use fa3_ir::{
    BarrierInst, Imm, Inst, LaneInst, LaneOp, MemInst, MiscInst, Node, Operand, Stmt, TmaInst, Ty, Value,
    ValueInfo,
};
use fa3_sim::Rule;

use super::NOTHING;
use crate::mutate::anatomy::is_mma;
use crate::mutate::edit::Edit;
use crate::mutate::{Anatomy, Operator, Site};

pub(super) const OPERATORS: &[Operator] = &[
    Operator {
        name: "bound: one more",
        rules: &[Rule::Bounds, Rule::I1, Rule::Race, Rule::Deadlock, Rule::T5],
        sites: |kernel| comparisons(kernel).into_iter().filter_map(|line| one_more(kernel, line)).collect(),
        ..NOTHING
    },
    Operator {
        name: "bound: one less",
        rules: &[Rule::I1, Rule::Deadlock],
        result: true,
        sites: |kernel| comparisons(kernel).into_iter().filter_map(|line| one_less(kernel, line)).collect(),
        ..NOTHING
    },
    Operator {
        name: "setmaxnreg: + 8",
        verifier: &["V-16"],
        sites: |kernel| {
            let changes = kernel.find(|inst| matches!(inst, Inst::Misc(MiscInst::SetMaxRegisters { .. })));
            let changed = changes.into_iter().filter_map(|line| {
                let Some(Inst::Misc(MiscInst::SetMaxRegisters { increase, registers })) = kernel.inst(line)
                else {
                    return None;
                };
                let more = MiscInst::SetMaxRegisters { increase: *increase, registers: registers + 8 };
                Some(Site::replaced(line, Inst::Misc(more)))
            });
            changed.collect()
        },
        ..NOTHING
    },
];

/// A comparison a < b that guards, or a >= b that ends a loop, of unsigned numbers.
fn comparison<'k>(kernel: &Anatomy<'k>, line: usize) -> Option<&'k LaneInst> {
    let Inst::Lane(lane) = kernel.inst(line)? else { return None };
    matches!(lane.op, LaneOp::LtU32 | LaneOp::GeU32).then_some(lane)
}

fn comparisons(kernel: &Anatomy<'_>) -> Vec<usize> {
    (0..kernel.len()).filter(|&line| comparison(kernel, line).is_some()).collect()
}

/// a <= b for a < b, a > b for a >= b.
fn one_more(kernel: &Anatomy<'_>, line: usize) -> Option<Site> {
    let lane = comparison(kernel, line)?;
    let op = if lane.op == LaneOp::LtU32 { LaneOp::LeU32 } else { LaneOp::GtU32 };
    let changed = Inst::Lane(LaneInst { op, ..lane.clone() });
    Some(Site::replaced(line, changed).equivalent(harmless_round(kernel, line)))
}

/// a + 1 for a.
fn one_less(kernel: &Anatomy<'_>, line: usize) -> Option<Site> {
    let lane = comparison(kernel, line)?;
    let next = Value(kernel.kernel.values.len() as u32);
    let one = Operand::Imm(Imm::B32(1));
    let sum = LaneInst { op: LaneOp::AddU32, dst: vec![next], src: vec![lane.src[0], one] };
    let stmt =
        Stmt { node: Node::Inst { guard: None, inst: Inst::Lane(sum) }, source: kernel.stmt(line).source };
    let changed = LaneInst { src: vec![Operand::Value(next), lane.src[1]], ..lane.clone() };
    let edits = vec![
        Edit::Register(ValueInfo { ty: Ty::B32, name: None, mutable: false }),
        Edit::Before(line, stmt),
        Edit::Inst(line, Inst::Lane(changed)),
    ];
    Some(Site::new(line, edits).equivalent(whole_steps(kernel, line)))
}

/// One round too many of a loop may find nothing to do.
fn harmless_round(kernel: &Anatomy<'_>, line: usize) -> Option<&'static str> {
    let lane = comparison(kernel, line)?;
    if lane.op == LaneOp::LtU32 {
        return is_first(kernel, lane.src[0])
            .then_some("k is at least one, so that the first step is always inside");
    }
    let body = kernel.innermost_loop(line)?;
    let is_access = |inst: &Inst| matches!(inst, Inst::Mem(_));
    let guarded = |&line: &usize| matches!(kernel.stmt(line).node, Node::Inst { guard: Some(_), .. });
    let accesses = kernel.within(body, is_access);
    if !accesses.is_empty() && accesses.iter().all(guarded) {
        return Some("the round has no columns: all it does is guarded by their own bound");
    }
    let serial = kernel.kernel.roles.is_empty() && kernel.has(body, is_load) && kernel.has(body, is_mma);
    let alone = kernel.has(body, |inst| matches!(inst, Inst::Barrier(BarrierInst::SyncCta)));
    (serial && alone).then_some("the round's tiles lie outside the matrices: their products are zeros")
}

/// One less of what comes in larger steps is none less.
fn whole_steps(kernel: &Anatomy<'_>, line: usize) -> Option<&'static str> {
    let lane = comparison(kernel, line)?;
    if is_called(kernel, lane.src[1], "n") && !kernel.find(stores_pairs).is_empty() {
        return Some("columns are stored in pairs, and n is even");
    }
    let steps = match lane.op {
        LaneOp::GeU32 => is_called(kernel, lane.src[0], "next") && !is_called(kernel, lane.src[1], "n"),
        _ => kernel.after(line, is_load).is_some(),
    };
    steps.then_some("k is a multiple of 8, and a step 64 or 128")
}

/// Whether a number is another one, and zero.
fn is_first(kernel: &Anatomy<'_>, operand: Operand) -> bool {
    let zero = Operand::Imm(Imm::B32(0));
    let Operand::Value(value) = operand else { return false };
    let inst = kernel.definition(value).and_then(|line| kernel.inst(line));
    matches!(inst, Some(Inst::Lane(LaneInst { op: LaneOp::AddU32, src, .. })) if src[1] == zero)
        && kernel.kernel.roles.is_empty()
}

fn is_called(kernel: &Anatomy<'_>, operand: Operand, name: &str) -> bool {
    let Operand::Value(value) = operand else { return false };
    kernel.kernel.values[value.0 as usize].name.as_deref() == Some(name)
}

/// Whether fragments are stored in pairs of columns.
fn stores_pairs(inst: &Inst) -> bool {
    matches!(inst, Inst::Mem(MemInst::Store { src, .. }) if src.len() == 2)
}

fn is_load(inst: &Inst) -> bool {
    matches!(inst, Inst::Tma(TmaInst::Load { .. }))
}
