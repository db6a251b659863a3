//! mbarriers.

use fa3_ir::{MbarrierInst, Operand, SharedAddr};

use super::Flow;
use super::shared::SharedPlace;
use crate::clock::{Bundle, Epoch};
use crate::copies::AsyncEvent;
use crate::lanes::Lane;
use crate::machine::{At, Machine};
use crate::mbarrier::{Change, Excess, Mbarrier};
use crate::rule::Rule;
use crate::shadow::{Access, Kind, Origin};
use crate::warp::{Pass, State, each};

impl Machine<'_> {
    pub(super) fn mbarrier(&mut self, at: At, inst: &MbarrierInst, active: u32) -> Flow {
        match *inst {
            MbarrierInst::Init { addr, arrivals } => {
                self.each_mbarrier(at, addr, active, |machine, place, lane| {
                    machine.init(at, place, lane, arrivals)
                });
            }
            MbarrierInst::Invalidate { addr } => {
                self.each_mbarrier(at, addr, active, |machine, place, _| machine.invalidate(at, place));
            }
            MbarrierInst::Arrive { addr } => {
                self.each_mbarrier(at, addr, active, |machine, place, lane| {
                    machine.arrive(at, place, lane, None)
                });
                self.warp(at).tick();
            }
            MbarrierInst::ArriveExpect { addr, bytes } => {
                let bytes = self.operand(at, bytes);
                self.each_mbarrier(at, addr, active, |machine, place, lane| {
                    machine.arrive(at, place, lane, Some(bytes[lane]));
                });
                self.warp(at).tick();
            }
            MbarrierInst::Expect { addr, bytes } => {
                let bytes = self.operand(at, bytes);
                self.each_mbarrier(at, addr, active, |machine, place, lane| {
                    if machine.use_mbarrier(at, place, false) {
                        let mbarrier = machine.clusters[at.cluster].mbarrier(place);
                        let expected = mbarrier.map_or(Ok(()), |mbarrier| mbarrier.expect(bytes[lane]));
                        let event = machine.event(at);
                        machine.changed(at.cluster, place, expected.map(|()| Change::Nothing), event);
                    }
                });
            }
            MbarrierInst::ArriveRemote { addr } => {
                let addresses = self.operand(at, Operand::Value(addr));
                for lane in each(active) {
                    if let Some(place) = self.resolve_in_cluster(at, addresses[lane], 8, 8, Rule::M1) {
                        self.arrive(at, place, lane, None);
                    }
                }
                self.warp(at).tick();
            }
            MbarrierInst::ArriveCopied { addr } => self.arrive_copied(at, addr, active),
            MbarrierInst::Wait { addr, parity } => return self.wait(at, addr, parity, active),
            MbarrierInst::TryWait { dst, addr, parity } => {
                return self.test(at, dst, addr, parity, active, true);
            }
            MbarrierInst::TestWait { dst, addr, parity } => {
                return self.test(at, dst, addr, parity, active, false);
            }
        }
        Flow::Next
    }

    pub(super) fn operand(&mut self, at: At, operand: Operand) -> [u32; 32] {
        let code = &self.program.codes[self.warp(at).code];
        self.warp(at).operand(code, operand).map(|bits| bits as u32)
    }

    fn each_mbarrier(
        &mut self,
        at: At,
        addr: SharedAddr,
        active: u32,
        mut what: impl FnMut(&mut Self, SharedPlace, usize),
    ) {
        let addresses = self.shared_addresses(at, addr);
        for lane in each(active) {
            if let Some(place) = self.resolve(at, addresses[lane], 8, 8, Rule::M1) {
                self.counters.mbarriers += 1;
                what(self, place, lane);
            }
        }
    }

    fn init(&mut self, at: At, place: SharedPlace, lane: usize, arrivals: u32) {
        let access = self.generic(at, Kind::Write).of(lane);
        if self.clusters[at.cluster].mbarrier(place).is_some() {
            let what = format!("the mbarrier at {} is initialised again", self.region_at(place.offset));
            return self.find(Rule::M1, at, what);
        }
        self.access_shared(at, place, 8, access);
        let cluster = &mut self.clusters[at.cluster];
        let component = cluster.component();
        let initialised = Epoch { cluster: cluster.id, component: cluster.component(), value: 1 };
        let by = (access.warp, access.event);
        let mbarrier = Mbarrier::new(place.offset, arrivals, component, initialised, by);
        let cta = &mut self.clusters[at.cluster].ctas[place.cta];
        cta.mbarriers.push(mbarrier);
        cta.shared.mbarriers[place.offset as usize / 8] = true;
        cta.shared.mark(place.offset, 8, false);
        self.warp(at).unfenced.push(place.offset);
        self.progress += 1;
    }

    fn invalidate(&mut self, at: At, place: SharedPlace) {
        if !self.use_mbarrier(at, place, false) {
            return;
        }
        let generic = &self.clusters[at.cluster].ctas[at.cta].warps[at.warp].bundle.generic;
        let mut mbarriers = self.clusters[at.cluster].ctas[place.cta].mbarriers.iter();
        let known = |mbarrier: &Mbarrier| generic.get(mbarrier.component) >= mbarrier.loaded;
        if mbarriers.any(|mbarrier| mbarrier.offset == place.offset && !known(mbarrier)) {
            let what =
                "an mbarrier ends that copies may still signal: no wait has shown their phase complete";
            self.find(Rule::M1, at, what);
        }
        let cta = &mut self.clusters[at.cluster].ctas[place.cta];
        cta.mbarriers.retain(|mbarrier| mbarrier.offset != place.offset);
        cta.shared.mbarriers[place.offset as usize / 8] = false;
    }

    /// Checks that the warp, or a copy that it issues, may use an mbarrier. Returns whether there is one.
    pub(super) fn use_mbarrier(&mut self, at: At, place: SharedPlace, by_copy: bool) -> bool {
        let id = self.clusters[at.cluster].id;
        let Some(mbarrier) = self.clusters[at.cluster].mbarrier(place) else {
            let region = self.region_at(place.offset);
            self.find(Rule::M1, at, format!("there is no mbarrier at {region}"));
            return false;
        };
        let (initialised, event, fenced) = (mbarrier.initialised, mbarrier.event, mbarrier.fenced);
        let (initialiser, component, phase) = (mbarrier.initialiser, mbarrier.component, mbarrier.phase);
        let warp = self.warp(at);
        let others = initialiser != warp.component || by_copy;
        if others && !warp.bundle.generic.knows(id, initialised) {
            if let Some(mbarrier) = self.clusters[at.cluster].mbarrier(place) {
                // The initialisation counts as known to all from now on, so that it is reported once.
                mbarrier.initialised.value = 0;
            }
            let lack = if fenced { "not ordered before" } else { "without a fence before" };
            let region = self.region_at(place.offset);
            let what = format!("the initialisation of the mbarrier at {region} is {lack} its use");
            self.find_after(Rule::M6, at, Some(event), what);
        }
        if place.cta != at.cta && !by_copy {
            // The use of another CTA's mbarrier ends when the mbarrier's current phase ends.
            let access = self.generic(at, Kind::Strong);
            self.visit(at, place.cta, access, Epoch { cluster: id, component, value: phase + 1 });
        }
        true
    }

    /// Arrives. If `bytes` are given, the phase expects them first.
    fn arrive(&mut self, at: At, place: SharedPlace, lane: usize, bytes: Option<u32>) {
        if !self.use_mbarrier(at, place, false) {
            return;
        }
        self.check_observed(at, place);
        self.trace_arrival(at, place);
        let (event, bundle) = (self.event(at), self.released(at));
        self.arrive_for_lanes(at, place, lane);
        let Some(mbarrier) = self.clusters[at.cluster].mbarrier(place) else { return };
        let expected = bytes.map_or(Ok(()), |bytes| mbarrier.expect(bytes));
        if place.cta == at.cta {
            mbarrier.collected.join(&bundle);
        } else {
            // The release has the scope of the arriving thread's own CTA: it permits copies to overwrite data, but
            // publishes no data.
            mbarrier.collected.shared.join(&bundle.shared);
        }
        mbarrier.remember(event);
        let change = expected.and_then(|()| mbarrier.arrive(1));
        self.changed(at.cluster, place, change, event);
    }

    /// Orders everything that a lane has done before everything that lanes of its warp do after a wait for this phase.
    fn arrive_for_lanes(&mut self, at: At, place: SharedPlace, lane: usize) {
        let event = self.log.len() as u32;
        let Some(mbarrier) = self.clusters[at.cluster].mbarrier(place) else { return };
        let (component, phase) = (mbarrier.component, mbarrier.phase);
        self.warp(at).order.arrive(lane, component, phase, event);
    }

    /// Checks rule M4: a thread has seen that the previous phase is complete.
    fn check_observed(&mut self, at: At, place: SharedPlace) {
        let Some(mbarrier) = self.clusters[at.cluster].mbarrier(place) else { return };
        if !std::mem::replace(&mut mbarrier.observed, true) {
            let phase = mbarrier.phase;
            let region = self.region_at(place.offset);
            let before = phase - 1;
            let what = format!(
                "an arrival at phase {phase} of {region}, phase {before} of which no thread has seen complete"
            );
            self.find(Rule::M4, at, what);
        }
    }

    /// Applies the consequences of an arrival or a completion.
    pub(super) fn changed(
        &mut self,
        cluster: usize,
        place: SharedPlace,
        change: Result<Change, Excess>,
        event: u32,
    ) {
        self.progress += 1;
        match change {
            Err(excess) => {
                let region = self.region_at(place.offset);
                let what = match excess {
                    Excess::Arrivals { given, pending } => {
                        format!("{given} arrivals at {region}, whose phase misses {pending}")
                    }
                    Excess::Bytes { bytes } => {
                        format!("the phase of {region} misses {bytes} bytes, more than 2^20 - 1")
                    }
                };
                self.find_event(Rule::M2, event, what);
            }
            Ok(Change::Nothing) => {}
            Ok(Change::Complete { early }) => {
                if early {
                    let region = self.region_at(place.offset);
                    let what = format!("a phase of {region} completes before a copy that signals it");
                    self.find_event(Rule::M5, event, what);
                }
                for warp in &mut self.clusters[cluster].ctas[place.cta].warps {
                    if matches!(warp.state, State::Mbarrier { offset, .. } if offset == place.offset) {
                        warp.state = State::Ready;
                    }
                }
            }
        }
    }

    fn wait(&mut self, at: At, addr: SharedAddr, parity: Operand, active: u32) -> Flow {
        let (addresses, parities) = (self.shared_addresses(at, addr), self.operand(at, parity));
        for lane in each(active) {
            let same =
                |other: usize| (addresses[other], parities[other]) == (addresses[lane], parities[lane]);
            if each(active).take_while(|&other| other < lane).any(same) {
                continue;
            }
            let Some(place) = self.resolve(at, addresses[lane], 8, 8, Rule::M1) else { continue };
            let lanes = each(active).filter(|&other| same(other)).fold(0, |lanes, lane| lanes | 1 << lane);
            if !self.passes(at, place, parities[lane], lanes) {
                self.warp(at).state = State::Mbarrier { offset: place.offset, parity: parities[lane] };
                return Flow::Stay;
            }
            self.counters.mbarriers += 1;
        }
        Flow::Next
    }

    fn test(
        &mut self,
        at: At,
        dst: fa3_ir::Value,
        addr: SharedAddr,
        parity: Operand,
        active: u32,
        may_fail: bool,
    ) -> Flow {
        let (addresses, parities) = (self.shared_addresses(at, addr), self.operand(at, parity));
        let fails = may_fail && self.schedule.fails_spuriously();
        let (mut passed, mut all) = ([0; 32], true);
        for lane in each(active) {
            let Some(place) = self.resolve(at, addresses[lane], 8, 8, Rule::M1) else { continue };
            let passes = !fails && self.passes(at, place, parities[lane], 1 << lane);
            passed[lane] = passes.into();
            all &= passes;
        }
        self.assign(at, dst, &passed, active);
        if all { Flow::Next } else { Flow::Poll }
    }

    /// Whether a wait of `lanes` passes. If so, the warp acquires what the phase's arrivals released.
    fn passes(&mut self, at: At, place: SharedPlace, parity: u32, lanes: u32) -> bool {
        let parity = parity & 1;
        if !self.use_mbarrier(at, place, false) {
            return true;
        }
        let Some(mbarrier) = self.clusters[at.cluster].mbarrier(place) else { return true };
        if !mbarrier.passes(parity) {
            return false;
        }
        mbarrier.observed = true;
        let (phase, component, complete) =
            (i64::from(mbarrier.phase), mbarrier.component, mbarrier.complete.clone());
        let warp = self.warp(at);
        let intended = Mbarrier::intended(warp.bundle.generic.get(component), parity);
        warp.bundle.join(&complete);
        warp.order.wait(lanes, component, phase as u32);
        let event = self.event(at);
        self.warp(at).passed(Pass { component, parity, complete: phase as u32, event });
        self.trace_pass(at, place);
        if phase - 1 != intended {
            let region = self.region_at(place.offset);
            let by = phase - 1;
            let what = format!("a wait at {region} for phase {intended} passes by the parity of phase {by}");
            self.find(Rule::M3, at, what);
        }
        true
    }

    /// Lets the cp.async of each lane arrive when they are complete.
    fn arrive_copied(&mut self, at: At, addr: SharedAddr, active: u32) {
        let addresses = self.shared_addresses(at, addr);
        for lane in each(active) {
            let Some(place) = self.resolve(at, addresses[lane], 8, 8, Rule::M1) else { continue };
            if !self.use_mbarrier(at, place, false) {
                continue;
            }
            self.check_observed(at, place);
            self.arrive_for_lanes(at, place, lane);
            self.trace_copied(at, place);
            let (upto, event) = (self.warp(at).copies.issued, self.event(at));
            let (cta, warp, offset) = (at.cta, at.warp, place.offset);
            let arrival = AsyncEvent::Arrive { cta, warp, lane, upto, offset, event };
            if self.schedule.loads_at_once() {
                self.copied(at.cluster, &arrival);
            } else {
                self.clusters[at.cluster].events.push(arrival);
            }
        }
    }

    /// Lets a lane's completed cp.async arrive at their mbarrier.
    pub(super) fn copied(&mut self, cluster: usize, arrival: &AsyncEvent) {
        let AsyncEvent::Arrive { cta, warp, lane, upto, offset, event } = *arrival else { return };
        let at = At { cluster, cta, warp };
        self.perform_copies(at, lane, upto);
        let component = self.warp(at).copies.lanes[lane].component;
        let place = SharedPlace { cta, offset };
        let Some(mbarrier) = self.clusters[cluster].ctas[cta].mbarrier(offset) else { return };
        if let Some(component) = component {
            // The copy goes through the generic proxy, so it includes no fence between the proxies.
            let mut done = Bundle::default();
            done.generic.raise(component, upto);
            mbarrier.collected.join(&done);
        }
        mbarrier.remember(event);
        let change = mbarrier.arrive(1);
        self.changed(cluster, place, change, event);
    }

    /// Lets a copy that was issued in phase `issued` of an mbarrier signal it.
    pub(super) fn signal(&mut self, cluster: usize, place: SharedPlace, bytes: u32, issued: u32, event: u32) {
        let Some(mbarrier) = self.clusters[cluster].mbarrier(place) else { return };
        let change = mbarrier.complete_bytes(bytes, issued);
        self.changed(cluster, place, change, event);
    }

    /// An access by a copy that a lane of a warp begins, and that will signal an mbarrier in a phase.
    pub(super) fn load_access(
        &self,
        cluster: usize,
        (component, phase): (u16, u32),
        event: u32,
        kind: Kind,
        (warp, lane): (u16, Lane),
    ) -> Access {
        let epoch = Epoch { cluster: self.clusters[cluster].id, component, value: phase + 1 };
        Access { epoch, event, kind, origin: Origin::Load, warp, lane }
    }
}
