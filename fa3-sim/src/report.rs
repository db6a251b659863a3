//! Turns violations that the machine notices into findings.

use fa3_ir::Source;

use crate::clock::Space;
use crate::copies::{AsyncEvent, Target};
use crate::decoded::Op;
use crate::finding::{Finding, Replay, Site};
use crate::machine::{At, Machine};
use crate::memory::{Allocation, Demand, state};
use crate::rule::Rule;
use crate::shadow::{Access, Conflict, Kind, Origin};

/// The advice for a thread's read that a copy overwrites: how a pipeline of stages orders the two.
const EMPTY: &str = "an empty mbarrier: readers arrive at it after their last read (consumer_release), and the thread \
                     that copies waits for it before (producer_acquire)";

fn describe(access: Access, space: Space, bytes: Option<&str>) -> String {
    let verb = match access.kind {
        Kind::Read | Kind::StrongRead => "reads",
        Kind::Write => "writes",
        Kind::Strong => "atomically accesses",
        Kind::Reduction => "adds to",
    };
    let space = match space {
        Space::Shared => "shared",
        Space::Global => "global",
    };
    let proxy = if access.origin.asynchronous() { "async" } else { "generic" };
    let bytes = bytes.map_or_else(String::new, |bytes| format!(" {bytes}"));
    format!("{verb} {space} memory{bytes}, {proxy} proxy")
}

