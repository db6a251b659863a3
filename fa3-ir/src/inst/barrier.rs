//! Named barriers.

use crate::inst::Access;
use crate::lang::{Arg, B32, Builder};
use crate::names::Names;
use crate::{Barrier, Inst, Operand, Ty};

/// Reference to a barrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BarrierRef {
    /// A declared barrier.
    Named(Barrier),
    /// A barrier whose number is computed, for `threads` threads.
    Computed {
        /// The hardware number of a declared barrier.
        id: Operand,
        /// Threads that arrive or wait per generation.
        threads: u32,
    },
}

/// Named barriers. A warp counts as 32 threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BarrierInst {
    /// `bar.sync 0`: all threads of the CTA.
    SyncCta,
    /// `bar.sync`: arrives and waits.
    Sync(BarrierRef),
    /// `bar.arrive`: arrives.
    Arrive(BarrierRef),
}

impl BarrierInst {
    pub(crate) fn visit(&self, see: &mut dyn FnMut(Access)) {
        match *self {
            BarrierInst::SyncCta => {}
            BarrierInst::Sync(BarrierRef::Named(barrier))
            | BarrierInst::Arrive(BarrierRef::Named(barrier)) => {
                see(Access::Barrier(barrier));
            }
            BarrierInst::Sync(BarrierRef::Computed { id, threads })
            | BarrierInst::Arrive(BarrierRef::Computed { id, threads }) => {
                see(Access::Read(id, Ty::B32));
                if let Some(given) = id.constant() {
                    see(Access::Limit { what: "barrier number", given, min: 1, max: 15, multiple: 1 });
                }
                let what = "barrier threads";
                see(Access::Limit { what, given: threads, min: 32, max: 1024, multiple: 32 });
            }
        }
    }

    pub(crate) fn text(&self, names: &Names) -> String {
        let which = |barrier| match barrier {
            BarrierRef::Named(barrier) => names.barrier(barrier),
            BarrierRef::Computed { id, threads } => format!("{}, {threads}", names.operand(id)),
        };
        match *self {
            BarrierInst::SyncCta => "bar.sync 0".to_owned(),
            BarrierInst::Sync(barrier) => format!("bar.sync {}", which(barrier)),
            BarrierInst::Arrive(barrier) => format!("bar.arrive {}", which(barrier)),
        }
    }
}

/// Named barriers.
impl Builder {
    /// Waits for all threads of the CTA.
    #[track_caller]
    pub fn sync_cta(&self) {
        self.push(Inst::Barrier(BarrierInst::SyncCta));
    }

    /// Arrives at `barrier` and waits until all of its threads have arrived.
    #[track_caller]
    pub fn sync(&self, barrier: Barrier) {
        self.push(Inst::Barrier(BarrierInst::Sync(BarrierRef::Named(barrier))));
    }

    /// Arrives at `barrier` without waiting.
    #[track_caller]
    pub fn arrive(&self, barrier: Barrier) {
        self.push(Inst::Barrier(BarrierInst::Arrive(BarrierRef::Named(barrier))));
    }

    /// [`Builder::sync`] at the barrier with the computed number `id` (see [`Builder::barrier_id`]).
    #[track_caller]
    pub fn sync_computed(&self, id: impl Arg<Ty = B32>, threads: u32) {
        let barrier = BarrierRef::Computed { id: id.operand(), threads };
        self.push(Inst::Barrier(BarrierInst::Sync(barrier)));
    }

    /// [`Builder::arrive`] at the barrier with the computed number `id`.
    #[track_caller]
    pub fn arrive_computed(&self, id: impl Arg<Ty = B32>, threads: u32) {
        let barrier = BarrierRef::Computed { id: id.operand(), threads };
        self.push(Inst::Barrier(BarrierInst::Arrive(barrier)));
    }
}
