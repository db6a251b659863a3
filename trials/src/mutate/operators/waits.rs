//! Waits for mbarriers, for data ("full") and for room ("empty"), and the parities that they wait for.

use fa3_ir::{Imm, Inst, LaneOp, MbarrierInst, Node, Operand, Region, SharedAddr, Stmt, Value};
use fa3_sim::Rule;

use super::{NOTHING, deleted, deleted_unless};
use crate::mutate::edit::Edit;
use crate::mutate::kinds::{is_load, is_wait, reads_tile};
use crate::mutate::{Anatomy, Operator, Site};

pub(super) const OPERATORS: &[Operator] = &[
    Operator {
        name: "full wait: deleted",
        rules: &[Rule::Race],
        sites: |kernel| deleted(kernel.waits(true)),
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
        rules: &[Rule::W6, Rule::T4, Rule::Race, Rule::M3, Rule::M4],
        sites: |kernel| deleted_unless(kernel, kernel.waits(false), first_round),
        ..NOTHING
    },
    Operator {
        name: "empty wait: after the first load",
        rules: &[Rule::W6, Rule::T4, Rule::Race, Rule::Deadlock],
        sites: |kernel| {
            let moved = moved(kernel, false, is_load).into_iter();
            // Behind a loop of loads the slot has been used.
            let is_loop = |load| matches!(kernel.stmt(load).node, Node::Loop { .. });
            let at_once = |line| {
                first_round(kernel, line).filter(|_| !kernel.after(line, is_load).is_some_and(is_loop))
            };
            let reason = |line| at_once(line).or_else(|| behind_keys(kernel, line));
            moved.map(|site| Site { equivalent: reason(site.line), ..site }).collect()
        },
        ..NOTHING
    },
    Operator {
        name: "full wait: other parity first",
        rules: &[Rule::M3, Rule::Race, Rule::Deadlock],
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
        rules: &[Rule::M3, Rule::Race, Rule::Deadlock],
        sites: |kernel| stuck(kernel, true),
        ..NOTHING
    },
    Operator {
        name: "empty wait: parity not toggled",
        rules: &[Rule::M3, Rule::M4, Rule::W6, Rule::Deadlock],
        sites: |kernel| stuck(kernel, false),
        ..NOTHING
    },
];

/// The mbarrier and the parity that a statement waits for.
fn wait(kernel: &Anatomy<'_>, line: usize) -> Option<(SharedAddr, Operand)> {
    let Some(Inst::Mbarrier(MbarrierInst::Wait { addr, parity })) = kernel.inst(line) else { return None };
    Some((*addr, *parity))
}

/// Waits moved to after the first statement with an instruction that `to` accepts. They wait for the parity of before.
fn moved(kernel: &Anatomy<'_>, full: bool, to: fn(&Inst) -> bool) -> Vec<Site> {
    let site = |line| {
        let (addr, parity) = wait(kernel, line)?;
        let (kept, mut edits) = Edit::compute(kernel, line, LaneOp::MovB32, vec![parity]);
        let inst = Inst::Mbarrier(MbarrierInst::Wait { addr, parity: kept });
        let node = Node::Inst { guard: None, inst };
        let wait = Stmt { node, source: kernel.stmt(line).source };
        edits.extend([Edit::Delete(line), Edit::After(kernel.after(line, to)?, wait)]);
        Some(Site::new(line, edits))
    };
    kernel.waits(full).into_iter().filter_map(site).collect()
}

/// The region that a wait in no loop is for, if fewer waits than it has mbarriers come before.
fn unrolled(kernel: &Anatomy<'_>, wait: usize) -> Option<Region> {
    let region = kernel.mbarrier(kernel.inst(wait)?)?;
    let earlier = kernel.waits_for(region).into_iter().filter(|&other| other < wait).count();
    (kernel.innermost_loop(wait).is_none() && earlier < kernel.slots(region)?).then_some(region)
}

/// A wait for room in no loop, one of as many as there are slots, is for a slot that nobody has used.
pub(super) fn first_round(kernel: &Anatomy<'_>, wait: usize) -> Option<&'static str> {
    let room = !kernel.is_full(unrolled(kernel, wait)?);
    room.then_some("nobody has used the slot yet: the wait passes at once")
}

/// Where there is one slot for K and one for Q, the wait for K's comes right before that for Q's, which is given back
/// right after it.
fn behind_keys(kernel: &Anatomy<'_>, wait: usize) -> Option<&'static str> {
    let of_q = kernel.mbarrier(kernel.inst(wait)?) == Some(kernel.region_called("q empty")?);
    let one = |empty| Some(kernel.slots(kernel.region_called(empty)?) == Some(1));
    (of_q && one("k empty")? && one("q empty")?)
        .then_some("the only slot of K, which was waited for before, is given back right before Q's")
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
    deleted_unless(kernel, assignments(kernel, full, false), no_wrap)
}

/// A round in no loop that comes before that of the last slot does not toggle.
fn no_wrap(kernel: &Anatomy<'_>, line: usize) -> Option<&'static str> {
    let wait = kernel.before(line, is_wait)?;
    let region = unrolled(kernel, wait)?;
    let rounds = kernel.waits_for(region).into_iter().filter(|&other| other < line).count();
    (rounds < kernel.slots(region)?).then_some("the round is not that of the last slot: the parity stays")
}
