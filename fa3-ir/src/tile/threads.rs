//! The position of a thread in its CTA, and work for one thread of several.

use std::ops::Range;

use crate::lang::{B32, Builder, V};
use crate::{Fault, Source};

/// Threads of the role that is being built.
impl Builder {
    /// The index of the warpgroup in its role, the same in all lanes.
    #[track_caller]
    pub fn warpgroup(&self) -> V<'_, B32> {
        self.whole_warpgroups();
        let first = self.warps().start / 4;
        let _one = self.as_one();
        // The compiler knows that all lanes of a warp have the same number only if the number comes from one lane.
        let group = (self.tid() >> 7).shfl_idx(0);
        let group = if first == 0 { group } else { group - first };
        group.named("warpgroup")
    }

    /// Runs `body` in one thread of each warp, always the same one. All lanes execute instructions without side
    /// effects, such as address computations.
    #[track_caller]
    pub fn once_per_warp(&self, body: impl FnOnce()) {
        self.guarded_effects(self.elect(), body);
    }

    /// Runs `body` in one thread of each warpgroup, always the same one.
    #[track_caller]
    pub fn once_per_warpgroup(&self, body: impl FnOnce()) {
        self.whole_warpgroups();
        let served = self.served();
        let _one = self.as_one();
        self.once_where(self.tid().bfe(5, 2), 0, served, body);
    }

    /// Runs `body` in one thread of the role (of the CTA, in the prologue), always the same one.
    #[track_caller]
    pub fn once_per_role(&self, body: impl FnOnce()) {
        self.once_in_warp(0, body);
    }

    /// Runs `body` in one thread of the role's warp number `which`, counted from its first, always the same one.
    #[track_caller]
    pub fn once_in_warp(&self, which: u32, body: impl FnOnce()) {
        let Range { start, end } = self.warps();
        let count = end.saturating_sub(start);
        if which >= count {
            self.fault(Fault::Unknown { what: "warp of a role", index: which, count: count as usize });
        }
        let served = self.served();
        let _one = self.as_one();
        self.once_where(self.tid() >> 5, start.saturating_add(which), served, body);
    }

    /// Records a mistake if the role does not begin with a warpgroup: warpgroups are warps 4i to 4i + 3 of the CTA.
    #[track_caller]
    fn whole_warpgroups(&self) {
        let Range { start, end } = self.warps();
        if !start.is_multiple_of(4) {
            self.fault(Fault::Warpgroup { start, end });
        }
    }

    /// Runs `body` in one thread of the warp in which `warp` is `which`, and attributes its statements to `served`.
    fn once_where(&self, warp: V<'_, B32>, which: u32, served: Option<Source>, body: impl FnOnce()) {
        let chosen = warp.shfl_idx(0).eq(which);
        self.if_uniform(chosen, || {
            self.if_lanes(self.elect(), || {
                let _whom = self.on_behalf_of(served);
                body();
            });
        });
    }

    /// Waits for all threads of the cluster.
    #[track_caller]
    pub fn cluster_sync(&self) {
        let _one = self.as_one();
        self.cluster_arrive();
        self.cluster_wait();
    }
}