impl Machine<'_> {
    /// Reports a rule that a warp's current instruction breaks.
    pub(crate) fn find(&mut self, rule: Rule, at: At, what: impl Into<String>) {
        self.find_after(rule, at, None, what);
    }

    /// Reports a violation whose cause is an execution in the past.
    pub(crate) fn find_after(&mut self, rule: Rule, at: At, cause: Option<u32>, what: impl Into<String>) {
        let warp = &self.clusters[at.cluster].ctas[at.cta].warps[at.warp];
        if self.found.insert((rule, warp.code as u16, warp.pc as u32)) {
            let event = self.event(at);
            let (here, other) = (self.site(event, None), cause.and_then(|cause| self.site(cause, None)));
            self.push(rule, what.into(), here, other, None);
        }
    }

    /// Reports a rule that an earlier execution of an instruction breaks.
    pub(crate) fn find_event(&mut self, rule: Rule, event: u32, what: String) {
        if let Some(&past) = self.log.get(event as usize)
            && self.found.insert((rule, past.code, past.pc))
        {
            let here = self.site(event, None);
            self.push(rule, what, here, None, None);
        }
    }

    /// Reports a rule that no particular instruction breaks.
    pub(crate) fn find_nowhere(&mut self, rule: Rule, what: String) {
        self.push(rule, what, None, None, None);
    }

    /// Reports two accesses of `bytes` that conflict.
    pub(crate) fn conflict(&mut self, at: At, conflict: Conflict, new: Access, space: Space, bytes: String) {
        let old = conflict.old;
        let (rule, missing) = self.classify(at, conflict, new, space);
        let Some(&past) = self.log.get(new.event as usize) else { return };
        if !self.found.insert((rule, past.code, past.pc)) {
            return;
        }
        let here = self.site(new.event, Some(describe(new, space, Some(&bytes))));
        let other = self.site(old.event, Some(describe(old, space, None)));
        let hazard = match (old.kind, new.kind) {
            (Kind::Read | Kind::StrongRead, _) => "write after read",
            (_, Kind::Read | Kind::StrongRead) => "read after write",
            _ => "write after write",
        };
        let who = match (conflict.of_lanes, old.lane.number(), new.lane.number()) {
            (false, ..) => String::new(),
            (true, Some(old), Some(new)) => format!(" by lanes {old} and {new} of one warp"),
            (true, ..) => " by different lanes of one warp".to_owned(),
        };
        let wait = self.wait_for(at, old).map_or_else(String::new, |(what, _)| what);
        self.push(rule, format!("{hazard}{who}, unordered{wait}"), here, other, Some(missing));
    }

    /// The rule that two conflicting accesses break, and what would order them.
    fn classify(&mut self, at: At, conflict: Conflict, new: Access, space: Space) -> (Rule, &'static str) {
        let (id, old) = (self.clusters[at.cluster].id, conflict.old);
        let ordered = self.warp(at).bundle.generic.knows(id, old.epoch);
        match (old.origin, new.origin) {
            _ if conflict.of_lanes => (Rule::Lanes, "bar.warp.sync, or a wider barrier, between the two"),
            (Origin::Thread, _) if !ordered && self.is_claimed(at, old, new.origin, space) => (
                Rule::Lanes,
                "bar.warp.sync between the earlier access and the release by one lane of its warp",
            ),
            (Origin::Predecessor, _) => (Rule::G1, "griddepcontrol.wait before the access"),
            (Origin::Product, _) if self.is_uncommitted(at, old) => {
                (Rule::W3, "wgmma.commit_group after the product, before its wait")
            }
            (Origin::Product, _) => {
                (Rule::W6, "a wgmma.wait_group that retires the product, then a barrier, before the write")
            }
            (Origin::Store, Origin::Store) if old.kind != Kind::Read && new.kind != Kind::Read => {
                (Rule::T4, "cp.async.bulk.wait_group between the two copies")
            }
            (Origin::Store, _) if old.kind == Kind::Read => {
                (Rule::T2, "cp.async.bulk.wait_group.read by the thread that issued the copy, then a barrier")
            }
            (Origin::Store, _) => (
                Rule::T2,
                "cp.async.bulk.wait_group (not .read) by the thread that issued the copy, then a release",
            ),
            (Origin::Load, Origin::Load) if new.kind != Kind::Read => {
                (Rule::T4, "a wait for the mbarrier of the first copy between the two")
            }
            (
                Origin::Thread | Origin::CopyAsync | Origin::StoreAsync,
                Origin::Load | Origin::Store | Origin::Product,
            ) if ordered => {
                let rule = if new.kind == Kind::Read { Rule::W4 } else { Rule::W5 };
                (rule, "fence.proxy.async between the earlier access and the barrier that orders the two")
            }
            (Origin::Load | Origin::StoreAsync, _) => {
                let wrong = self.wait_for(at, old).map(|(_, missing)| missing);
                (Rule::Race, wrong.unwrap_or("a wait for the mbarrier of the copy before the access"))
            }
            (Origin::CopyAsync, _) => {
                (Rule::Race, "cp.async.wait_group, or a wait for the mbarrier that the copy arrives at")
            }
            (Origin::Thread, Origin::Load) if matches!(old.kind, Kind::Read | Kind::StrongRead) => {
                (Rule::Race, EMPTY)
            }
            (Origin::Thread, _) => (Rule::Race, self.between(at, old)),
        }
    }

    /// A wait of this warp for the mbarrier of a copy, and the reason why the wait does not order the copy before the
    /// warp.
    fn wait_for(&self, at: At, copy: Access) -> Option<(String, &'static str)> {
        let cluster = &self.clusters[at.cluster];
        if !matches!(copy.origin, Origin::Load | Origin::StoreAsync) || copy.epoch.cluster != cluster.id {
            return None;
        }
        let passes = &cluster.ctas[at.cta].warps[at.warp].passes;
        let pass = passes.iter().find(|pass| pass.component == copy.epoch.component)?;
        let source = self.source(pass.event)?;
        let (file, line, parity) = (source.file(), source.line(), pass.parity);
        Some(if pass.complete < copy.epoch.value {
            let what = format!(
                ": its wait at {file}:{line} for parity {parity} passed by an earlier phase than the copy's"
            );
            (what, "a wait with the parity of the copy's phase before the access")
        } else {
            let what = format!(
                ": the phase that its wait at {file}:{line} was for completed without the copy's bytes"
            );
            (what, "an arrival that expects the bytes of the copy (expect_tx) in its phase")
        })
    }

    /// Names an instruction or a barrier that would order a thread's access before the next access, by another thread.
    fn between(&self, at: At, old: Access) -> &'static str {
        let (cluster, cta) = (&self.clusters[at.cluster], &self.clusters[at.cluster].ctas[at.cta]);
        let earlier = self.log.get(old.event as usize).map(|event| event.cta);
        if earlier == Some(cta.number) {
            "a barrier between the two; or atomics, if both update one value"
        } else if old.epoch.cluster == cluster.id {
            "a barrier of the cluster between the two; or atomics, if both update one value"
        } else {
            "atomics, if both update one value; or a flag that one releases and the other acquires: no barrier is for \
             both ctas"
        }
    }

    /// Whether a lane of the warp that made an access has released something since, and the next access by this warp
    /// comes after that release. The two accesses would be ordered if that lane had released what its whole warp did.
    fn is_claimed(&self, at: At, access: Access, origin: Origin, space: Space) -> bool {
        let cluster = &self.clusters[at.cluster];
        let after = Machine::after(cluster.id, &cluster.ctas[at.cta].warps[at.warp], origin, space);
        let maker = cluster.warps().find(|warp| warp.component == access.warp);
        let claim = maker.and_then(|warp| warp.claim);
        access.epoch.cluster == cluster.id
            && claim.is_some_and(|claim| after.clock.get(claim) >= access.epoch.value)
    }

    /// Whether an access is by a product that its warp never committed.
    fn is_uncommitted(&mut self, at: At, access: Access) -> bool {
        let cluster = &self.clusters[at.cluster];
        access.epoch.cluster == cluster.id
            && cluster.warps().any(|warp| {
                warp.flight.component == Some(access.epoch.component)
                    && warp.flight.uncommitted(access.epoch.value)
            })
    }

    /// The line that built an executed instruction.
    fn source(&self, event: u32) -> Option<Source> {
        let event = self.log.get(event as usize)?;
        Some(self.program.codes[usize::from(event.code)].steps[event.pc as usize].source)
    }

    pub(crate) fn site(&self, event: u32, access: Option<String>) -> Option<Site> {
        let event = self.log.get(event as usize)?;
        let code = &self.program.codes[usize::from(event.code)];
        let step = &code.steps[event.pc as usize];
        let [x, y, _] = self.grid;
        Some(Site {
            role: code.role.to_owned(),
            cta: [event.cta % x, event.cta / x % y, event.cta / x / y],
            warp: event.warp.into(),
            source: step.source,
            iteration: event.iteration,
            instruction: name(&step.op),
            access,
        })
    }

    fn push(
        &mut self,
        rule: Rule,
        what: String,
        here: Option<Site>,
        other: Option<Site>,
        missing: Option<&'static str>,
    ) {
        let (kernel, grid, policy) = (self.program.kernel.name.clone(), self.grid, self.schedule.policy);
        let replay = Replay { kernel, grid, policy };
        self.over |= self.until.contains(&rule);
        let (waits, more, cause) = (Vec::new(), 0, None);
        self.findings.push(Finding { rule, what, here, other, missing, waits, more, cause, replay });
    }

    /// Adds the list of what warps wait for to the last finding.
    pub(crate) fn explain(&mut self, waits: Vec<String>) {
        if let Some(last) = self.findings.last_mut() {
            last.waits = waits;
        }
    }

    /// Rule I1 for outputs: checks that every byte that must be written was written.
    pub(crate) fn check_output(&mut self) {
        let demanded = |of: &&Allocation| matches!(of.demand, Demand::Once | Demand::Rest);
        let missing = self.memory.allocations.iter().filter(demanded).filter_map(|of| {
            let untouched = |state: &&u8| *state & (state::WRITTEN | state::REDUCED) == 0;
            let first = of.state.iter().position(|state| untouched(&state))?;
            let (count, all, name) = (of.state.iter().filter(untouched).count(), of.bytes.len(), &of.name);
            Some(format!("{count} of {all} bytes of {name} were never written, the first is byte {first}"))
        });
        let missing: Vec<String> = missing.collect();
        missing.into_iter().for_each(|what| self.find_nowhere(Rule::I1, what));
    }

    /// Loads under way that will signal an mbarrier.
    pub(crate) fn loads_for(&self, cluster: usize, cta: usize, offset: u32) -> usize {
        let signals = |target: &Target| (target.cta, target.mbarrier) == (cta, offset);
        let signals = |event: &&AsyncEvent| match event {
            AsyncEvent::Load(load) => load.targets.iter().any(signals),
            AsyncEvent::Store(store) => signals(&store.target),
            AsyncEvent::Arrive { cta: of, offset: to, .. } => (*of, *to) == (cta, offset),
        };
        self.clusters[cluster].events.iter().filter(signals).count()
    }
}

