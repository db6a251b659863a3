//! Arrivals at mbarriers, the bytes they expect, and how many complete a phase.

use fa3_ir::{ClusterInst, Imm, Inst, MbarrierInst, Operand, Region, RegionKind, TmaInst};
use fa3_sim::Rule;

use super::fences::initialises;
use super::waits::first_round;
use super::{NOTHING, deleted, later};
use crate::mutate::anatomy::is_plain_arrival;
use crate::mutate::edit::Edit;
use crate::mutate::{Anatomy, Operator, Site};

/// Who finds arrivals that are too many.
const EXCESS: &[Rule] = &[Rule::M2, Rule::M4];

pub(super) const OPERATORS: &[Operator] = &[
    Operator {
        name: "empty arrive: deleted",
        rules: &[Rule::Deadlock],
        sites: |kernel| {
            let site = |line| Site::deleted(line).equivalent(last_round(kernel, line));
            kernel.find(is_plain_arrival).into_iter().map(site).collect()
        },
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
        rules: EXCESS,
        sites: |kernel| {
            kernel.find(is_plain_arrival).into_iter().map(|line| unguarded(kernel, line)).collect()
        },
        ..NOTHING
    },
    Operator {
        name: "empty arrive: at another CTA's mbarrier",
        rules: &[Rule::Deadlock, Rule::M2, Rule::M4],
        sites: |kernel| {
            let mapped = kernel.find(|inst| matches!(inst, Inst::Cluster(ClusterInst::MapAddress { .. })));
            let elsewhere = mapped.into_iter().filter_map(|line| {
                let Some(Inst::Cluster(ClusterInst::MapAddress { dst, addr, cta })) = kernel.inst(line)
                else {
                    return None;
                };
                let cta = Operand::Imm(Imm::B32((cta.constant()? + 1) % kernel.kernel.launch.cluster));
                let mapped = ClusterInst::MapAddress { dst: *dst, addr: *addr, cta };
                Some(Site::replaced(line, Inst::Cluster(mapped)))
            });
            elsewhere.collect()
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
            expecting(kernel, |addr, bytes| MbarrierInst::ArriveExpect { addr, bytes: constant(bytes - 16) })
        },
        ..NOTHING
    },
    Operator {
        name: "expect_tx: on the other side of a load",
        sites: |kernel| {
            let reason = "bytes may arrive before they are expected: the phase still misses an arrival";
            let side = |line| {
                let before = || Some(Site::before(kernel, line, kernel.before(line, is_load)?));
                let after = || Some(Site::after(kernel, line, kernel.after(line, is_load)?));
                Some(before().or_else(after)?.equivalent(reason))
            };
            kernel.find(|inst| expected(inst).is_some()).into_iter().filter_map(side).collect()
        },
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
        rules: &[Rule::Deadlock, Rule::M2, Rule::M3, Rule::M4, Rule::M5],
        sites: |kernel| {
            let addresses = kernel.find(|inst| matches!(inst, Inst::RegionAddress { .. })).into_iter();
            let swapped = addresses.filter_map(|line| {
                let Some(Inst::RegionAddress { dst, region }) = kernel.inst(line) else { return None };
                let region = sibling(kernel, *region)?;
                let wait = kernel
                    .after(line, is_wait)
                    .filter(|&wait| kernel.region_address_used(wait) == Some(line));
                let reason = wait.and_then(|wait| first_round(kernel, wait));
                Some(Site::replaced(line, Inst::RegionAddress { dst: *dst, region }).equivalent(reason))
            });
            swapped.collect()
        },
        ..NOTHING
    },
];

fn constant(bits: u32) -> Operand {
    Operand::Imm(Imm::B32(bits))
}

fn is_wait(inst: &Inst) -> bool {
    matches!(inst, Inst::Mbarrier(MbarrierInst::Wait { .. }))
}

fn is_load(inst: &Inst) -> bool {
    matches!(inst, Inst::Tma(TmaInst::Load { .. }))
}

