//! Proxy fences, the fence after mbarrier initialization, and the wait for the previous grid.

use fa3_ir::Inst;
use fa3_sim::Rule::*;

use super::{deleted, earlier, later, unless};
use crate::mutate::Operator;
use crate::mutate::kinds::{
    is_grid_wait, is_init, is_init_fence, is_plain_arrival, is_proxy_fence, is_sync, touches_global,
    writes_shared,
};

pub(super) const OPERATORS: &[Operator] = &[
    Operator::new("fence.proxy.async: deleted", &[W4, W5], |kernel| deleted(kernel.find(is_proxy_fence))),
    Operator::new("fence.proxy.async: before the last write", &[W4, W5], |kernel| {
        earlier(kernel, kernel.find(is_proxy_fence), |line| kernel.before(line, writes_shared))
    }),
    Operator::new("fence.proxy.async: after the barrier", &[], |kernel| {
        // If an arrival follows a fence before any barrier does, the fence serves the copy of another thread.
        let is_next = |inst: &Inst| is_sync(inst) || is_plain_arrival(inst);
        let barrier = |line| kernel.after(line, is_next).filter(|&next| kernel.has(next, is_sync));
        let moved = later(kernel, kernel.find(is_proxy_fence), barrier);
        let reason = "the thread that copies passes the fence between the barrier and the copy";
        unless(moved, |_| Some(reason))
    }),
    Operator::new("fence.mbarrier_init: deleted", &[M6], |kernel| deleted(kernel.find(is_init_fence))),
    Operator::new("fence.mbarrier_init: before the last init", &[M6], |kernel| {
        earlier(kernel, kernel.find(is_init_fence), |line| kernel.before(line, is_init))
    }),
    Operator::new("griddepcontrol.wait: after the first access", &[G1], |kernel| {
        later(kernel, kernel.find(is_grid_wait), |line| kernel.after(line, touches_global))
    }),
];
