//! Copies: whom loads reach, and the groups of stores and the waits for them.

use fa3_ir::{Imm, Inst, LaneInst, LaneOp, Node, Operand, TmaInst};
use fa3_sim::Rule;

use super::barriers::first_use;
use super::{NOTHING, deleted, deleted_unless, later};
use crate::mutate::kinds::{is_bulk_commit, is_bulk_wait, is_load};
use crate::mutate::{Anatomy, Operator, Site};

pub(super) const OPERATORS: &[Operator] = &[
    Operator {
        name: "load: to the first CTA of the cluster alone",
        rules: &[Rule::M5, Rule::Deadlock],
        sites: |kernel| {
            let loads = kernel.find(is_load).into_iter();
            loads.filter_map(|line| to_first(kernel, line)).collect()
        },
        ..NOTHING
    },
    Operator {
        name: "bulk commit_group: deleted",
        rules: &[Rule::T2, Rule::T3, Rule::T5],
        sites: |kernel| deleted(kernel.find(is_bulk_commit)),
        ..NOTHING
    },
    Operator {
        name: "bulk commit_group: after the wait",
        rules: &[Rule::T2, Rule::T3, Rule::T5],
        sites: |kernel| later(kernel, kernel.find(is_bulk_commit), |line| kernel.after(line, is_bulk_wait)),
        ..NOTHING
    },
    Operator {
        name: "bulk wait_group: deleted",
        rules: &[Rule::T2, Rule::T4, Rule::T5],
        sites: |kernel| deleted_unless(kernel, kernel.find(is_bulk_wait), first_use),
        ..NOTHING
    },
    Operator {
        name: "bulk wait_group: + 1",
        rules: &[Rule::T2, Rule::T4, Rule::T5],
        sites: |kernel| {
            let more = |pending, read| TmaInst::Wait { pending: pending + 1, read };
            let sites = waiting(kernel, more).into_iter();
            sites.map(|site| Site { equivalent: first_use(kernel, site.line), ..site }).collect()
        },
        ..NOTHING
    },
    Operator {
        name: "bulk wait_group: not .read",
        sites: |kernel| {
            let whole = |pending, _| TmaInst::Wait { pending, read: false };
            let reads = |site: &Site| {
                matches!(kernel.inst(site.line), Some(Inst::Tma(TmaInst::Wait { read: true, .. })))
            };
            let reason = "a copy that is complete has been read";
            waiting(kernel, whole).into_iter().filter(reads).map(|site| site.equivalent(reason)).collect()
        },
        ..NOTHING
    },
    Operator {
        name: "bulk wait_group: by another warp",
        rules: &[Rule::T2, Rule::T3, Rule::T5],
        sites: |kernel| {
            let sites = kernel.find(is_bulk_wait).into_iter().filter_map(|line| elsewhere(kernel, line));
            sites.map(|site| Site { equivalent: first_use(kernel, site.line), ..site }).collect()
        },
        ..NOTHING
    },
];

/// A load for several CTAs, for the first alone.
fn to_first(kernel: &Anatomy<'_>, line: usize) -> Option<Site> {
    let mut load = kernel.inst(line)?.clone();
    let Inst::Tma(TmaInst::Load { options, .. }) = &mut load else { return None };
    let mask = options.multicast.as_mut()?;
    *mask = Operand::Imm(Imm::B16(1));
    Some(Site::replaced(line, load))
}

fn waiting(kernel: &Anatomy<'_>, change: fn(u32, bool) -> TmaInst) -> Vec<Site> {
    let waits = kernel.find(is_bulk_wait).into_iter();
    let changed = waits.filter_map(|line| {
        let Some(Inst::Tma(TmaInst::Wait { pending, read })) = kernel.inst(line) else { return None };
        Some(Site::replaced(line, Inst::Tma(change(*pending, *read))))
    });
    changed.collect()
}

/// The wait that warp 0 of a warpgroup does, by warp 1 instead, if the copy is not in the same branch.
fn elsewhere(kernel: &Anatomy<'_>, line: usize) -> Option<Site> {
    let branch = kernel.outer_branch(line)?;
    let Node::If { condition, .. } = &kernel.stmt(branch).node else { return None };
    let chooses = kernel.definition(condition.pred)?;
    let Inst::Lane(LaneInst { op: LaneOp::EqB32, dst, src }) = kernel.inst(chooses)? else { return None };
    if kernel.has(branch, is_bulk_commit) {
        return None;
    }
    let other = Operand::Imm(Imm::B32(src[1].constant()? + 1));
    let src = vec![src[0], other];
    let mut site = Site::replaced(chooses, Inst::Lane(LaneInst { op: LaneOp::EqB32, dst: dst.clone(), src }));
    site.line = line;
    Some(site)
}
