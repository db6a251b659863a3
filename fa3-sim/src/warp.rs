//! A warp: 32 lanes, their registers, which of them run, and what they wait for.

use fa3_ir::{Operand, Value};

use crate::clock::Bundle;
use crate::copies::{BulkThread, CopyAsync};
use crate::data::Lanes;
use crate::decoded::{Code, Guard, bits_of};
use crate::flight::Flight;
use crate::lanes::LaneOrder;

/// All lanes.
pub(crate) const ALL: u32 = u32::MAX;

/// Present state of a warp.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum State {
    #[default]
    Ready,
    /// At `bar.sync` of a barrier's number.
    Barrier(usize),
    /// At a wait for the mbarrier at an offset.
    Mbarrier {
        offset: u32,
        parity: u32,
    },
    /// At `barrier.cluster.wait`.
    Cluster,
    /// At `setmaxnreg.inc`, for this many more registers per thread.
    Registers(u32),
    Exited,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Frame {
    /// The lanes that go on after a branch, and the lanes that still have to run its other side.
    If { all: u32, other: u32 },
    /// The lanes that go on after a loop, and how often the loop has begun.
    Loop { all: u32, iteration: u32 },
}

/// A wait for an mbarrier that has passed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pass {
    /// The component that counts the mbarrier's phases.
    pub(crate) component: u16,
    pub(crate) parity: u32,
    /// The number of phases that were complete.
    pub(crate) complete: u32,
    /// The instruction's execution.
    pub(crate) event: u32,
}

#[derive(Default)]
pub(crate) struct Warp {
    pub(crate) code: usize,
    pub(crate) pc: usize,
    pub(crate) mask: u32,
    /// The lanes that execute the current instruction.
    pub(crate) active: u32,
    pub(crate) frames: Vec<Frame>,
    registers: Vec<Lanes>,
    /// For each slot, the lanes where it is initialised.
    valid: Vec<u32>,
    pub(crate) state: State,
    /// Whether it polled for something that was not there, and nothing has happened since.
    pub(crate) polling: bool,
    pub(crate) component: u16,
    pub(crate) bundle: Bundle,
    /// The order between its lanes, and its clock when a barrier last ordered them.
    pub(crate) order: LaneOrder,
    pub(crate) synced: u32,
    /// Lanes that have accessed memory alone, each with its component.
    pub(crate) alone: Vec<(usize, u16)>,
    /// The component for what a lane's release would include of the other lanes' work, had a barrier come before it.
    pub(crate) claim: Option<u16>,
    /// The ends of the accesses that its arrival at the cluster's barrier releases, and that the last wide fence of all
    /// lanes releases: an index into the log, and its clock.
    pub(crate) cluster_release: Option<(u32, u32)>,
    pub(crate) fence_release: Option<(u32, u32)>,
    /// Everything that relaxed atomics release: what comes before the last fence of any scope, and before the last
    /// fence of a wider scope than the CTA.
    pub(crate) fenced: Option<Bundle>,
    pub(crate) fenced_on_gpu: Option<Bundle>,
    /// Everything that relaxed atomics have seen, for the next fence to acquire.
    pub(crate) seen: Bundle,
    /// Everything that relaxed atomics have seen in shared memory, for the next fence of any scope.
    pub(crate) seen_in_cluster: Bundle,
    pub(crate) flight: Flight,
    pub(crate) bulk: Vec<BulkThread>,
    pub(crate) copies: CopyAsync,
    /// The mbarriers that it has initialised and not yet fenced.
    pub(crate) unfenced: Vec<u32>,
    /// The components of the initialisations that a relaxed arrival at the cluster's barrier publishes.
    pub(crate) introduced: Vec<u16>,
    /// Registers per thread, and every setmaxnreg so far.
    pub(crate) limit: u32,
    pub(crate) limits: Vec<u32>,
    /// The lane that elect chooses.
    pub(crate) leader: u32,
    /// Its last passed wait for each mbarrier.
    pub(crate) passes: Vec<Pass>,
    /// The generation of the cluster's barrier that it has arrived at.
    pub(crate) cluster_arrival: Option<u32>,
}