/// Name of a step's instruction.
fn name(op: &Op) -> &'static str {
    use fa3_ir::{
        BarrierInst, ClusterInst, Inst, MbarrierInst, MemInst, MiscInst, ObserveInst, TmaInst, WarpInst,
        WgmmaInst,
    };
    match op {
        Op::Lane(lane) => lane.op.name(),
        Op::Set { .. } => "set",
        Op::Mma { .. } => "wgmma",
        Op::If { .. } | Op::Else { .. } | Op::EndIf => "if",
        Op::Loop | Op::Repeat { .. } => "loop",
        Op::Break { .. } => "break",
        Op::Exit => "exit",
        Op::Inst(inst) => match inst {
            Inst::Lane(lane) => lane.op.name(),
            Inst::Set { .. } => "set",
            Inst::Special { register, .. } => register.ptx(),
            Inst::RegionAddress { .. } => "address",
            Inst::Mem(inst) => match inst {
                MemInst::LoadParam { .. } => "ld.param",
                MemInst::Load { .. } => "ld",
                MemInst::Store { .. } => "st",
                MemInst::LoadAcquire { .. } => "ld.acquire",
                MemInst::StoreRelease { .. } => "st.release",
                MemInst::Atomic { .. } => "atom",
                MemInst::ReduceAdd { .. } => "red",
                MemInst::Prefetch { .. } => "prefetch",
                MemInst::CopyAsync { .. } => "cp.async",
                MemInst::CopyAsyncCommit => "cp.async.commit_group",
                MemInst::CopyAsyncWait { .. } => "cp.async.wait_group",
            },
            Inst::Warp(inst) => match inst {
                WarpInst::Shfl { .. } => "shfl",
                WarpInst::Vote { .. } | WarpInst::Ballot { .. } => "vote",
                WarpInst::Elect { .. } => "elect",
                WarpInst::Sync => "bar.warp.sync",
                WarpInst::Ldmatrix { .. } => "ldmatrix",
                WarpInst::Stmatrix { .. } => "stmatrix",
            },
            Inst::Barrier(BarrierInst::Arrive(_)) => "bar.arrive",
            Inst::Barrier(BarrierInst::SyncCta | BarrierInst::Sync(_)) => "bar.sync",
            Inst::Mbarrier(inst) => match inst {
                MbarrierInst::Init { .. } => "mbarrier.init",
                MbarrierInst::Invalidate { .. } => "mbarrier.inval",
                MbarrierInst::Arrive { .. } | MbarrierInst::ArriveRemote { .. } => "mbarrier.arrive",
                MbarrierInst::ArriveExpect { .. } => "mbarrier.arrive.expect_tx",
                MbarrierInst::Expect { .. } => "mbarrier.expect_tx",
                MbarrierInst::ArriveCopied { .. } => "cp.async.mbarrier.arrive",
                MbarrierInst::Wait { .. } | MbarrierInst::TryWait { .. } => "mbarrier.try_wait",
                MbarrierInst::TestWait { .. } => "mbarrier.test_wait",
            },
            Inst::Tma(inst) => match inst {
                TmaInst::Load { .. } => "tensor load",
                TmaInst::Store { .. } => "tensor store",
                TmaInst::ReduceAdd { .. } => "tensor addition",
                TmaInst::BulkLoad { .. } => "bulk load",
                TmaInst::BulkStore { .. } => "bulk store",
                TmaInst::BulkReduceAddF32 { .. } => "bulk addition",
                TmaInst::Prefetch { .. } => "prefetch.tensormap",
                TmaInst::Commit => "cp.async.bulk.commit_group",
                TmaInst::Wait { read: false, .. } => "cp.async.bulk.wait_group",
                TmaInst::Wait { read: true, .. } => "cp.async.bulk.wait_group.read",
            },
            Inst::Wgmma(inst) => match inst {
                WgmmaInst::Fence => "wgmma.fence",
                WgmmaInst::Commit => "wgmma.commit_group",
                WgmmaInst::Wait { .. } => "wgmma.wait_group",
                WgmmaInst::Mma(_) => "wgmma",
            },
            Inst::Fence(fence) => fence.ptx(),
            Inst::Cluster(inst) => match inst {
                ClusterInst::Arrive { .. } => "barrier.cluster.arrive",
                ClusterInst::Wait => "barrier.cluster.wait",
                ClusterInst::MapAddress { .. } => "mapa",
                ClusterInst::StoreAsync { .. } => "st.async",
            },
            Inst::Misc(inst) => match inst {
                MiscInst::SetMaxRegisters { .. } => "setmaxnreg",
                MiscInst::GridDependencyWait => "griddepcontrol.wait",
                MiscInst::LaunchDependents => "griddepcontrol.launch_dependents",
                MiscInst::Trap => "trap",
            },
            Inst::Observe(inst) => match inst {
                ObserveInst::Probe { .. } => "probe",
                ObserveInst::Assert { .. } => "assert",
            },
        },
    }
}
