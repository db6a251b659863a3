//! Waits for mbarriers, full and empty, and their parities.

use fa3_ir::{Inst, LaneOp, MbarrierInst, Node, Operand, Region, SharedAddr, Stmt, Value};
use fa3_sim::Rule::*;

use super::{constant, deleted, deleted_unless, sites, unless};
use crate::mutate::edit::Edit;
use crate::mutate::kinds::{is_load, is_wait, reads_tile};
use crate::mutate::{Anatomy, Operator, Site};

pub(super) const OPERATORS: &[Operator] = &[
    Operator::new("full wait: deleted", &[Race], |kernel| deleted(kernel.waits(true))),
    Operator::new("full wait: after the first read", &[Race], |kernel| moved(kernel, true, reads_tile)),
    Operator::new("empty wait: deleted", &[W6, T4, Race, M3, M4], |kernel| {
        deleted_unless(kernel, kernel.waits(false), first_round)
    }),
    Operator::new("empty wait: after the first load", &[W6, T4, Race, Deadlock], |kernel| {
        let reason = |line| first_round(kernel, line).or_else(|| behind_keys(kernel, line));
        unless(moved(kernel, false, is_load), reason)
    }),
    Operator::new("full wait: other parity first", &[M3, Race, Deadlock], |kernel| flipped(kernel, true)),
    Operator::new("empty wait: other parity first", &[Deadlock], |kernel| flipped(kernel, false)),
    Operator::new("full wait: parity not toggled", &[M3, Race, Deadlock], |kernel| stuck(kernel, true)),
    Operator::new("empty wait: parity not toggled", &[M3, M4, W6, Deadlock], |kernel| stuck(kernel, false)),
];

/// The mbarrier and the parity that a statement waits for.
fn wait(kernel: &Anatomy<'_>, line: usize) -> Option<(SharedAddr, Operand)> {
    let Some(Inst::Mbarrier(MbarrierInst::Wait { addr, parity })) = kernel.inst(line) else { return None };
    Some((*addr, *parity))
}

/// Moves each wait to after the first statement with an instruction that `to` accepts. The wait keeps its parity. A
/// wait is not moved behind a loop in which its stage is used: any of several phases may then have that parity.
fn moved(kernel: &Anatomy<'_>, full: bool, to: fn(&Inst) -> bool) -> Vec<Site> {
    let site = |line| {
        let (addr, parity) = wait(kernel, line)?;
        let (kept, mut edits) = Edit::compute(kernel, line, LaneOp::MovB32, vec![parity]);
        let inst = Inst::Mbarrier(MbarrierInst::Wait { addr, parity: kept });
        let node = Node::Inst { guard: None, inst };
        let wait = Stmt { node, source: kernel.stmt(line).source };
        let behind = kernel.after(line, to);
        let behind = behind.filter(|&to| full || !matches!(kernel.stmt(to).node, Node::Loop { .. }))?;
        edits.extend([Edit::Delete(line), Edit::After(behind, wait)]);
        Some(Site::new(line, edits))
    };
    sites(kernel.waits(full), site)
}

/// The region of a wait outside of loops, if it is preceded by fewer waits than the region has mbarriers.
fn unrolled(kernel: &Anatomy<'_>, wait: usize) -> Option<Region> {
    let region = kernel.mbarrier(kernel.inst(wait)?)?;
    let waits = kernel.waits_for(region).into_iter().filter(|&other| other <= wait).collect::<Vec<_>>();
    let are_in_no_loop = waits.iter().all(|&wait| kernel.innermost_loop(wait).is_none());
    (are_in_no_loop && waits.len() <= kernel.stages(region)?).then_some(region)
}

/// Reason why the first wait for an empty stage is redundant: outside of loops, the first wait for each stage passes,
/// because the stage is not in use yet.
pub(super) fn first_round(kernel: &Anatomy<'_>, wait: usize) -> Option<&'static str> {
    let room = !kernel.is_full(unrolled(kernel, wait)?);
    room.then_some("the stage has not been in use: the wait passes at once")
}

/// Reason why the wait for Q's stage is redundant. If K and Q have one stage each, the wait for K's stage comes right
/// before it, and the stages are released one right after the other.
fn behind_keys(kernel: &Anatomy<'_>, wait: usize) -> Option<&'static str> {
    let of_q = kernel.mbarrier(kernel.inst(wait)?) == Some(kernel.region_called("q empty")?);
    let one = |empty| Some(kernel.stages(kernel.region_called(empty)?) == Some(1));
    (of_q && one("k empty")? && one("q empty")?)
        .then_some("the only stage of K, which was waited for before, is given back right before Q's")
}

/// The variables that hold wait parities.
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

/// Assignments to parity variables: of constants (`constant`), or of values that an iteration has computed.
fn assignments(kernel: &Anatomy<'_>, full: bool, constant: bool) -> Vec<usize> {
    let parities = parities(kernel, full);
    kernel.find(|inst| {
        matches!(inst, Inst::Set { var, src, .. }
            if parities.contains(var) && matches!(src, Operand::Imm(_)) == constant)
    })
}

/// Gives the waits the opposite parity at the start.
fn flipped(kernel: &Anatomy<'_>, full: bool) -> Vec<Site> {
    let other = |parity: Operand| parity.constant().map(|parity| constant(1 - parity));
    let mut flipped = sites(assignments(kernel, full, true), |line| {
        let Some(Inst::Set { var, ty, src }) = kernel.inst(line) else { return None };
        Some(Site::replaced(line, Inst::Set { var: *var, ty: *ty, src: other(*src)? }))
    });
    flipped.extend(sites(kernel.waits(full), |line| {
        let (addr, parity) = wait(kernel, line)?;
        Some(Site::replaced(line, Inst::Mbarrier(MbarrierInst::Wait { addr, parity: other(parity)? })))
    }));
    flipped
}

/// Deletes one place that toggles a wait's parity.
fn stuck(kernel: &Anatomy<'_>, full: bool) -> Vec<Site> {
    deleted_unless(kernel, assignments(kernel, full, false), no_wrap)
}

/// Reason why an assignment of a parity is redundant: outside of loops, the parity changes only after the last stage.
fn no_wrap(kernel: &Anatomy<'_>, line: usize) -> Option<&'static str> {
    let wait = kernel.before(line, is_wait)?;
    let region = unrolled(kernel, wait)?;
    let rounds = kernel.waits_for(region).into_iter().filter(|&other| other < line).count();
    (rounds < kernel.stages(region)?).then_some("the round is not the last stage's: the parity stays")
}
