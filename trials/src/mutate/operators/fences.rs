//! Fences between proxies and after the initialisation of mbarriers, and the wait for the grid before.

use fa3_ir::Inst;
use fa3_sim::Rule;

use super::{NOTHING, deleted, earlier, later};
use crate::mutate::Operator;
use crate::mutate::kinds::{
    is_grid_wait, is_init, is_init_fence, is_plain_arrival, is_proxy_fence, is_sync, touches_global,
    writes_shared,
};

pub(super) const OPERATORS: &[Operator] = &[
    Operator {
        name: "fence.proxy.async: deleted",
        rules: &[Rule::W4, Rule::W5],
        sites: |kernel| deleted(kernel.find(is_proxy_fence)),
        ..NOTHING
    },
    Operator {
        name: "fence.proxy.async: before the last write",
        rules: &[Rule::W4, Rule::W5],
        sites: |kernel| {
            earlier(kernel, kernel.find(is_proxy_fence), |line| kernel.before(line, writes_shared))
        },
        ..NOTHING
    },
    Operator {
        name: "fence.proxy.async: after the barrier",
        sites: |kernel| {
            // A fence before a slot is given back is for another thread's copy.
            let is_next = |inst: &Inst| is_sync(inst) || is_plain_arrival(inst);
            let barrier = |line| kernel.after(line, is_next).filter(|&next| kernel.has(next, is_sync));
            let moved = later(kernel, kernel.find(is_proxy_fence), barrier);
            let reason = "the thread that copies passes the fence between the barrier and the copy";
            moved.into_iter().map(|site| site.equivalent(reason)).collect()
        },
        ..NOTHING
    },
    Operator {
        name: "fence.mbarrier_init: deleted",
        rules: &[Rule::M6],
        sites: |kernel| deleted(kernel.find(is_init_fence)),
        ..NOTHING
    },
    Operator {
        name: "fence.mbarrier_init: before the last init",
        rules: &[Rule::M6],
        sites: |kernel| earlier(kernel, kernel.find(is_init_fence), |line| kernel.before(line, is_init)),
        ..NOTHING
    },
    Operator {
        name: "griddepcontrol.wait: after the first access",
        rules: &[Rule::G1],
        sites: |kernel| later(kernel, kernel.find(is_grid_wait), |line| kernel.after(line, touches_global)),
        ..NOTHING
    },
];
