//! Fences.

use fa3_ir::FenceInst;

use crate::clock::Space;
use crate::machine::{At, Machine};
use crate::warp::ALL;

impl Machine<'_> {
    pub(super) fn fence(&mut self, at: At, fence: FenceInst) {
        match fence {
            FenceInst::ProxyAsync => {
                self.warp(at).bundle.fence(Space::Shared);
                self.warp(at).bundle.fence(Space::Global);
                self.fence_mbarriers(at);
            }
            FenceInst::ProxyAsyncShared | FenceInst::ProxyAsyncCluster => {
                self.warp(at).bundle.fence(Space::Shared);
                self.fence_mbarriers(at);
            }
            FenceInst::ProxyAsyncGlobal => self.warp(at).bundle.fence(Space::Global),
            FenceInst::MbarrierInit => {
                let fenced = self.fence_mbarriers(at);
                self.warp(at).introduced.extend(fenced);
            }
            FenceInst::AcqRelCta => {
                let warp = self.warp(at);
                let seen = std::mem::take(&mut warp.seen_in_cluster);
                warp.bundle.join(&seen);
                let released = self.released(at);
                self.warp(at).fenced = Some(released);
            }
            FenceInst::AcqRelCluster | FenceInst::AcqRelGpu | FenceInst::AcqRelSystem => {
                let warp = self.warp(at);
                for seen in [std::mem::take(&mut warp.seen_in_cluster), std::mem::take(&mut warp.seen)] {
                    warp.bundle.join(&seen);
                }
                let (released, now) = (self.released(at), self.moment(at));
                let warp = self.warp(at);
                warp.fence_release = (warp.active == ALL).then_some(now);
                warp.fenced = Some(released);
                warp.fenced_on_gpu.clone_from(&warp.fenced);
            }
        }
        self.warp(at).tick();
    }

    /// Fences the mbarriers that the warp has initialised: other warps may use them after acquiring the warp's release.
    /// Returns the components of the initialisations.
    fn fence_mbarriers(&mut self, at: At) -> Vec<u16> {
        let offsets = std::mem::take(&mut self.warp(at).unfenced);
        let mut fenced = Vec::new();
        for offset in offsets {
            if let Some(mbarrier) = self.cta(at).mbarrier(offset) {
                mbarrier.fenced = true;
                fenced.push(mbarrier.initialised.component);
            }
        }
        for &component in &fenced {
            self.warp(at).bundle.generic.raise(component, 1);
        }
        fenced
    }
}
