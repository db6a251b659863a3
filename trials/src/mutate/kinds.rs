//! Kinds of instructions.

use fa3_ir::{
    Address, BarrierInst, FenceInst, Inst, MbarrierInst, MemInst, MiscInst, Mma, TmaInst, WarpInst, WgmmaInst,
};

/// The product that an instruction begins.
pub(super) fn mma(inst: &Inst) -> Option<&Mma> {
    if let Inst::Wgmma(WgmmaInst::Mma(mma)) = inst { Some(mma) } else { None }
}

pub(super) fn is_mma(inst: &Inst) -> bool {
    mma(inst).is_some()
}

/// Whether an instruction waits for products.
pub(super) fn is_product_wait(inst: &Inst) -> bool {
    matches!(inst, Inst::Wgmma(WgmmaInst::Wait { .. }))
}

/// Whether an instruction initializes an mbarrier.
pub(super) fn is_init(inst: &Inst) -> bool {
    matches!(inst, Inst::Mbarrier(MbarrierInst::Init { .. }))
}

/// Whether an instruction waits for an mbarrier.
pub(super) fn is_wait(inst: &Inst) -> bool {
    matches!(inst, Inst::Mbarrier(MbarrierInst::Wait { .. }))
}

/// Whether an instruction arrives at an mbarrier without expecting bytes.
pub(super) fn is_plain_arrival(inst: &Inst) -> bool {
    matches!(inst, Inst::Mbarrier(MbarrierInst::Arrive { .. } | MbarrierInst::ArriveRemote { .. }))
}

pub(super) fn is_init_fence(inst: &Inst) -> bool {
    *inst == Inst::Fence(FenceInst::MbarrierInit)
}

/// Whether an instruction waits for the previous grid (griddepcontrol.wait).
pub(super) fn is_grid_wait(inst: &Inst) -> bool {
    *inst == Inst::Misc(MiscInst::GridDependencyWait)
}

pub(super) fn is_proxy_fence(inst: &Inst) -> bool {
    use FenceInst::{ProxyAsync, ProxyAsyncCluster, ProxyAsyncGlobal, ProxyAsyncShared};
    matches!(inst, Inst::Fence(ProxyAsync | ProxyAsyncShared | ProxyAsyncCluster | ProxyAsyncGlobal))
}

/// Whether an instruction synchronizes on a CTA barrier or a named barrier.
pub(super) fn is_sync(inst: &Inst) -> bool {
    matches!(inst, Inst::Barrier(BarrierInst::SyncCta | BarrierInst::Sync(_)))
}

/// Whether an instruction synchronizes the lanes of a warp.
pub(super) fn is_warp_sync(inst: &Inst) -> bool {
    *inst == Inst::Warp(WarpInst::Sync)
}

/// Whether an instruction is a tensor copy into shared memory.
pub(super) fn is_load(inst: &Inst) -> bool {
    matches!(inst, Inst::Tma(TmaInst::Load { .. }))
}

/// Whether an instruction is a tensor copy out of shared memory.
pub(super) fn is_copy_out(inst: &Inst) -> bool {
    let Inst::Tma(inst) = inst else { return false };
    matches!(
        inst,
        TmaInst::Store { .. }
            | TmaInst::ReduceAdd { .. }
            | TmaInst::BulkStore { .. }
            | TmaInst::BulkReduceAddF32 { .. }
    )
}

pub(super) fn is_bulk_commit(inst: &Inst) -> bool {
    *inst == Inst::Tma(TmaInst::Commit)
}

pub(super) fn is_bulk_wait(inst: &Inst) -> bool {
    matches!(inst, Inst::Tma(TmaInst::Wait { .. }))
}

/// Whether an instruction accesses, by the generic proxy, global memory that the previous grid may write.
pub(super) fn touches_global(inst: &Inst) -> bool {
    matches!(
        inst,
        Inst::Mem(
            MemInst::Load { addr: Address::Global(_), .. } | MemInst::Store { addr: Address::Global(_), .. }
        )
    )
}

/// Whether an instruction accesses memory by the generic proxy.
pub(super) fn is_access(inst: &Inst) -> bool {
    let is_parameter = matches!(inst, Inst::Mem(MemInst::LoadParam { .. }));
    let matrices = matches!(inst, Inst::Warp(WarpInst::Ldmatrix { .. } | WarpInst::Stmatrix { .. }));
    matrices || matches!(inst, Inst::Mem(_)) && !is_parameter
}

/// Whether an instruction writes shared memory by the generic proxy.
pub(super) fn writes_shared(inst: &Inst) -> bool {
    matches!(
        inst,
        Inst::Warp(WarpInst::Stmatrix { .. }) | Inst::Mem(MemInst::Store { addr: Address::Shared(_), .. })
    )
}

/// Whether an instruction reads a tile of shared memory, by any proxy.
pub(super) fn reads_tile(inst: &Inst) -> bool {
    is_mma(inst) || is_copy_out(inst) || matches!(inst, Inst::Warp(WarpInst::Ldmatrix { .. }))
}