impl Warp {
    pub(crate) fn new(code: &Code, index: usize, component: u16, limit: u32, leader: u32) -> Warp {
        let mut registers = vec![[0xFFFF_FFFF; 32]; code.registers];
        let mut valid = vec![0; code.registers];
        for &(slot, bits) in &code.constants {
            registers[slot as usize] = [bits; 32];
            valid[slot as usize] = ALL;
        }
        let mut bundle = Bundle::default();
        bundle.generic.raise(component, 1);
        Warp {
            code: index,
            mask: ALL,
            active: ALL,
            registers,
            valid,
            component,
            bundle,
            flight: Flight::new(code),
            limit,
            leader,
            ..Warp::default()
        }
    }

    /// The running lanes where the guard holds.
    pub(crate) fn active(&self, guard: Option<Guard>) -> u32 {
        guard.map_or(self.mask, |guard| self.mask & self.holds(guard))
    }

    /// The lanes where a predicate has the value that the guard asks for.
    pub(crate) fn holds(&self, guard: Guard) -> u32 {
        let lanes = &self.registers[guard.slot as usize];
        let truth = lanes.iter().enumerate().fold(0, |mask, (lane, &bit)| mask | ((bit as u32 & 1) << lane));
        if guard.negate { !truth } else { truth }
    }

    pub(crate) fn register(&self, slot: u32) -> &Lanes {
        &self.registers[slot as usize]
    }

    /// Whether all lanes of `mask` are initialised.
    pub(crate) fn defined(&self, slot: u32, mask: u32) -> bool {
        mask & !self.valid[slot as usize] == 0
    }

    /// Treats undefined lanes as defined from now on, so that they are reported once.
    pub(crate) fn define(&mut self, slot: u32) {
        self.valid[slot as usize] = ALL;
    }

    /// Assigns the lanes of `mask`. In the other lanes a value is undefined, and a variable keeps its content.
    pub(crate) fn assign(&mut self, slot: u32, lanes: &Lanes, mask: u32, mutable: bool) {
        let index = slot as usize;
        if mask == ALL {
            self.registers[index] = *lanes;
        } else {
            each(mask).for_each(|lane| self.registers[index][lane] = lanes[lane]);
        }
        self.valid[index] = if mutable { self.valid[index] | mask } else { mask };
    }

    /// An operand's lanes.
    pub(crate) fn operand(&self, code: &Code, operand: Operand) -> Lanes {
        match operand {
            Operand::Value(value) => self.registers[code.slot(value) as usize],
            Operand::Imm(imm) => [bits_of(imm); 32],
        }
    }

    pub(crate) fn value(&self, code: &Code, value: Value) -> &Lanes {
        &self.registers[code.slot(value) as usize]
    }

    /// How often the loops around it have begun, outermost and innermost.
    pub(crate) fn iteration(&self) -> [u32; 2] {
        let mut loops = self.frames.iter().filter_map(|frame| match frame {
            Frame::Loop { iteration, .. } => Some(*iteration),
            Frame::If { .. } => None,
        });
        let outer = loops.next().unwrap_or(0);
        [outer, loops.next_back().unwrap_or(outer)]
    }

    /// Advances the warp's clock: later events are not part of what it has released.
    pub(crate) fn tick(&mut self) {
        let now = self.now();
        let own = self.alone.iter().map(|&(_, component)| component).chain([self.component]);
        own.for_each(|component| self.bundle.generic.raise(component, now + 1));
    }

    /// Notes that a barrier has ordered the work of all lanes before an execution, when the warp's clock was `now`.
    pub(crate) fn sync(&mut self, (event, now): (u32, u32)) {
        self.order.sync(event);
        self.synced = self.synced.max(now);
    }

    /// Remembers a wait for an mbarrier.
    pub(crate) fn passed(&mut self, pass: Pass) {
        match self.passes.iter_mut().find(|known| known.component == pass.component) {
            Some(known) => *known = pass,
            None => self.passes.push(pass),
        }
    }

    /// The lane that executes the current instruction, if it is a single one.
    pub(crate) fn single(&self) -> Option<usize> {
        self.active.is_power_of_two().then_some(self.active.trailing_zeros() as usize)
    }

    /// Its own clock.
    pub(crate) fn now(&self) -> u32 {
        self.bundle.generic.get(self.component)
    }
}

/// The lanes of a mask.
pub(crate) fn each(mask: u32) -> impl Iterator<Item = usize> {
    (0..32).filter(move |lane| mask >> lane & 1 == 1)
}
