//! The mbarriers of pipelines and others, which are initialised together.

use crate::FenceInst;
use crate::lang::Builder;

impl Builder {
    /// Initialises the mbarriers declared so far, in one thread, and synchronises the CTA, or its cluster if the kernel
    /// has clusters. The call belongs in the prologue.
    #[track_caller]
    pub fn init_mbarriers(&self) {
        let (barriers, cluster) = (self.mbarrier_regions(), self.launch().cluster);
        let _one = self.as_one();
        self.once_per_role(|| {
            for (region, count, arrivals) in barriers {
                (0..count).for_each(|index| self.mbarrier_init(region.at(8 * index as i32), arrivals));
            }
            self.fence(FenceInst::MbarrierInit);
        });
        if cluster > 1 { self.cluster_sync() } else { self.sync_cta() }
    }
}
