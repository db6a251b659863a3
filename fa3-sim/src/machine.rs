//! The grid: clusters that are resident, their CTAs and warps, and the loop that runs them.

use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use fa3_ir::ArgValue;

use crate::barrier::{ClusterBarrier, NamedBarrier};
use crate::clock::{Bundle, Epoch, Exported, Space};
use crate::copies::AsyncEvent;
use crate::counters::{Counters, Wavefronts};
use crate::data::Lanes;
use crate::decoded::{Code, Decoded};
use crate::exec::SharedPlace;
use crate::exec::operand::Part;
use crate::exec::wgmma::WarpgroupLog;
use crate::finding::Finding;
use crate::lanes::Lane;
use crate::mbarrier::Mbarrier;
use crate::memory::{Allocation, Buffer, Memory};
use crate::probe::Probe;
use crate::rule::Rule;
use crate::schedule::Scheduler;
use crate::shadow::{Access, After, Kind, Origin, Shadow};
use crate::shared::Shared;
use crate::simulation::{Mode, SimError};
use crate::trace::Recorder;
use crate::warp::{State, Warp};

/// Number of CTAs that are resident at the same time: one per SM.
const RESIDENT: u32 = 132;
/// Number of readers that are remembered for 16 bytes of global memory: whole grids read their inputs, which are never
/// written.
const GLOBAL_READERS: usize = 16;
/// Largest number of components that the clocks of a cluster can distinguish. With more, races would be missed or
/// invented.
const COMPONENTS: u32 = u16::MAX as u32;
/// If all warps only poll for this number of rounds and no event happens, no event will ever happen.
const IDLE_ROUNDS: u32 = 2000;

/// A warp: the index of its cluster among the resident clusters, of its CTA in the cluster, and of the warp in the CTA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct At {
    pub(crate) cluster: usize,
    pub(crate) cta: usize,
    pub(crate) warp: usize,
}

#[derive(Default)]
pub(crate) struct Cluster {
    /// Its number in the grid.
    pub(crate) id: u32,
    pub(crate) ctas: Vec<Cta>,
    pub(crate) barrier: ClusterBarrier,
    /// Number of components given so far. Components beyond [`COMPONENTS`] share one number.
    pub(crate) components: u32,
    /// Pending events that no warp executes.
    pub(crate) events: Vec<AsyncEvent>,
}

impl Cluster {
    /// A new component for the clocks of the cluster.
    pub(crate) fn component(&mut self) -> u16 {
        let component = self.components.min(COMPONENTS);
        self.components += 1;
        component as u16
    }

    pub(crate) fn warps(&self) -> impl Iterator<Item = &Warp> {
        self.ctas.iter().flat_map(|cta| &cta.warps)
    }

    pub(crate) fn warps_mut(&mut self) -> impl Iterator<Item = &mut Warp> {
        self.ctas.iter_mut().flat_map(|cta| &mut cta.warps)
    }

    pub(crate) fn mbarrier(&mut self, place: SharedPlace) -> Option<&mut Mbarrier> {
        self.ctas[place.cta].mbarrier(place.offset)
    }
}

pub(crate) struct Cta {
    /// The CTA's coordinates in the grid.
    pub(crate) index: [u32; 3],
    pub(crate) number: u32,
    pub(crate) shared: Shared,
    pub(crate) mbarriers: Vec<Mbarrier>,
    pub(crate) barriers: Vec<NamedBarrier>,
    pub(crate) warps: Vec<Warp>,
    /// Number of registers that no warp has.
    pub(crate) pool: u32,
    /// The instructions that some warps of each warpgroup have executed, and that its other warps must execute alike.
    pub(crate) warpgroups: Vec<WarpgroupLog>,
    /// The joined clocks of the CTA's warps at their exits.
    pub(crate) last_words: Bundle,
    /// Accesses to the CTA's shared memory by other CTAs, each with a second epoch that marks its end.
    pub(crate) visits: Vec<(Access, Epoch)>,
}

impl Cta {
    pub(crate) fn exited(&self) -> bool {
        self.warps.iter().all(|warp| warp.state == State::Exited)
    }

    pub(crate) fn live_warps(&self) -> u32 {
        self.warps.iter().filter(|warp| warp.state != State::Exited).count() as u32
    }

    /// The warps of a warp's warpgroup.
    pub(crate) fn warpgroup_of(&self, warp: usize) -> &[Warp] {
        self.warps.chunks(4).nth(warp / 4).unwrap_or_default()
    }

    pub(crate) fn mbarrier(&mut self, offset: u32) -> Option<&mut Mbarrier> {
        self.mbarriers.iter_mut().find(|mbarrier| mbarrier.offset == offset)
    }
}

