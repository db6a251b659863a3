//! Arrivals at mbarriers, the bytes they expect, and how many complete a phase.

use fa3_ir::{ClusterInst, Imm, Inst, MbarrierInst, Operand, SharedAddr};
use fa3_sim::Rule;

use super::waits::first_round;
use super::{NOTHING, deleted, deleted_unless, later};
use crate::mutate::edit::Edit;
use crate::mutate::kinds::{is_init, is_load, is_plain_arrival, is_wait};
use crate::mutate::{Anatomy, Operator, Site};

pub(super) const OPERATORS: &[Operator] = &[
    Operator {
        name: "empty arrive: deleted",
        rules: &[Rule::Deadlock],
        sites: |kernel| deleted_unless(kernel, kernel.find(is_plain_arrival), last_round),
        ..NOTHING
    },
    Operator {
        name: "empty arrive: after the next wait for it",
        rules: &[Rule::Deadlock],
        sites: |kernel| {
            let moved = later(kernel, kernel.find(is_plain_arrival), |line| {
                let region = kernel.mbarrier(kernel.inst(line)?);
                kernel.after(line, |inst| is_wait(inst) && kernel.mbarrier(inst) == region)
            });
            moved.into_iter().map(|site| Site { equivalent: spare_slot(kernel, site.line), ..site }).collect()
        },
        ..NOTHING
    },
    Operator {
        name: "empty arrive: by every lane",
        rules: &[Rule::M2, Rule::M4],
        sites: |kernel| unguarded(kernel, kernel.find(is_plain_arrival)),
        ..NOTHING
    },
    Operator {
        name: "empty arrive: at another CTA's mbarrier",
        rules: &[Rule::Deadlock, Rule::M2, Rule::M4],
        sites: |kernel| {
            let mapped = kernel.find(|inst| matches!(inst, Inst::Cluster(ClusterInst::MapAddress { .. })));
            mapped.into_iter().filter_map(|line| elsewhere(kernel, line)).collect()
        },
        ..NOTHING
    },
    Operator {
        name: "cp.async arrive: deleted",
        rules: &[Rule::Deadlock],
        sites: |kernel| deleted(kernel.find(|inst| copied(inst).is_some())),
        ..NOTHING
    },
    Operator {
        name: "cp.async arrive: at once",
        rules: &[Rule::Race, Rule::W4],
        sites: |kernel| {
            let arrivals = kernel.find(|inst| copied(inst).is_some()).into_iter();
            let at_once = |addr| Inst::Mbarrier(MbarrierInst::Arrive { addr });
            arrivals
                .filter_map(|line| Some(Site::replaced(line, at_once(copied(kernel.inst(line)?)?))))
                .collect()
        },
        ..NOTHING
    },
    Operator {
        name: "expect_tx and its arrival: deleted",
        rules: &[Rule::Deadlock],
        sites: |kernel| deleted(kernel.find(|inst| expected(inst).is_some())),
        ..NOTHING
    },
    Operator {
        name: "expect_tx: no bytes",
        rules: &[Rule::M5],
        sites: |kernel| expecting(kernel, |addr, _| MbarrierInst::Arrive { addr }),
        ..NOTHING
    },
    Operator {
        name: "expect_tx: + 16 bytes",
        rules: &[Rule::M5, Rule::Deadlock],
        sites: |kernel| {
            expecting(kernel, |addr, bytes| MbarrierInst::ArriveExpect { addr, bytes: constant(bytes + 16) })
        },
        ..NOTHING
    },
    Operator {
        name: "expect_tx: - 16 bytes",
        rules: &[Rule::M5],
        sites: |kernel| {
            expecting(kernel, |addr, bytes| MbarrierInst::ArriveExpect {
                addr,
                bytes: constant(bytes.saturating_sub(16)),
            })
        },
        ..NOTHING
    },
    Operator {
        name: "expect_tx: on the other side of a load",
        sites: |kernel| {
            let reason = "bytes may arrive before they are expected: the phase still misses an arrival";
            let side = |line| {
                let before = || Some(Site::before(kernel, line, kernel.before(line, brings_bytes)?));
                let after = || Some(Site::after(kernel, line, kernel.after(line, brings_bytes)?));
                Some(before().or_else(after)?.equivalent(reason))
            };
            let loads = |inst: &Inst| expected(inst).is_some_and(|(_, bytes)| bytes > 0);
            kernel.find(loads).into_iter().filter_map(side).collect()
        },
        ..NOTHING
    },
    Operator {
        name: "st.async: deleted",
        rules: &[Rule::Deadlock, Rule::M5],
        sites: |kernel| deleted(kernel.find(is_remote_store)),
        ..NOTHING
    },
    Operator {
        name: "st.async: by every lane",
        rules: &[Rule::M5, Rule::Race],
        sites: |kernel| unguarded(kernel, kernel.find(is_remote_store)),
        ..NOTHING
    },
    Operator {
        name: "mbarrier.init: + 1 arrival",
        rules: &[Rule::Deadlock],
        sites: |kernel| counts(kernel, |arrivals| arrivals + 1),
        ..NOTHING
    },
    Operator {
        name: "mbarrier.init: - 1 arrival",
        rules: &[Rule::M2, Rule::M4, Rule::W6],
        verifier: &["V-6"],
        sites: |kernel| counts(kernel, |arrivals| arrivals - 1),
        ..NOTHING
    },
    Operator {
        name: "mbarrier: full for empty, or empty for full",
        rules: &[Rule::Race, Rule::Deadlock, Rule::M2, Rule::M3, Rule::M4, Rule::M5],
        sites: |kernel| {
            let addresses = kernel.find(|inst| matches!(inst, Inst::RegionAddress { .. })).into_iter();
            addresses.filter_map(|line| swapped(kernel, line)).collect()
        },
        ..NOTHING
    },
];

