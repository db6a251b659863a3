//! Fences between proxies, and after the initialisation of mbarriers.

use fa3_ir::{Address, BarrierInst, FenceInst, Inst, MbarrierInst, MemInst, WarpInst};
use fa3_sim::Rule;

use super::{NOTHING, deleted, earlier, later};
use crate::mutate::{Anatomy, Operator};

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
            let moved = later(kernel, kernel.find(is_proxy_fence), |line| kernel.after(line, is_barrier));
            let reason = "the thread that copies passes the fence between the barrier and the copy";
            moved.into_iter().map(|site| site.equivalent(reason)).collect()
        },
        ..NOTHING
    },
    Operator {
        name: "fence.mbarrier_init: deleted",
        rules: &[Rule::M6],
        sites: |kernel| deleted(init_fences(kernel)),
        ..NOTHING
    },
    Operator {
        name: "fence.mbarrier_init: before the last init",
        rules: &[Rule::M6],
        sites: |kernel| earlier(kernel, init_fences(kernel), |line| kernel.before(line, initialises)),
        ..NOTHING
    },
];

fn init_fences(kernel: &Anatomy<'_>) -> Vec<usize> {
    kernel.find(is_init_fence)
}

pub(super) fn is_init_fence(inst: &Inst) -> bool {
    *inst == Inst::Fence(FenceInst::MbarrierInit)
}

pub(super) fn is_proxy_fence(inst: &Inst) -> bool {
    use FenceInst::{ProxyAsync, ProxyAsyncCluster, ProxyAsyncGlobal, ProxyAsyncShared};
    matches!(inst, Inst::Fence(ProxyAsync | ProxyAsyncShared | ProxyAsyncCluster | ProxyAsyncGlobal))
}

pub(super) fn writes_shared(inst: &Inst) -> bool {
    matches!(
        inst,
        Inst::Warp(WarpInst::Stmatrix { .. }) | Inst::Mem(MemInst::Store { addr: Address::Shared(_), .. })
    )
}

fn is_barrier(inst: &Inst) -> bool {
    matches!(inst, Inst::Barrier(BarrierInst::SyncCta | BarrierInst::Sync(_)))
}

pub(super) fn initialises(inst: &Inst) -> bool {
    matches!(inst, Inst::Mbarrier(MbarrierInst::Init { .. }))
}