/// The execution of an instruction by a warp.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Event {
    pub(crate) cta: u32,
    pub(crate) warp: u16,
    pub(crate) code: u16,
    pub(crate) pc: u32,
    pub(crate) iteration: [u32; 2],
}

/// How a run is launched.
pub(crate) struct Setup<'a> {
    pub(crate) program: &'a Decoded<'a>,
    pub(crate) args: &'a [ArgValue],
    pub(crate) grid: [u32; 3],
    pub(crate) mode: Mode,
    pub(crate) schedule: Scheduler,
    pub(crate) max_steps: u64,
    /// Buffers that the previous grid writes.
    pub(crate) predecessor: &'a [Buffer],
    /// Rules that end the run when they are broken.
    pub(crate) until: &'a [Rule],
    /// Whether the run is traced.
    pub(crate) trace: bool,
}

pub(crate) struct Machine<'a> {
    pub(crate) program: &'a Decoded<'a>,
    pub(crate) args: &'a [ArgValue],
    pub(crate) grid: [u32; 3],
    pub(crate) mode: Mode,
    pub(crate) memory: &'a mut Memory,
    /// One shadow for each allocation.
    pub(crate) global: Vec<Shadow>,
    /// Releases of flags in memory, by cluster (`None` for global memory), CTA and address.
    pub(crate) flags: HashMap<(Option<u32>, usize, u64), Exported>,
    pub(crate) clusters: Vec<Cluster>,
    /// Clusters that are not resident yet, in reverse order: the last one is next.
    waiting: Vec<u32>,
    current: usize,
    /// Warps that can get the next turn; kept in order to reuse the allocation.
    ready: Vec<At>,
    pub(crate) schedule: Scheduler,
    /// Results of the last lane operation; kept in order to reuse the allocation.
    pub(crate) results: [Lanes; 2],
    pub(crate) log: Vec<Event>,
    pub(crate) findings: Vec<Finding>,
    pub(crate) probes: Vec<Probe>,
    pub(crate) found: HashSet<(Rule, u16, u32)>,
    pub(crate) counters: Counters,
    /// For each [`Code`] (what the warps of one role run), the wavefronts of each of its steps.
    pub(crate) wavefronts: Vec<Vec<Wavefronts>>,
    pub(crate) recorder: Option<Recorder>,
    /// The offsets of the chunks of operands.
    pub(crate) operands: HashMap<Part, Rc<[u32]>>,
    /// Counts events that can let a warp go on.
    pub(crate) progress: u64,
    pub(crate) until: &'a [Rule],
    /// Whether one of the rules in `until` was broken.
    pub(crate) over: bool,
    steps: u64,
    max_steps: u64,
}

