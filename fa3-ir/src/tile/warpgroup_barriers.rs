//! Named barriers, one for each warpgroup. The barrier at which a warpgroup waits is computed; the number of threads
//! that meet there is declared once.

use crate::Fault;
use crate::lang::{Arg, B32, Builder, V};

/// Named barriers, one for each of some warpgroups.
#[derive(Clone, Debug)]
pub struct WarpgroupBarriers<'k> {
    builder: &'k Builder,
    /// The hardware number of the first one.
    first: u32,
    warpgroups: u32,
    threads: u32,
}

/// The barrier of one warpgroup.
#[derive(Clone, Copy, Debug)]
pub struct WarpgroupBarrier<'k> {
    id: V<'k, B32>,
    threads: u32,
}

impl Builder {
    /// Declares a named barrier for each of `warpgroups` warpgroups, at which `meeting` warpgroups meet.
    pub fn warpgroup_barriers(&self, name: &str, warpgroups: u32, meeting: u32) -> WarpgroupBarriers<'_> {
        let threads = 128 * meeting;
        let first = self.barriers(name, warpgroups, threads);
        WarpgroupBarriers { builder: self, first, warpgroups, threads }
    }
}

impl<'k> WarpgroupBarriers<'k> {
    /// The barrier of warpgroup `index`; an index that is computed is not checked.
    #[track_caller]
    pub fn of(&self, index: impl Arg<Ty = B32>) -> WarpgroupBarrier<'k> {
        let last = index.operand().constant().unwrap_or(0);
        if last >= self.warpgroups {
            let count = self.warpgroups as usize;
            self.builder.fault(Fault::Unknown { what: "warpgroup's barrier", index: last, count });
        }
        self.number(index)
    }

    /// The barrier of warpgroup `index`, which was checked.
    #[track_caller]
    pub(crate) fn number(&self, index: impl Arg<Ty = B32>) -> WarpgroupBarrier<'k> {
        WarpgroupBarrier { id: self.builder.value(index) + self.first, threads: self.threads }
    }

    /// Number of barriers.
    pub fn len(&self) -> u32 {
        self.warpgroups
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.warpgroups == 0
    }
}

impl WarpgroupBarrier<'_> {
    /// Arrives, and waits for the others.
    #[track_caller]
    pub fn sync(self) {
        self.id.builder().sync_computed(self.id, self.threads);
    }

    /// Arrives, and does not wait.
    #[track_caller]
    pub fn arrive(self) {
        self.id.builder().arrive_computed(self.id, self.threads);
    }
}
