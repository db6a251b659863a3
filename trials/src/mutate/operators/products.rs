//! Operators on wgmma: fences, commits, waits, and accumulation.

use fa3_ir::{Imm, Inst, Mma, Operand, ScaleD, WgmmaA, WgmmaInst};
use fa3_sim::Rule::{self, *};

use super::phases::last_round;
use super::{deleted, deleted_unless, earlier, later, sites, unless};
use crate::mutate::anatomy::touches;
use crate::mutate::kinds::{is_mma, is_plain_arrival, is_product_wait, mma};
use crate::mutate::{Anatomy, Operator, Site};

/// Rules that notice that a product is still in flight.
const IN_FLIGHT: &[Rule] = &[W2, W6];

pub(super) const OPERATORS: &[Operator] = &[
    Operator::new("wgmma.fence: deleted", &[W1], |kernel| {
        deleted_unless(kernel, kernel.find(is_fence), redundant_fence)
    }),
    Operator::new("wgmma.fence: after the first product", &[W1], |kernel| {
        let moved = later(kernel, kernel.find(is_fence), |line| kernel.after(line, is_mma));
        unless(moved, |line| redundant_fence(kernel, line))
    }),
    Operator::new("wgmma.commit_group: deleted", &[W2, W3, W6], |kernel| {
        unless_early(kernel, deleted(kernel.find(is_commit)))
    }),
    Operator::new("wgmma.commit_group: before the last product", &[W2, W3, W6], |kernel| {
        let moved = earlier(kernel, kernel.find(is_commit), |line| kernel.before(line, is_mma));
        unless_early(kernel, moved)
    }),
    Operator::new("wgmma.commit_group: after the wait", &[W2, W3, W6], |kernel| {
        let moved = later(kernel, kernel.find(is_commit), |line| kernel.after(line, is_product_wait));
        unless_early(kernel, moved)
    }),
    Operator::new("wgmma.wait_group: deleted", IN_FLIGHT, |kernel| {
        unless_early(kernel, deleted(kernel.find(is_product_wait)))
    }),
    Operator::new("wgmma.wait_group: after what it protects", IN_FLIGHT, |kernel| {
        let protects = |line| kernel.after(line, relies_on_wait);
        let moved = later(kernel, kernel.find(is_product_wait), protects);
        unless_early(kernel, unless(moved, |line| last_round(kernel, protects(line)?)))
    }),
    Operator::new("wgmma.wait_group: + 1", IN_FLIGHT, |kernel| {
        unless_early(kernel, counted(kernel, |pending| Some(pending + 1), None))
    }),
    Operator::new("wgmma.wait_group: - 1", &[], |kernel| {
        let reason = "it waits for more than it must, and products complete by themselves";
        counted(kernel, |pending| pending.checked_sub(1), Some(reason))
    }),
    Operator::new("first product adds", &[], |kernel| scaled(kernel, ScaleD::Overwrite, ScaleD::Accumulate))
        .or_verifier(&["V-4"]),
    Operator::new("further product overwrites", &[], |kernel| {
        scaled(kernel, ScaleD::Accumulate, ScaleD::Overwrite)
    })
    .or_result(),
    Operator::new("accumulator not zeroed", &[], |kernel| {
        let zero = Operand::Imm(Imm::F32(0));
        let zeroed = kernel.find(|inst| matches!(inst, Inst::Set { src, .. } if *src == zero));
        deleted_unless(kernel, zeroed, set_again)
    })
    .or_result()
    .or_verifier(&["V-4"]),
];

fn is_fence(inst: &Inst) -> bool {
    *inst == Inst::Wgmma(WgmmaInst::Fence)
}

fn is_commit(inst: &Inst) -> bool {
    *inst == Inst::Wgmma(WgmmaInst::Commit)
}

/// Whether an instruction must follow a wait for products, because it releases a stage, or synchronizes with a thread
/// that then loads into a stage.
fn relies_on_wait(inst: &Inst) -> bool {
    is_plain_arrival(inst) || matches!(inst, Inst::Barrier(_))
}