impl<'a> Machine<'a> {
    pub(crate) fn new(setup: Setup<'a>, memory: &'a mut Memory) -> Machine<'a> {
        let Setup { program, args, grid, mode, schedule, max_steps, predecessor, until, trace } = setup;
        memory.begin();
        let shadow = |allocation: &Allocation| Shadow::new(allocation.bytes.len(), GLOBAL_READERS);
        let mut global: Vec<Shadow> = memory.allocations.iter().map(shadow).collect();
        let before = Access {
            epoch: Epoch::PREDECESSOR,
            event: u32::MAX,
            kind: Kind::Write,
            origin: Origin::Predecessor,
            warp: 0,
            lane: Lane::SEVERAL,
        };
        predecessor.iter().for_each(|buffer| global[buffer.index].fill(before));
        let clusters = grid.iter().product::<u32>() / program.kernel.launch.cluster.max(1);
        let wavefronts = |code: &Code<'_>| vec![Wavefronts::default(); code.steps.len()];
        Machine {
            program,
            args,
            grid,
            mode,
            memory,
            global,
            flags: HashMap::new(),
            clusters: Vec::new(),
            waiting: (0..clusters).rev().collect(),
            current: 0,
            ready: Vec::new(),
            schedule,
            results: [[0; 32]; 2],
            log: Vec::new(),
            findings: Vec::new(),
            probes: Vec::new(),
            found: HashSet::new(),
            counters: Counters::default(),
            wavefronts: program.codes.iter().map(wavefronts).collect(),
            recorder: trace.then(|| Recorder::new(program)),
            operands: HashMap::new(),
            progress: 0,
            until,
            over: false,
            steps: 0,
            max_steps,
        }
    }

    /// The counts of the run.
    pub(crate) fn counters(&self) -> Counters {
        let mut counters = self.counters.clone();
        let steps = self.program.codes.iter().flat_map(|code| &code.steps);
        let accessed =
            steps.zip(self.wavefronts.iter().flatten()).filter(|(_, wavefronts)| wavefronts.accesses > 0);
        for (step, wavefronts) in accessed {
            counters.shared.entry(step.source.into()).or_default().add(*wavefronts);
        }
        counters
    }

    /// Runs the grid until all warps have finished, none can go on, or a rule of `until` is broken.
    pub(crate) fn run(&mut self) -> Result<(), SimError> {
        let (mut idle, mut progress) = (0, self.progress);
        while !self.clusters.is_empty() || self.launch_next() {
            if self.over {
                return Ok(());
            }
            if self.steps > self.max_steps {
                return Err(SimError::Steps { limit: self.max_steps });
            }
            if self.schedule.switches_cluster() {
                self.current = self.schedule.below(self.clusters.len());
                if self.schedule.below(4) == 0 {
                    self.launch_next();
                }
                self.wake_pollers();
            }
            let turn = (0..self.clusters.len()).map(|ahead| (self.current + ahead) % self.clusters.len());
            let busy = turn.into_iter().find(|&cluster| self.can_go_on(cluster));
            if let Some(cluster) = busy {
                self.current = cluster;
                self.turn(cluster);
                if self.clusters[cluster].components > COMPONENTS {
                    return Err(SimError::Agents { limit: COMPONENTS });
                }
                self.retire(cluster);
                continue;
            }
            if self.launch_next() {
                continue;
            }
            idle = if progress == self.progress { idle + 1 } else { 0 };
            progress = self.progress;
            // All remaining warps wait or poll.
            if !self.wake_pollers() || idle > IDLE_ROUNDS {
                self.deadlock();
                return Ok(());
            }
        }
        self.check_output();
        Ok(())
    }

    fn can_go_on(&self, cluster: usize) -> bool {
        let cluster = &self.clusters[cluster];
        let runs = |warp: &Warp| warp.state == State::Ready && !warp.polling;
        !cluster.events.is_empty() || cluster.warps().any(runs)
    }

    fn wake_pollers(&mut self) -> bool {
        let mut any = false;
        for warp in self.clusters.iter_mut().flat_map(Cluster::warps_mut) {
            any |= warp.state == State::Ready;
            warp.polling = false;
        }
        any
    }

    /// Runs one agent of a cluster: a warp for a while, or one event.
    fn turn(&mut self, cluster: usize) {
        let events = self.clusters[cluster].events.len();
        let mut ready = std::mem::take(&mut self.ready);
        ready.clear();
        for (cta, each) in self.clusters[cluster].ctas.iter().enumerate() {
            for (warp, each) in each.warps.iter().enumerate() {
                if each.state == State::Ready && !each.polling {
                    ready.push(At { cluster, cta, warp });
                }
            }
        }
        let event = ready.is_empty() || (events > 0 && self.schedule.event_first(events, ready.len()));
        let at = (!event).then(|| ready[self.schedule.choose(ready.len())]);
        self.ready = ready;
        let Some(at) = at else {
            let index = self.schedule.choose(events);
            self.happen(cluster, index);
            self.progress += 1;
            // A warp may poll for what the event brought.
            self.clusters[cluster].warps_mut().for_each(|warp| warp.polling = false);
            return;
        };
        for _ in 0..self.schedule.steps() {
            self.steps += 1;
            if !self.step(at) || self.over {
                break;
            }
        }
    }

    /// Makes the next waiting cluster resident, if there is a cluster and there is room.
    fn launch_next(&mut self) -> bool {
        let size = self.program.kernel.launch.cluster.max(1);
        if (self.clusters.len() as u32 + 1) * size > RESIDENT.max(size) {
            return false;
        }
        let Some(last) = self.waiting.len().checked_sub(1) else { return false };
        let index = match self.schedule.policy {
            crate::Policy::Random(_) => self.schedule.below(last + 1),
            crate::Policy::Eager | crate::Policy::Lazy => last,
        };
        let id = self.waiting.swap_remove(index);
        let mut cluster = Cluster { id, ..Cluster::default() };
        for rank in 0..size {
            let cta = self.new_cta(&mut cluster, id * size + rank);
            cluster.ctas.push(cta);
        }
        self.clusters.push(cluster);
        self.progress += 1;
        true
    }

    fn new_cta(&self, cluster: &mut Cluster, number: u32) -> Cta {
        let kernel = self.program.kernel;
        let [x, y, _] = self.grid;
        let limit = kernel.launch.entry_registers();
        let warps = (0..kernel.launch.warps())
            .map(|warp| {
                let code = self.program.code_of(warp);
                let leader = self.schedule.leader(number, warp as usize);
                Warp::new(&self.program.codes[code], code, cluster.component(), limit, leader)
            })
            .collect();
        Cta {
            index: [number % x, number / x % y, number / x / y],
            number,
            shared: Shared::new(kernel.smem.bytes() as usize),
            mbarriers: Vec::new(),
            barriers: (0..16).map(|_| NamedBarrier::default()).collect(),
            warps,
            pool: 0,
            warpgroups: vec![WarpgroupLog::default(); kernel.launch.warps().div_ceil(4) as usize],
            last_words: Bundle::default(),
            visits: Vec::new(),
        }
    }

    /// Removes a cluster whose warps have all exited.
    fn retire(&mut self, cluster: usize) {
        let all = &self.clusters[cluster];
        if !all.ctas.iter().all(Cta::exited) || !all.events.is_empty() {
            return;
        }
        for cta in 0..all.ctas.len() {
            for warp in 0..self.clusters[cluster].ctas[cta].warps.len() {
                self.finish_copies(At { cluster, cta, warp });
            }
        }
        self.clusters.swap_remove(cluster);
        self.current = 0;
        self.progress += 1;
    }

    pub(crate) fn warp(&mut self, at: At) -> &mut Warp {
        &mut self.clusters[at.cluster].ctas[at.cta].warps[at.warp]
    }

    pub(crate) fn cta(&mut self, at: At) -> &mut Cta {
        &mut self.clusters[at.cluster].ctas[at.cta]
    }

    /// The events that come before an access by a warp.
    pub(crate) fn after(cluster: u32, warp: &Warp, origin: Origin, space: Space) -> After<'_> {
        let clock = if origin.asynchronous() { warp.bundle.async_clock(space) } else { &warp.bundle.generic };
        After { cluster, clock, lanes: &warp.order }
    }

    /// The events that the executing lanes of a warp's instruction release. A single lane releases its own work, and
    /// the work that a barrier has ordered before.
    pub(crate) fn released(&mut self, at: At) -> Bundle {
        let Some(lane) = self.warp(at).single() else { return self.warp(at).bundle.clone() };
        let claim = self.component(at, |warp| &mut warp.claim);
        let warp = self.warp(at);
        let mut bundle = warp.bundle.clone();
        let others = warp.alone.iter().filter(|(other, _)| *other != lane).map(|&(_, component)| component);
        others.chain([warp.component]).for_each(|component| bundle.lower(component, warp.synced));
        bundle.complete(claim, warp.now());
        bundle
    }

    /// Orders the lanes of a warp at this moment, as a barrier does.
    pub(crate) fn sync_lanes(&mut self, at: At) {
        let now = self.moment(at);
        self.warp(at).sync(now);
        self.warp(at).tick();
    }

    /// The end of a warp's accesses so far: an index into the log, and the warp's clock.
    pub(crate) fn moment(&mut self, at: At) -> (u32, u32) {
        (self.log.len() as u32, self.warp(at).now())
    }

    /// The epoch of an access by the lanes that execute the warp's instruction.
    pub(crate) fn epoch(&mut self, at: At) -> Epoch {
        let cluster = self.clusters[at.cluster].id;
        let component = match self.warp(at).single() {
            None => self.warp(at).component,
            Some(lane) => self.component_of_lane(at, lane),
        };
        Epoch { cluster, component, value: self.warp(at).now() }
    }

    /// The component of accesses that a lane makes alone.
    fn component_of_lane(&mut self, at: At, lane: usize) -> u16 {
        if let Some(&(_, known)) = self.warp(at).alone.iter().find(|(other, _)| *other == lane) {
            return known;
        }
        let component = self.clusters[at.cluster].component();
        let warp = self.warp(at);
        let now = warp.now();
        warp.bundle.generic.raise(component, now);
        warp.alone.push((lane, component));
        component
    }

    /// A component of the warp's cluster. It is created when it is first needed.
    pub(crate) fn component(&mut self, at: At, slot: impl Fn(&mut Warp) -> &mut Option<u16>) -> u16 {
        if let Some(component) = *slot(self.warp(at)) {
            return component;
        }
        let component = self.clusters[at.cluster].component();
        *slot(self.warp(at)) = Some(component);
        component
    }

    /// Logs the execution of a warp's current instruction.
    pub(crate) fn event(&mut self, at: At) -> u32 {
        let cta = self.clusters[at.cluster].ctas[at.cta].number;
        let warp = &self.clusters[at.cluster].ctas[at.cta].warps[at.warp];
        let (code, pc, iteration) = (warp.code as u16, warp.pc as u32, warp.iteration());
        self.log.push(Event { cta, warp: at.warp as u16, code, pc, iteration });
        self.log.len() as u32 - 1
    }
}
