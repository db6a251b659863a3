//! Arrivals at mbarriers, expected bytes, and arrival counts.

use fa3_ir::{ClusterInst, Inst, MbarrierInst, SharedAddr};
use fa3_sim::Rule::*;

use super::waits::first_round;
use super::{constant, deleted, deleted_unless, later, sites, unless};
use crate::mutate::edit::Edit;
use crate::mutate::kinds::{is_init, is_load, is_plain_arrival, is_wait};
use crate::mutate::{Anatomy, Operator, Site};

pub(super) const OPERATORS: &[Operator] = &[
    Operator::new("empty arrive: deleted", &[Deadlock], |kernel| {
        deleted_unless(kernel, kernel.find(is_plain_arrival), last_round)
    }),
    Operator::new("empty arrive: after the next wait for it", &[Deadlock], |kernel| {
        let moved = later(kernel, kernel.find(is_plain_arrival), |line| {
            let region = kernel.mbarrier(kernel.inst(line)?);
            kernel.after(line, |inst| is_wait(inst) && kernel.mbarrier(inst) == region)
        });
        unless(moved, |line| spare_stage(kernel, line))
    }),
    Operator::new("empty arrive: by every lane", &[M2, M4], |kernel| {
        unguarded(kernel, kernel.find(is_plain_arrival))
    }),
    Operator::new("empty arrive: at another CTA's mbarrier", &[Deadlock, M2, M4], |kernel| {
        sites(0..kernel.len(), |line| elsewhere(kernel, line))
    }),
    Operator::new("cp.async arrive: deleted", &[Deadlock], |kernel| {
        deleted(kernel.find(|inst| copied(inst).is_some()))
    }),
    Operator::new("cp.async arrive: at once", &[Race, W4], |kernel| {
        sites(0..kernel.len(), |line| {
            let addr = copied(kernel.inst(line)?)?;
            Some(Site::replaced(line, Inst::Mbarrier(MbarrierInst::Arrive { addr })))
        })
    }),
    Operator::new("expect_tx and its arrival: deleted", &[Deadlock], |kernel| {
        deleted(kernel.find(|inst| expected(inst).is_some()))
    }),
    Operator::new("expect_tx: no bytes", &[M5], |kernel| {
        expecting(kernel, |addr, _| MbarrierInst::Arrive { addr })
    }),
    Operator::new("expect_tx: + 16 bytes", &[M5, Deadlock], |kernel| {
        expecting(kernel, |addr, bytes| MbarrierInst::ArriveExpect { addr, bytes: constant(bytes + 16) })
    }),
    Operator::new("expect_tx: - 16 bytes", &[M5], |kernel| {
        expecting(kernel, |addr, bytes| MbarrierInst::ArriveExpect {
            addr,
            bytes: constant(bytes.saturating_sub(16)),
        })
    }),
    Operator::new("expect_tx: on the other side of a load", &[], |kernel| {
        let reason = "bytes may arrive before they are expected: the phase still misses an arrival";
        let side = |line| {
            let before = || Some(Site::before(kernel, line, kernel.before(line, brings_bytes)?));
            let after = || Some(Site::after(kernel, line, kernel.after(line, brings_bytes)?));
            Some(before().or_else(after)?.equivalent(reason))
        };
        let loads = |inst: &Inst| expected(inst).is_some_and(|(_, bytes)| bytes > 0);
        sites(kernel.find(loads), side)
    }),
    Operator::new("st.async: deleted", &[Deadlock, M5], |kernel| deleted(kernel.find(is_remote_store))),
    Operator::new("st.async: by every lane", &[M5, Race], |kernel| {
        unguarded(kernel, kernel.find(is_remote_store))
    }),
    Operator::new("mbarrier.init: + 1 arrival", &[Deadlock], |kernel| {
        counts(kernel, |arrivals| arrivals + 1)
    }),
    Operator::new("mbarrier.init: - 1 arrival", &[M2, M4, W6], |kernel| {
        counts(kernel, |arrivals| arrivals - 1)
    })
    .or_verifier(&["V-6"]),
    Operator::new(
        "mbarrier: full for empty, or empty for full",
        &[Race, Deadlock, M2, M3, M4, M5],
        |kernel| sites(0..kernel.len(), |line| swapped(kernel, line)),
    ),
];

/// The mbarrier at which a thread arrives when its own copies complete (cp.async.mbarrier.arrive).
fn copied(inst: &Inst) -> Option<SharedAddr> {
    let Inst::Mbarrier(MbarrierInst::ArriveCopied { addr }) = inst else { return None };
    Some(*addr)
}