/// The mbarrier at which an arrival counts that comes when a thread's copies are complete.
fn copied(inst: &Inst) -> Option<SharedAddr> {
    let Inst::Mbarrier(MbarrierInst::ArriveCopied { addr }) = inst else { return None };
    Some(*addr)
}

fn is_remote_store(inst: &Inst) -> bool {
    matches!(inst, Inst::Cluster(ClusterInst::StoreAsync { .. }))
}

/// Brings what a phase expects.
fn brings_bytes(inst: &Inst) -> bool {
    is_load(inst) || is_remote_store(inst)
}

fn constant(bits: u32) -> Operand {
    Operand::Imm(Imm::B32(bits))
}

/// The mbarrier and the bytes that an arrival expects; none where threads bring the data themselves.
fn expected(inst: &Inst) -> Option<(SharedAddr, u32)> {
    let Inst::Mbarrier(MbarrierInst::ArriveExpect { addr, bytes }) = inst else { return None };
    Some((*addr, bytes.constant()?))
}

fn expecting(kernel: &Anatomy<'_>, change: fn(SharedAddr, u32) -> MbarrierInst) -> Vec<Site> {
    let arrivals = kernel.find(|inst| expected(inst).is_some()).into_iter();
    let changed = arrivals.filter_map(|line| {
        let (addr, bytes @ 1..) = expected(kernel.inst(line)?)? else { return None };
        Some(Site::replaced(line, Inst::Mbarrier(change(addr, bytes))))
    });
    changed.collect()
}

/// An arrival is for whoever waits for it, later or in a next round of a loop around both.
pub(super) fn last_round(kernel: &Anatomy<'_>, arrival: usize) -> Option<&'static str> {
    let waits = kernel.waits_for(kernel.mbarrier(kernel.inst(arrival)?)?);
    let last = kernel.innermost_loop(arrival).is_none() && waits.iter().all(|&wait| wait < arrival);
    (last && kernel.has_one_role()).then_some("nobody waits for the slot any more")
}

/// Where fewer slots are loaded ahead than there are, a round waits for what the round before gave back. What is given
/// before a loop is waited for in its first round.
fn spare_slot(kernel: &Anatomy<'_>, arrival: usize) -> Option<&'static str> {
    let region = kernel.mbarrier(kernel.inst(arrival)?)?;
    let waits = kernel.waits_for(region);
    let next = *waits.iter().find(|&&wait| wait > arrival)?;
    let ahead = waits.iter().filter(|&&wait| wait < arrival).count();
    let of_round = kernel.innermost_loop(next) == kernel.innermost_loop(arrival);
    (of_round && ahead < kernel.slots(region)?)
        .then_some("the slot that is waited for there was given back a round before")
}

/// The address in a CTA of the cluster, in the next one instead.
fn elsewhere(kernel: &Anatomy<'_>, line: usize) -> Option<Site> {
    let mut inst = kernel.inst(line)?.clone();
    let Inst::Cluster(ClusterInst::MapAddress { cta, .. }) = &mut inst else { return None };
    *cta = constant((cta.constant()? + 1) % kernel.kernel.launch.cluster);
    Some(Site::replaced(line, inst))
}

/// Each of `lines` done by every lane, which computes where, not by the elected one alone.
fn unguarded(kernel: &Anatomy<'_>, lines: Vec<usize>) -> Vec<Site> {
    let site = |line| {
        let guard = kernel.guard(line);
        let together = (0..kernel.len()).filter(|&other| guard.is_some() && kernel.guard(other) == guard);
        Site::new(line, together.map(|line| Edit::Guard(line, None)).collect())
    };
    lines.into_iter().map(site).collect()
}

/// The mbarriers of each region, initialised for another number of arrivals.
fn counts(kernel: &Anatomy<'_>, change: fn(u32) -> u32) -> Vec<Site> {
    let site = |(region, _)| {
        let inits = kernel.find(|inst| is_init(inst) && kernel.mbarrier(inst) == Some(region));
        let arrivals = change(init(kernel, *inits.first()?)?.1);
        let changed = inits.iter().filter_map(|&line| {
            let (addr, _) = init(kernel, line)?;
            Some(Edit::Inst(line, Inst::Mbarrier(MbarrierInst::Init { addr, arrivals })))
        });
        Some(Site::new(inits[0], changed.chain([Edit::Arrivals(region, arrivals)]).collect()))
    };
    kernel.mbarriers().filter_map(site).collect()
}

/// The mbarrier that a statement initialises, and for how many arrivals.
fn init(kernel: &Anatomy<'_>, line: usize) -> Option<(SharedAddr, u32)> {
    let Some(Inst::Mbarrier(MbarrierInst::Init { addr, arrivals })) = kernel.inst(line) else { return None };
    Some((*addr, *arrivals))
}

/// The address of a ring's mbarriers that is that of the ring's others.
fn swapped(kernel: &Anatomy<'_>, line: usize) -> Option<Site> {
    let Some(Inst::RegionAddress { dst, region }) = kernel.inst(line) else { return None };
    let slots = kernel.slots(*region)?;
    let mut others = kernel.mbarriers().filter(|&(other, count)| other != *region && count as usize == slots);
    let (other, _) = others.next()?;
    let waits = kernel.waits_for(*region).into_iter();
    let mut its_wait = waits.filter(|&wait| kernel.wait_address(wait) == Some(line));
    let reason = its_wait.next().and_then(|wait| first_round(kernel, wait));
    Some(Site::replaced(line, Inst::RegionAddress { dst: *dst, region: other }).equivalent(reason))
}
