//! Who a thread is, and work for one thread of several.

use std::ops::Range;

use crate::{B32, Builder, Fault, V};

/// Threads of the role that is being built.
impl Builder {
    /// The warpgroup among those of its role, the same in all lanes.
    #[track_caller]
    pub fn warpgroup(&mut self) -> V<B32> {
        self.whole_warpgroups();
        let first = self.warps().start / 4;
        self.as_one(|b| {
            let tid = b.tid();
            let group = b.shr_u32(tid, 7);
            // The compiler cannot know that a warp's threads agree; taken from one lane, it does.
            let group = b.shfl_idx(group, 0);
            let group = if first == 0 { group } else { b.sub(group, first) };
            b.name(group, "warpgroup")
        })
    }

    /// Runs `body` in one thread of each warp, always the same one.
    #[track_caller]
    pub fn once_per_warp(&mut self, body: impl FnOnce(&mut Builder)) {
        let one = self.elect();
        self.guarded(one, body);
    }

    /// Runs `body` in one thread of each warpgroup, always the same one.
    #[track_caller]
    pub fn once_per_warpgroup(&mut self, body: impl FnOnce(&mut Builder)) {
        self.whole_warpgroups();
        let warp = self.as_one(|b| {
            let tid = b.tid();
            b.bfe_u32(tid, 5, 2)
        });
        self.once_where(warp, 0, body);
    }

    /// Runs `body` in one thread of the role (of the CTA, in the prologue), always the same one.
    #[track_caller]
    pub fn once_per_role(&mut self, body: impl FnOnce(&mut Builder)) {
        self.once_in_warp(0, body);
    }

    /// Runs `body` in one thread of the role's warp number `which`, counted from its first, always the same one.
    #[track_caller]
    pub fn once_in_warp(&mut self, which: u32, body: impl FnOnce(&mut Builder)) {
        let Range { start, end } = self.warps();
        let count = end.saturating_sub(start);
        if which >= count {
            self.fault(Fault::Unknown { what: "warp of a role", index: which, count: count as usize });
        }
        let warp = self.as_one(|b| {
            let tid = b.tid();
            b.shr_u32(tid, 5)
        });
        self.once_where(warp, start.saturating_add(which), body);
    }

    /// Warpgroups are warps 4i to 4i + 3, whatever warp a role begins with.
    #[track_caller]
    fn whole_warpgroups(&mut self) {
        let Range { start, end } = self.warps();
        if !start.is_multiple_of(4) {
            self.fault(Fault::Warpgroup { start, end });
        }
    }

    #[track_caller]
    fn once_where(&mut self, warp: V<B32>, which: u32, body: impl FnOnce(&mut Builder)) {
        let served = self.served();
        self.as_one(|b| {
            let warp = b.shfl_idx(warp, 0);
            let chosen = b.eq_b32(warp, which);
            b.if_uniform(chosen, |b| {
                let one = b.elect();
                b.if_lanes(one, |b| b.on_behalf_of(served, body));
            });
        });
    }

    /// Waits for all threads of the cluster.
    #[track_caller]
    pub fn cluster_sync(&mut self) {
        self.as_one(|b| {
            b.cluster_arrive();
            b.cluster_wait();
        });
    }
}
