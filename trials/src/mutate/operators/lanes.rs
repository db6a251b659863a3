//! Operators on the order between the lanes of a warp.

use fa3_ir::{Condition, Inst, WarpInst};
use fa3_sim::Rule::*;

use super::{deleted_unless, later};
use crate::mutate::kinds::{is_access, is_plain_arrival, is_sync, is_warp_sync, writes_shared};
use crate::mutate::{Anatomy, Operator};

pub(super) const OPERATORS: &[Operator] = &[
    Operator::new("bar.warp.sync: deleted", &[Lanes], |kernel| {
        deleted_unless(kernel, kernel.find(is_warp_sync), orders_nothing)
    }),
    Operator::new("bar.warp.sync: after the arrival", &[Lanes], |kernel| {
        let syncs = kernel.find(is_warp_sync).into_iter();
        let ordering = syncs.filter(|&line| orders_nothing(kernel, line).is_none()).collect();
        later(kernel, ordering, |line| kernel.after(line, is_plain_arrival))
    }),
];

/// Elects one lane.
fn is_election(inst: &Inst) -> bool {
    matches!(inst, Inst::Warp(WarpInst::Elect { .. }))
}

/// Reason why the lanes of a warp need no order at a barrier: they access nothing between the previous barrier and this
/// one, or release nothing between this barrier and the next.
fn orders_nothing(kernel: &Anatomy<'_>, line: usize) -> Option<&'static str> {
    let is_barrier = |inst: &Inst| is_warp_sync(inst) || is_sync(inst);
    let barriers = kernel.find(is_barrier);
    let before = barriers.iter().rev().find(|&&other| other < line).map_or(0, |&other| other);
    let next = barriers.iter().find(|&&other| other > line).map_or(kernel.len(), |&other| other);
    let is_elected =
        |guard: Condition| kernel.definition(guard.pred).is_some_and(|line| kernel.has(line, is_election));
    let by_several = |&other: &usize| {
        let stored = kernel.has(other, writes_shared);
        let is_one = kernel.guard(other).is_some_and(|guard| !stored || is_elected(guard));
        !kernel.in_lanes(other) && !is_one
    };
    let accessed =
        kernel.find(is_access).into_iter().filter(by_several).any(|other| (before..line).contains(&other));
    let arrival = kernel.after(line, is_plain_arrival).is_some_and(|arrival| {
        kernel.find(is_plain_arrival).into_iter().any(|other| (arrival..next).contains(&other))
    });
    match (accessed, arrival) {
        (false, _) => Some("the lanes have accessed nothing since the barrier before"),
        (true, false) => Some("none of the lanes releases anything before the next barrier"),
        (true, true) => None,
    }
}