/// Reason why the fence in a loop is redundant: since the fence before the loop, only products that accumulate have
/// accessed the accumulators.
fn redundant_fence(kernel: &Anatomy<'_>, line: usize) -> Option<&'static str> {
    let product = kernel.after(line, is_mma).and_then(|line| mma(kernel.inst(line)?))?;
    let around = kernel.innermost_loop(line)?;
    let register = product.d[0];
    let all_products = |lines: Vec<usize>| lines.iter().all(|&line| kernel.inst(line).is_some_and(is_mma));
    let inside = kernel.within(around, |inst| touches(inst, register));
    let before = kernel.before(around, |inst| touches(inst, register))?;
    let shared = matches!(product.a, WgmmaA::Shared { .. });
    let only_adds = shared
        && product.scale_d == ScaleD::Accumulate
        && all_products(inside)
        && all_products(kernel.within(before, |inst| touches(inst, register)));
    only_adds.then_some(
        "since the fence before the loop, the accumulators were touched by products of this shape alone",
    )
}

/// Reason why an assignment is redundant: every lane, on every path, assigns the variable again before it is read.
fn set_again(kernel: &Anatomy<'_>, line: usize) -> Option<&'static str> {
    let Some(Inst::Set { var, .. }) = kernel.inst(line) else { return None };
    let next = kernel.after(line, |inst| touches(inst, *var))?;
    let assigns = matches!(kernel.inst(next), Some(Inst::Set { var: other, src, .. })
        if other == var && *src != Operand::Value(*var));
    (assigns && kernel.guard(next).is_none()).then_some("it is assigned again before anything reads it")
}

/// Marks the sites of an [`early`] wait as equivalent.
fn unless_early(kernel: &Anatomy<'_>, sites: Vec<Site>) -> Vec<Site> {
    let with_reason =
        |site: Site| Site { equivalent: site.equivalent.or_else(|| early(kernel, site.line)), ..site };
    sites.into_iter().map(with_reason).collect()
}

/// Algorithm 4 waits for QKᵀ, and then for PV before it reads results of either (A4:14, A4:12). Between the waits it
/// only releases the stages of K and Q. If K has one stage, the loads into these stages follow a load of V, which waits
/// for this PV.
fn early(kernel: &Anatomy<'_>, line: usize) -> Option<&'static str> {
    let pending = |line: usize| match kernel.inst(line) {
        Some(Inst::Wgmma(WgmmaInst::Wait { pending })) => Some(*pending),
        _ => None,
    };
    let wait = if pending(line).is_some() { line } else { kernel.after(line, is_product_wait)? };
    // A product that is not committed here is committed with the next group.
    let next = kernel.after(line, is_commit);
    if kernel.has(line, is_commit) && next.is_none_or(|next| next > wait) {
        return None;
    }
    let whole = kernel.after(wait, is_product_wait)?;
    if pending(wait)? == 0 || pending(whole)? != 0 {
        return None;
    }
    let products = kernel.find(|inst| mma(inst).is_some_and(|mma| mma.scale_d == ScaleD::Overwrite));
    let product = mma(kernel.inst(products.into_iter().rfind(|&product| product < wait)?)?)?;
    let read = |inst: &Inst| product.d.iter().any(|&register| touches(inst, register));
    let keys = [kernel.region_called("k empty")?, kernel.region_called("q empty")?];
    // If K has two pipelines, the loads into its first columns follow no load of V.
    if kernel.stages(keys[0])? != 1 || kernel.region_called("k_second empty").is_some() {
        return None;
    }
    let other = |inst: &Inst| {
        is_plain_arrival(inst) && !kernel.mbarrier(inst).is_some_and(|region| keys.contains(&region))
    };
    let between = (wait + 1..whole).filter_map(|line| kernel.inst(line));
    (!between.into_iter().any(|inst| read(inst) || other(inst))).then_some(
        "before the wait for all products, only stages are given back whose loads come after that wait",
    )
}

fn counted(kernel: &Anatomy<'_>, change: fn(u32) -> Option<u32>, reason: Option<&'static str>) -> Vec<Site> {
    sites(kernel.find(is_product_wait), |line| {
        let Some(Inst::Wgmma(WgmmaInst::Wait { pending })) = kernel.inst(line) else { return None };
        let wait = WgmmaInst::Wait { pending: change(*pending)? };
        Some(Site::replaced(line, Inst::Wgmma(wait)).equivalent(reason))
    })
}

fn scaled(kernel: &Anatomy<'_>, from: ScaleD, to: ScaleD) -> Vec<Site> {
    let products = kernel.find(|inst| mma(inst).is_some_and(|mma| mma.scale_d == from));
    sites(products, |line| {
        let mma = Mma { scale_d: to, ..mma(kernel.inst(line)?)?.clone() };
        Some(Site::replaced(line, Inst::Wgmma(WgmmaInst::Mma(mma))))
    })
}
