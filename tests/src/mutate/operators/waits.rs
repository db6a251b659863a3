//! Waits for mbarriers, for data ("full") and for room ("empty"), and the parities that they wait for.

use fa3_ir::{
    Imm, Inst, LaneInst, LaneOp, MbarrierInst, Node, Operand, Stmt, TmaInst, Ty, Value, ValueInfo, WarpInst,
};
use fa3_sim::Rule;

use super::{NOTHING, later};
use crate::mutate::anatomy::is_mma;
use crate::mutate::edit::Edit;
use crate::mutate::{Anatomy, Operator, Site};

pub(super) const OPERATORS: &[Operator] = &[
    Operator {
        name: "full wait: deleted",
        rules: &[Rule::Race],
        sites: |kernel| kernel.waits(true).into_iter().map(Site::deleted).collect(),
        ..NOTHING
    },
    Operator {
        name: "full wait: after the first read",
        rules: &[Rule::Race],
        sites: |kernel| moved(kernel, true, reads_tile),
        ..NOTHING
    },
    Operator {
        name: "empty wait: deleted",
        rules: &[Rule::W6, Rule::T4],
        sites: |kernel| {
            let site = |line| Site::deleted(line).equivalent(first_round(kernel, line));
            kernel.waits(false).into_iter().map(site).collect()
        },
        ..NOTHING
    },
    Operator {
        name: "empty wait: after the first load",
        rules: &[Rule::W6, Rule::T4],
        sites: |kernel| {
            let moved = moved(kernel, false, is_load).into_iter();
            moved.map(|site| Site { equivalent: first_round(kernel, site.line), ..site }).collect()
        },
        ..NOTHING
    },
    Operator {
        name: "full wait: other parity first",
        rules: &[Rule::M3, Rule::Race],
        sites: |kernel| flipped(kernel, true),
        ..NOTHING
    },
    Operator {
        name: "empty wait: other parity first",
        rules: &[Rule::Deadlock],
        sites: |kernel| flipped(kernel, false),
        ..NOTHING
    },
    Operator {
        name: "full wait: parity not toggled",
        rules: &[Rule::M3, Rule::Race],
        sites: |kernel| stuck(kernel, true),
        ..NOTHING
    },
    Operator {
        name: "empty wait: parity not toggled",
        rules: &[Rule::M3, Rule::W6],
        sites: |kernel| stuck(kernel, false),
        ..NOTHING
    },
];

fn is_load(inst: &Inst) -> bool {
    matches!(inst, Inst::Tma(TmaInst::Load { .. }))
}

fn reads_tile(inst: &Inst) -> bool {
    is_mma(inst) || matches!(inst, Inst::Tma(TmaInst::Store { .. }) | Inst::Warp(WarpInst::Ldmatrix { .. }))
}

/// The mbarrier and the parity that a statement waits for.
fn wait(kernel: &Anatomy<'_>, line: usize) -> Option<(fa3_ir::SharedAddr, Operand)> {
    let Some(Inst::Mbarrier(MbarrierInst::Wait { addr, parity })) = kernel.inst(line) else { return None };
    Some((*addr, *parity))
}

/// Waits moved to after the first statement with an instruction that `to` accepts. They wait for the parity of before.
fn moved(kernel: &Anatomy<'_>, full: bool, to: fn(&Inst) -> bool) -> Vec<Site> {
    let site = |line| {
        let (addr, parity) = wait(kernel, line)?;
        let Operand::Value(variable) = parity else {
            return later(kernel, vec![line], |line| kernel.after(line, to)).pop();
        };
        let source = kernel.stmt(line).source;
        let kept = Value(kernel.kernel.values.len() as u32);
        let copy = LaneInst { op: LaneOp::MovB32, dst: vec![kept], src: vec![Operand::Value(variable)] };
        let wait = MbarrierInst::Wait { addr, parity: Operand::Value(kept) };
        let stmt = |inst| Stmt { node: Node::Inst { guard: None, inst }, source };
        let edits = vec![
            Edit::Register(ValueInfo { ty: Ty::B32, name: None, mutable: false }),
            Edit::Before(line, stmt(Inst::Lane(copy))),
            Edit::Delete(line),
            Edit::After(kernel.after(line, to)?, stmt(Inst::Mbarrier(wait))),
        ];
        Some(Site::new(line, edits))
    };
    kernel.waits(full).into_iter().filter_map(site).collect()
}

