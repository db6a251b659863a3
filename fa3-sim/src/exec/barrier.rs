//! Named barriers.

use fa3_ir::{Barrier, BarrierInst, BarrierRef};

use super::Flow;
use crate::barrier::Misuse;
use crate::machine::{At, Machine};
use crate::rule::Rule;
use crate::trace::Gate;
use crate::warp::State;

impl Machine<'_> {
    pub(super) fn barrier(&mut self, at: At, inst: &BarrierInst) -> Flow {
        self.counters.barriers += 1;
        let (id, threads, waits) = match *inst {
            BarrierInst::SyncCta => (0, self.expected_of_cta(at), true),
            BarrierInst::Sync(which) => {
                let (id, threads) = self.which(at, which);
                (id, threads, true)
            }
            BarrierInst::Arrive(which) => {
                let (id, threads) = self.which(at, which);
                (id, threads, false)
            }
        };
        if id > 15 {
            self.find(Rule::B1, at, format!("barrier {id} is not one of 0 to 15"));
            return Flow::Next;
        }
        let bundle = self.warp(at).bundle.clone();
        self.warp(at).tick();
        self.progress += 1;
        if waits {
            self.warp(at).state = State::Barrier(id);
        }
        let generation = self.cta(at).barriers[id].generation;
        self.trace_barrier(at, Gate::Barrier { cta: at.cta as u32, id: id as u32, generation }, waits);
        match self.cta(at).barriers[id].arrive(at.warp, threads, waits, &bundle) {
            Ok(()) => {}
            Err(Misuse::Threads { given, open }) => {
                let what = format!("a warp arrives at barrier {id} for {given} threads, others for {open}");
                self.find(Rule::B1, at, what);
            }
            Err(Misuse::Again) => {
                let what = format!("a warp arrives at barrier {id} again before its generation is complete");
                self.find(Rule::B2, at, what);
            }
        }
        self.complete_barrier(at, id);
        if waits { Flow::Stay } else { Flow::Next }
    }

    fn which(&mut self, at: At, which: BarrierRef) -> (usize, u32) {
        match which {
            BarrierRef::Named(Barrier(index)) => {
                let info = &self.program.kernel.barriers[index as usize];
                (info.id as usize, info.threads)
            }
            BarrierRef::Computed { id, threads } => {
                let ids = self.operand(at, id);
                if ids.iter().any(|&id| id != ids[0]) {
                    self.find(Rule::Uniform, at, "lanes differ in the number of a barrier");
                }
                (ids[0] as usize, threads)
            }
        }
    }

    /// The barrier of the whole CTA expects all warps that have not exited.
    pub(super) fn expected_of_cta(&mut self, at: At) -> u32 {
        let threads = 32 * self.cta(at).live_warps();
        self.cta(at).barriers[0].threads = threads;
        threads
    }

    pub(super) fn complete_barrier(&mut self, at: At, id: usize) {
        if !self.cta(at).barriers[id].is_complete() {
            return;
        }
        let (waiting, bundle) = self.cta(at).barriers[id].complete();
        for warp in waiting {
            self.sync_lanes(At { warp, ..at });
            let warp = self.warp(At { warp, ..at });
            warp.bundle.join(&bundle);
            warp.state = State::Ready;
            warp.pc += 1;
        }
    }
}