/// The mbarrier and the bytes that an arrival expects.
fn expected(inst: &Inst) -> Option<(fa3_ir::SharedAddr, u32)> {
    let Inst::Mbarrier(MbarrierInst::ArriveExpect { addr, bytes }) = inst else { return None };
    Some((*addr, bytes.constant()?))
}

fn expecting(kernel: &Anatomy<'_>, change: fn(fa3_ir::SharedAddr, u32) -> MbarrierInst) -> Vec<Site> {
    let arrivals = kernel.find(|inst| expected(inst).is_some()).into_iter();
    let changed = arrivals.filter_map(|line| {
        let (addr, bytes) = expected(kernel.inst(line)?)?;
        Some(Site::replaced(line, Inst::Mbarrier(change(addr, bytes))))
    });
    changed.collect()
}

/// An arrival is for whoever waits for it, later or in a next round of a loop around both.
pub(super) fn last_round(kernel: &Anatomy<'_>, line: usize) -> Option<&'static str> {
    let region = kernel.mbarrier(kernel.inst(line)?)?;
    let waits = kernel.find(|inst| is_wait(inst) && kernel.mbarrier(inst) == Some(region));
    let last = kernel.innermost_loop(line).is_none() && waits.iter().all(|&wait| wait < line);
    let one_role = kernel.kernel.roles.is_empty();
    (last && one_role).then_some("nobody waits for the slot any more")
}

/// Where fewer slots are loaded ahead than there are, a round waits for what the round before gave back.
fn spare_slot(kernel: &Anatomy<'_>, line: usize) -> Option<&'static str> {
    let region = kernel.mbarrier(kernel.inst(line)?)?;
    let slots = kernel.kernel.smem.get(region)?.bytes / 8;
    let waits = kernel.find(|inst| is_wait(inst) && kernel.mbarrier(inst) == Some(region));
    let ahead = waits.iter().filter(|&&wait| kernel.innermost_loop(wait).is_none()).count();
    (ahead < slots as usize).then_some("the slot that is waited for there was given back a round before")
}

/// With every lane arriving, and computing where, not the elected one alone.
fn unguarded(kernel: &Anatomy<'_>, line: usize) -> Site {
    let guard = kernel.guard(line);
    let together = (0..kernel.len()).filter(|&other| guard.is_some() && kernel.guard(other) == guard);
    Site::new(line, together.map(|line| Edit::Guard(line, None)).collect())
}

/// The mbarriers of each region, initialised for another number of arrivals.
fn counts(kernel: &Anatomy<'_>, change: fn(u32) -> u32) -> Vec<Site> {
    let regions = kernel.kernel.smem.regions.iter().zip(0..).map(|(_, index)| Region(index));
    let changed = regions.filter_map(|region| {
        let RegionKind::Mbarriers { arrivals } = kernel.kernel.smem.get(region)?.kind else { return None };
        let arrivals = change(arrivals);
        let inits = kernel.find(|inst| initialises(inst) && kernel.mbarrier(inst) == Some(region));
        let init = |&line: &usize| {
            let Some(Inst::Mbarrier(MbarrierInst::Init { addr, .. })) = kernel.inst(line) else {
                return None;
            };
            Some(Edit::Inst(line, Inst::Mbarrier(MbarrierInst::Init { addr: *addr, arrivals })))
        };
        let declared = Edit::Arrivals(region, arrivals);
        Some(Site::new(*inits.first()?, inits.iter().filter_map(init).chain([declared]).collect()))
    });
    changed.collect()
}

/// Another region of as many mbarriers.
fn sibling(kernel: &Anatomy<'_>, region: Region) -> Option<Region> {
    let mbarriers = |region: Region| {
        let info = kernel.kernel.smem.get(region)?;
        matches!(info.kind, RegionKind::Mbarriers { .. }).then_some(info.bytes)
    };
    let bytes = mbarriers(region)?;
    let regions = (0..kernel.kernel.smem.regions.len() as u32).map(Region);
    regions.into_iter().find(|&other| other != region && mbarriers(other) == Some(bytes))
}