fn is_remote_store(inst: &Inst) -> bool {
    matches!(inst, Inst::Cluster(ClusterInst::StoreAsync { .. }))
}

/// Whether an instruction delivers the bytes that a phase expects.
fn brings_bytes(inst: &Inst) -> bool {
    is_load(inst) || is_remote_store(inst)
}

/// Mbarrier and expected bytes of an arrival. Arrivals of threads that store the data themselves expect no bytes.
fn expected(inst: &Inst) -> Option<(SharedAddr, u32)> {
    let Inst::Mbarrier(MbarrierInst::ArriveExpect { addr, bytes }) = inst else { return None };
    Some((*addr, bytes.constant()?))
}

fn expecting(kernel: &Anatomy<'_>, change: fn(SharedAddr, u32) -> MbarrierInst) -> Vec<Site> {
    sites(0..kernel.len(), |line| {
        let (addr, bytes @ 1..) = expected(kernel.inst(line)?)? else { return None };
        Some(Site::replaced(line, Inst::Mbarrier(change(addr, bytes))))
    })
}

/// Reason why an arrival is redundant: it comes after all waits, and no loop contains it.
pub(super) fn last_round(kernel: &Anatomy<'_>, arrival: usize) -> Option<&'static str> {
    let waits = kernel.waits_for(kernel.mbarrier(kernel.inst(arrival)?)?);
    let last = kernel.innermost_loop(arrival).is_none() && waits.iter().all(|&wait| wait < arrival);
    (last && kernel.has_one_role()).then_some("no thread waits for the stage any more")
}

/// Reason why an arrival may come after the next wait. If fewer stages are prefetched than exist, this wait is for a
/// stage that was released in the previous iteration, or before the loop.
fn spare_stage(kernel: &Anatomy<'_>, arrival: usize) -> Option<&'static str> {
    let region = kernel.mbarrier(kernel.inst(arrival)?)?;
    let waits = kernel.waits_for(region);
    let next = *waits.iter().find(|&&wait| wait > arrival)?;
    let ahead = waits.iter().filter(|&&wait| wait < arrival).count();
    let of_round = kernel.innermost_loop(next) == kernel.innermost_loop(arrival);
    (of_round && ahead < kernel.stages(region)?)
        .then_some("the stage that is waited for there was given back a round before")
}

/// Maps an address (mapa) to the next CTA of the cluster instead.
fn elsewhere(kernel: &Anatomy<'_>, line: usize) -> Option<Site> {
    let mut inst = kernel.inst(line)?.clone();
    let Inst::Cluster(ClusterInst::MapAddress { cta, .. }) = &mut inst else { return None };
    *cta = constant((cta.constant()? + 1) % kernel.kernel.launch.cluster);
    Some(Site::replaced(line, inst))
}

/// Lets every lane, not only the elected one, execute each of `lines`, if every lane computes its address.
fn unguarded(kernel: &Anatomy<'_>, lines: Vec<usize>) -> Vec<Site> {
    sites(lines, |line| {
        let guard = Some(kernel.guard(line)?);
        let together = (0..kernel.len()).filter(|&other| kernel.guard(other) == guard);
        Some(Site::new(line, together.map(|line| Edit::Guard(line, None)).collect()))
    })
}

/// Changes the arrival count of the mbarriers of each region.
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

/// Mbarrier and arrival count of an initialization.
fn init(kernel: &Anatomy<'_>, line: usize) -> Option<(SharedAddr, u32)> {
    let Some(Inst::Mbarrier(MbarrierInst::Init { addr, arrivals })) = kernel.inst(line) else { return None };
    Some((*addr, *arrivals))
}

/// Replaces the address of a pipeline's full mbarriers by the address of its empty mbarriers, or the reverse.
fn swapped(kernel: &Anatomy<'_>, line: usize) -> Option<Site> {
    let Some(Inst::RegionAddress { dst, region }) = kernel.inst(line) else { return None };
    let stages = kernel.stages(*region)?;
    let mut others =
        kernel.mbarriers().filter(|&(other, count)| other != *region && count as usize == stages);
    let (other, _) = others.next()?;
    let waits = kernel.waits_for(*region).into_iter();
    let mut its_wait = waits.filter(|&wait| kernel.wait_address(wait) == Some(line));
    let reason = its_wait.next().and_then(|wait| first_round(kernel, wait));
    Some(Site::replaced(line, Inst::RegionAddress { dst: *dst, region: other }).equivalent(reason))
}
