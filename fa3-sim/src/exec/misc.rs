//! Special registers, the register pool, dependent launches, trap, exit.

use fa3_ir::{MiscInst, Region, Special, Value};

use super::Flow;
use crate::machine::{At, Machine};
use crate::rule::Rule;
use crate::shared::WINDOW;
use crate::warp::{ALL, State};

impl Machine<'_> {
    pub(super) fn special(&mut self, at: At, dst: Value, register: Special, active: u32) {
        let cta = self.cta(at);
        let ([x, y, z], number) = (cta.index, cta.number);
        let launch = self.program.kernel.launch;
        let time = self.log.len() as u64 + self.counters.warp_instructions;
        let [grid_x, grid_y, grid_z] = self.grid;
        let lanes: [u64; 32] = std::array::from_fn(|lane| match register {
            Special::Tid => 32 * at.warp as u64 + lane as u64,
            Special::Lane => lane as u64,
            Special::CtaX => x.into(),
            Special::CtaY => y.into(),
            Special::CtaZ => z.into(),
            Special::GridX => grid_x.into(),
            Special::GridY => grid_y.into(),
            Special::GridZ => grid_z.into(),
            Special::ClusterCtaX | Special::ClusterCtaRank => at.cta as u64,
            Special::ClusterSize => launch.cluster.into(),
            Special::SmId => (number % 132).into(),
            Special::GlobalTimer | Special::Clock => time,
        });
        self.assign(at, dst, &lanes, active);
    }

    pub(super) fn region_address(&mut self, at: At, dst: Value, region: Region, active: u32) {
        let offset = self.program.kernel.smem.get(region).map_or(0, |info| info.offset);
        self.assign(at, dst, &[(WINDOW + offset).into(); 32], active);
    }

    pub(super) fn misc(&mut self, at: At, inst: &MiscInst, _active: u32) -> Flow {
        match *inst {
            MiscInst::SetMaxRegisters { increase, registers } => {
                return self.set_limit(at, increase, registers);
            }
            MiscInst::GridDependencyWait => {
                self.warp(at).bundle.after_predecessor();
            }
            MiscInst::LaunchDependents => {}
            MiscInst::Trap => {
                self.find(Rule::Trap, at, "the kernel traps");
                self.exit_now(at);
                return Flow::Stay;
            }
        }
        Flow::Next
    }

    fn set_limit(&mut self, at: At, increase: bool, registers: u32) -> Flow {
        let limit = self.warp(at).limit;
        if increase && registers < limit || !increase && registers > limit {
            let way = if increase { "raises" } else { "lowers" };
            self.find(Rule::R1, at, format!("setmaxnreg {way} {limit} registers to {registers}"));
        }
        if registers > limit {
            let more = 32 * (registers - limit);
            if self.cta(at).pool < more {
                self.warp(at).state = State::Registers(registers - limit);
                return Flow::Stay;
            }
            self.cta(at).pool -= more;
        } else {
            self.cta(at).pool += 32 * (limit - registers);
            for warp in &mut self.cta(at).warps {
                if matches!(warp.state, State::Registers(_)) {
                    warp.state = State::Ready;
                }
            }
        }
        self.progress += 1;
        let warp = self.warp(at);
        warp.limit = registers;
        warp.limits.push(registers);
        Flow::Next
    }

    /// Ends a warp at an `exit` instruction.
    fn exit_now(&mut self, at: At) {
        let warp = self.warp(at);
        warp.state = State::Exited;
        (warp.mask, warp.polling) = (ALL, false);
        warp.frames.clear();
        self.progress += 1;
        self.after_exit(at);
    }

    /// Checks that a warp has done everything that it must do before it exits.
    pub(super) fn check_exit(&mut self, at: At) {
        let warp = self.warp(at);
        if warp.flight.open > 0 {
            let what = format!("{} products were never committed", warp.flight.open);
            self.find(Rule::W3, at, what);
        }
        let warp = self.warp(at);
        let outstanding =
            warp.bulk.iter().find(|thread| thread.waited_read < thread.committed || thread.open > 0);
        if let Some(thread) = outstanding {
            let (lane, groups) = (thread.lane, thread.committed - thread.waited_read);
            let what = if thread.open > 0 {
                format!("lane {lane} exits with {} bulk copies that were never committed", thread.open)
            } else {
                format!("lane {lane} exits with {groups} bulk groups that may still read shared memory")
            };
            self.find(Rule::T5, at, what);
        }
    }

    /// Releases the warp's clock at its exit. For the cluster's barrier this is an arrival.
    pub(super) fn after_exit(&mut self, at: At) {
        let bundle = self.warp(at).bundle.clone();
        self.clusters[at.cluster].barrier.collected.join(&bundle);
        self.expected_of_cta(at);
        self.complete_barrier(at, 0);
        self.complete_cluster_barrier(at.cluster);
        self.check_warpgroup_exit(at);
        if self.cta(at).exited() {
            self.check_visits(at);
            self.check_loads(at);
        }
    }

    /// Checks rules T5 and M5: all copies to this CTA's shared memory have arrived, and a warp has waited for them.
    fn check_loads(&mut self, at: At) {
        let cta = self.cta(at);
        let (words, mut broken) = (&cta.last_words.generic, Vec::new());
        for mbarrier in &cta.mbarriers {
            let (offset, bytes) = (mbarrier.offset, mbarrier.unaccounted());
            if bytes != 0 {
                broken.push((Rule::M5, offset, format!("misses {bytes} bytes at the end")));
            } else if words.get(mbarrier.component) < mbarrier.loaded {
                broken.push((Rule::T5, offset, "is not waited for, but copies signal it".to_owned()));
            }
        }
        for (rule, offset, what) in broken {
            let region = self.region_at(offset);
            self.find(rule, at, format!("a phase of {region} {what}"));
        }
    }

    /// Checks rule T5: if a warp of another CTA accessed this CTA's shared memory, the access must happen before a warp
    /// of this CTA exits.
    fn check_visits(&mut self, at: At) {
        let id = self.clusters[at.cluster].id;
        let cta = self.cta(at);
        let knows = |epoch| cta.last_words.generic.knows(id, epoch);
        let unknown = cta.visits.iter().find(|(visit, end)| !knows(visit.epoch) && !knows(*end)).copied();
        if let Some((visit, _)) = unknown {
            let number = cta.number;
            let what = format!("cta {number} may have exited when its shared memory is used");
            self.find_event(Rule::T5, visit.event, what);
        }
    }
}
