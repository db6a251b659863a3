//! Copies: multicast masks of loads, commit groups of stores, and the waits for these groups.

use fa3_ir::{Imm, Inst, LaneInst, LaneOp, Node, Operand, TmaInst};
use fa3_sim::Rule::*;

use super::barriers::first_use;
use super::{constant, deleted, deleted_unless, later, sites, unless};
use crate::mutate::kinds::{is_bulk_commit, is_bulk_wait, is_load};
use crate::mutate::{Anatomy, Operator, Site};

pub(super) const OPERATORS: &[Operator] = &[
    Operator::new("load: to the first CTA of the cluster alone", &[M5, Deadlock], |kernel| {
        sites(kernel.find(is_load), |line| to_first(kernel, line))
    }),
    Operator::new("bulk commit_group: deleted", &[T2, T3, T5], |kernel| deleted(kernel.find(is_bulk_commit))),
    Operator::new("bulk commit_group: after the wait", &[T2, T3, T5], |kernel| {
        later(kernel, kernel.find(is_bulk_commit), |line| kernel.after(line, is_bulk_wait))
    }),
    Operator::new("bulk wait_group: deleted", &[T2, T4, T5], |kernel| {
        deleted_unless(kernel, kernel.find(is_bulk_wait), first_use)
    }),
    Operator::new("bulk wait_group: + 1", &[T2, T4, T5], |kernel| {
        let more = |pending, read| TmaInst::Wait { pending: pending + 1, read };
        unless(waiting(kernel, more), |line| first_use(kernel, line))
    }),
    Operator::new("bulk wait_group: not .read", &[], |kernel| {
        let whole = |pending, _| TmaInst::Wait { pending, read: false };
        let reads =
            |site: &Site| matches!(kernel.inst(site.line), Some(Inst::Tma(TmaInst::Wait { read: true, .. })));
        let reason = "a copy that is complete has been read";
        waiting(kernel, whole).into_iter().filter(reads).map(|site| site.equivalent(reason)).collect()
    }),
    Operator::new("bulk wait_group: by another warp", &[T2, T3, T5], |kernel| {
        let moved = sites(kernel.find(is_bulk_wait), |line| elsewhere(kernel, line));
        unless(moved, |line| first_use(kernel, line))
    }),
];

/// Makes the first CTA the only destination of a multicast load.
fn to_first(kernel: &Anatomy<'_>, line: usize) -> Option<Site> {
    let mut load = kernel.inst(line)?.clone();
    let Inst::Tma(TmaInst::Load { options, .. }) = &mut load else { return None };
    let mask = options.multicast.as_mut()?;
    *mask = Operand::Imm(Imm::B16(1));
    Some(Site::replaced(line, load))
}

fn waiting(kernel: &Anatomy<'_>, change: fn(u32, bool) -> TmaInst) -> Vec<Site> {
    sites(kernel.find(is_bulk_wait), |line| {
        let Some(Inst::Tma(TmaInst::Wait { pending, read })) = kernel.inst(line) else { return None };
        Some(Site::replaced(line, Inst::Tma(change(*pending, *read))))
    })
}

/// Moves a wait for a copy from warp 0 of a warpgroup to warp 1, if the copy is not in the same branch.
fn elsewhere(kernel: &Anatomy<'_>, line: usize) -> Option<Site> {
    let branch = kernel.outer_branch(line)?;
    let Node::If { condition, .. } = &kernel.stmt(branch).node else { return None };
    let chooses = kernel.definition(condition.pred)?;
    let Inst::Lane(LaneInst { op: LaneOp::EqB32, dst, src }) = kernel.inst(chooses)? else { return None };
    if kernel.has(branch, is_bulk_commit) {
        return None;
    }
    let src = vec![src[0], constant(src[1].constant()? + 1)];
    let mut site = Site::replaced(chooses, Inst::Lane(LaneInst { op: LaneOp::EqB32, dst: dst.clone(), src }));
    site.line = line;
    Some(site)
}
