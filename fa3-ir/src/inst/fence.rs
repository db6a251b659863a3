//! Fences.

use crate::Inst;
use crate::lang::Builder;

/// A fence of this thread's memory accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FenceInst {
    /// Orders generic and asynchronous accesses to all memory.
    ProxyAsync,
    /// Orders generic and asynchronous accesses to the CTA's shared memory.
    ProxyAsyncShared,
    /// Orders generic and asynchronous accesses to the cluster's shared memory.
    ProxyAsyncCluster,
    /// Orders generic and asynchronous accesses to global memory.
    ProxyAsyncGlobal,
    /// Makes initialised mbarriers visible to the cluster and to asynchronous copies.
    MbarrierInit,
    /// Acquires and releases in the CTA.
    AcqRelCta,
    /// Acquires and releases in the cluster.
    AcqRelCluster,
    /// Acquires and releases on the GPU.
    AcqRelGpu,
    /// Acquires and releases in the system.
    AcqRelSystem,
}

impl FenceInst {
    /// Every fence.
    pub const ALL: [FenceInst; 9] = [
        FenceInst::ProxyAsync,
        FenceInst::ProxyAsyncShared,
        FenceInst::ProxyAsyncCluster,
        FenceInst::ProxyAsyncGlobal,
        FenceInst::MbarrierInit,
        FenceInst::AcqRelCta,
        FenceInst::AcqRelCluster,
        FenceInst::AcqRelGpu,
        FenceInst::AcqRelSystem,
    ];

    /// The fence's PTX.
    pub const fn ptx(self) -> &'static str {
        match self {
            FenceInst::ProxyAsync => "fence.proxy.async",
            FenceInst::ProxyAsyncShared => "fence.proxy.async.shared::cta",
            FenceInst::ProxyAsyncCluster => "fence.proxy.async.shared::cluster",
            FenceInst::ProxyAsyncGlobal => "fence.proxy.async.global",
            FenceInst::MbarrierInit => "fence.mbarrier_init.release.cluster",
            FenceInst::AcqRelCta => "fence.acq_rel.cta",
            FenceInst::AcqRelCluster => "fence.acq_rel.cluster",
            FenceInst::AcqRelGpu => "fence.acq_rel.gpu",
            FenceInst::AcqRelSystem => "fence.acq_rel.sys",
        }
    }
}

/// Fences.
impl Builder {
    /// Orders this thread's memory accesses as `fence` says.
    #[track_caller]
    pub fn fence(&self, fence: FenceInst) {
        self.push(Inst::Fence(fence));
    }
}
