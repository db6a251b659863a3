//! A warp: 32 lanes, their registers, which of them run, and what they wait for.

use fa3_ir::{Operand, Value};

use crate::clock::Bundle;
use crate::copies::{BulkThread, CopyAsync};
use crate::data::Lanes;
use crate::decoded::{Code, Guard, bits_of};
use crate::flight::Flight;
use crate::lanes::LaneOrder;

pub(crate) const ALL: u32 = u32::MAX;

/// Present state of a warp.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum State {
    #[default]
    Ready,
    /// The warp waits at `bar.sync` of the barrier with this number.
    Barrier(usize),
    /// The warp waits for the mbarrier at an offset.
    Mbarrier {
        offset: u32,
        parity: u32,
    },
    /// The warp waits at `barrier.cluster.wait`.
    Cluster,
    /// The warp waits at `setmaxnreg.inc` for this number of additional registers per thread.
    Registers(u32),
    Exited,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Frame {
    /// The lanes that go on after a branch, and the lanes that still have to run the other side of it.
    If { all: u32, other: u32 },
    /// The lanes that go on after a loop, and the number of iterations begun.
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
    /// The index of the instruction's execution in the log.
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
    /// Whether its last poll found nothing, and no event has happened since.
    pub(crate) polling: bool,
    pub(crate) component: u16,
    pub(crate) bundle: Bundle,
    /// The order between the warp's lanes.
    pub(crate) order: LaneOrder,
    /// The warp's clock when a barrier last ordered its lanes.
    pub(crate) synced: u32,
    /// Lanes that have accessed memory alone, each with its component.
    pub(crate) alone: Vec<(usize, u16)>,
    /// The component for the work of the warp's other lanes, which a single lane's release would include if a barrier
    /// had come before it.
    pub(crate) claim: Option<u16>,
    /// The end of the accesses that the warp's arrival at the cluster's barrier releases: an index into the log, and
    /// the warp's clock.
    pub(crate) cluster_release: Option<(u32, u32)>,
    /// As `cluster_release`, for the last fence in a scope wider than the CTA; `None` unless all lanes executed it.
    pub(crate) fence_release: Option<(u32, u32)>,
    /// The events before the last fence of any scope, which relaxed atomics release.
    pub(crate) fenced: Option<Bundle>,
    /// The events before the last fence of a wider scope than the CTA, which relaxed atomics release.
    pub(crate) fenced_on_gpu: Option<Bundle>,
    /// The events that relaxed atomics have seen, which the next fence acquires.
    pub(crate) seen: Bundle,
    /// The events that relaxed atomics have seen in shared memory, which the next fence of any scope acquires.
    pub(crate) seen_in_cluster: Bundle,
    pub(crate) flight: Flight,
    pub(crate) bulk: Vec<BulkThread>,
    pub(crate) copies: CopyAsync,
    /// The mbarriers that the warp has initialised and not yet fenced.
    pub(crate) unfenced: Vec<u32>,
    /// The components of the initialisations that a relaxed arrival at the cluster's barrier publishes.
    pub(crate) introduced: Vec<u16>,
    /// Number of registers per thread.
    pub(crate) limit: u32,
    /// The operand of each setmaxnreg so far.
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

    /// Whether all lanes of `mask` have an initialised value in a slot.
    pub(crate) fn defined(&self, slot: u32, mask: u32) -> bool {
        mask & !self.valid[slot as usize] == 0
    }

    /// Treats undefined lanes as defined from now on, so that they are reported once.
    pub(crate) fn define(&mut self, slot: u32) {
        self.valid[slot as usize] = ALL;
    }

    /// Assigns the lanes of `mask`. In the other lanes a value becomes undefined, and a variable keeps its content.
    pub(crate) fn assign(&mut self, slot: u32, lanes: &Lanes, mask: u32, mutable: bool) {
        let index = slot as usize;
        if mask == ALL {
            self.registers[index] = *lanes;
        } else {
            each(mask).for_each(|lane| self.registers[index][lane] = lanes[lane]);
        }
        self.valid[index] = if mutable { self.valid[index] | mask } else { mask };
    }

    pub(crate) fn operand(&self, code: &Code, operand: Operand) -> Lanes {
        match operand {
            Operand::Value(value) => self.registers[code.slot(value) as usize],
            Operand::Imm(imm) => [bits_of(imm); 32],
        }
    }

    pub(crate) fn value(&self, code: &Code, value: Value) -> &Lanes {
        &self.registers[code.slot(value) as usize]
    }

    /// The iteration of the outermost loop that the warp is in, and of the innermost loop: 1 in the first iteration,
    /// and 0 outside of loops.
    pub(crate) fn iteration(&self) -> [u32; 2] {
        let mut loops = self.frames.iter().filter_map(|frame| match frame {
            Frame::Loop { iteration, .. } => Some(*iteration),
            Frame::If { .. } => None,
        });
        let outer = loops.next().unwrap_or(0);
        [outer, loops.next_back().unwrap_or(outer)]
    }

    /// Advances the warp's clock: later events are not part of what the warp has released so far.
    pub(crate) fn tick(&mut self) {
        let now = self.now();
        let own = self.alone.iter().map(|&(_, component)| component).chain([self.component]);
        own.for_each(|component| self.bundle.generic.raise(component, now + 1));
    }

    /// Notes that a barrier has ordered the work of all lanes before index `event` of the log. The warp's clock was
    /// `now` then.
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

    /// The warp's own clock.
    pub(crate) fn now(&self) -> u32 {
        self.bundle.generic.get(self.component)
    }
}

/// The lanes of a mask.
pub(crate) fn each(mask: u32) -> impl Iterator<Item = usize> {
    (0..32).filter(move |lane| mask >> lane & 1 == 1)
}