/// A wait for room in no loop, one of as many as there are slots, is for a slot that nobody has used.
pub(super) fn first_round(kernel: &Anatomy<'_>, line: usize) -> Option<&'static str> {
    let inst = kernel.inst(line)?;
    let region = kernel.mbarrier(inst)?;
    let slots = kernel.kernel.smem.get(region)?.bytes / 8;
    let earlier = kernel.find(|other| {
        matches!(other, Inst::Mbarrier(MbarrierInst::Wait { .. })) && kernel.mbarrier(other) == Some(region)
    });
    let earlier = earlier.iter().filter(|&&other| other < line).count();
    let first = kernel.innermost_loop(line).is_none() && earlier < slots as usize && !kernel.is_full(region);
    first.then_some("nobody has used the slot yet: the wait passes at once")
}

/// The variables that hold parities of waits.
fn parities(kernel: &Anatomy<'_>, full: bool) -> Vec<Value> {
    let mut parities: Vec<Value> = Vec::new();
    for line in kernel.waits(full) {
        if let Some((_, Operand::Value(parity))) = wait(kernel, line)
            && !parities.contains(&parity)
        {
            parities.push(parity);
        }
    }
    parities
}

/// The assignments of parities, of a constant or of what a round has computed.
fn assignments(kernel: &Anatomy<'_>, full: bool, constant: bool) -> Vec<usize> {
    let parities = parities(kernel, full);
    kernel.find(|inst| {
        matches!(inst, Inst::Set { var, src, .. }
            if parities.contains(var) && matches!(src, Operand::Imm(_)) == constant)
    })
}

/// Waits that begin with the other parity.
fn flipped(kernel: &Anatomy<'_>, full: bool) -> Vec<Site> {
    let other = |parity: Operand| parity.constant().map(|parity| Operand::Imm(Imm::B32(1 - parity)));
    let initial = assignments(kernel, full, true).into_iter().filter_map(|line| {
        let Some(Inst::Set { var, ty, src }) = kernel.inst(line) else { return None };
        Some(Site::replaced(line, Inst::Set { var: *var, ty: *ty, src: other(*src)? }))
    });
    let constant = kernel.waits(full).into_iter().filter_map(|line| {
        let (addr, parity) = wait(kernel, line)?;
        Some(Site::replaced(line, Inst::Mbarrier(MbarrierInst::Wait { addr, parity: other(parity)? })))
    });
    initial.chain(constant).collect()
}

/// Waits whose parity stays as it is in one place.
fn stuck(kernel: &Anatomy<'_>, full: bool) -> Vec<Site> {
    let site = |line| Site::deleted(line).equivalent(no_wrap(kernel, line));
    assignments(kernel, full, false).into_iter().map(site).collect()
}

/// A round in no loop that comes before the last slot does not toggle.
fn no_wrap(kernel: &Anatomy<'_>, line: usize) -> Option<&'static str> {
    let is_mbarrier_wait = |inst: &Inst| matches!(inst, Inst::Mbarrier(MbarrierInst::Wait { .. }));
    let region = kernel.mbarrier(kernel.inst(kernel.before(line, is_mbarrier_wait)?)?)?;
    let slots = kernel.kernel.smem.get(region)?.bytes / 8;
    let rounds = kernel.find(|other| is_mbarrier_wait(other) && kernel.mbarrier(other) == Some(region));
    let rounds = rounds.iter().filter(|&&other| other < line).count();
    let first = kernel.innermost_loop(line).is_none() && rounds < slots as usize;
    first.then_some("the round is not that of the last slot: the parity stays")
}
