//! What orders wgmma: fences, commits, waits; and whether a product adds.

use fa3_ir::{Imm, Inst, Mma, Operand, ScaleD, WgmmaA, WgmmaInst};
use fa3_sim::Rule;

use super::phases::last_round;
use super::{NOTHING, deleted, earlier, later};
use crate::mutate::anatomy::touches;
use crate::mutate::kinds::{is_mma, is_plain_arrival, is_product_wait, mma};
use crate::mutate::{Anatomy, Operator, Site};

/// Who finds that a product is still under way.
const IN_FLIGHT: &[Rule] = &[Rule::W2, Rule::W6];

pub(super) const OPERATORS: &[Operator] = &[
    Operator {
        name: "wgmma.fence: deleted",
        rules: &[Rule::W1],
        sites: |kernel| {
            let site = |line| Site::deleted(line).equivalent(redundant_fence(kernel, line));
            kernel.find(is_fence).into_iter().map(site).collect()
        },
        ..NOTHING
    },
    Operator {
        name: "wgmma.fence: after the first product",
        rules: &[Rule::W1],
        sites: |kernel| {
            let moved = later(kernel, kernel.find(is_fence), |line| kernel.after(line, is_mma)).into_iter();
            moved.map(|site| Site { equivalent: redundant_fence(kernel, site.line), ..site }).collect()
        },
        ..NOTHING
    },
    Operator {
        name: "wgmma.commit_group: deleted",
        rules: &[Rule::W3, Rule::W6],
        sites: |kernel| deleted(kernel.find(is_commit)),
        ..NOTHING
    },
    Operator {
        name: "wgmma.commit_group: before the last product",
        rules: &[Rule::W2, Rule::W3, Rule::W6],
        sites: |kernel| earlier(kernel, kernel.find(is_commit), |line| kernel.before(line, is_mma)),
        ..NOTHING
    },
    Operator {
        name: "wgmma.commit_group: after the wait",
        rules: &[Rule::W2, Rule::W3, Rule::W6],
        sites: |kernel| later(kernel, kernel.find(is_commit), |line| kernel.after(line, is_product_wait)),
        ..NOTHING
    },
    Operator {
        name: "wgmma.wait_group: deleted",
        rules: IN_FLIGHT,
        sites: |kernel| deleted(kernel.find(is_product_wait)),
        ..NOTHING
    },
    Operator {
        name: "wgmma.wait_group: after what it protects",
        rules: IN_FLIGHT,
        sites: |kernel| {
            let protects = |line| kernel.after(line, relies_on_wait);
            let moved = later(kernel, kernel.find(is_product_wait), protects).into_iter();
            let reason = |line| protects(line).and_then(|line| last_round(kernel, line));
            moved.map(|site| Site { equivalent: reason(site.line), ..site }).collect()
        },
        ..NOTHING
    },
    Operator {
        name: "wgmma.wait_group: + 1",
        rules: IN_FLIGHT,
        sites: |kernel| counted(kernel, |pending| Some(pending + 1), None),
        ..NOTHING
    },
    Operator {
        name: "wgmma.wait_group: - 1",
        sites: |kernel| {
            let reason = "it waits for more than it must, and products complete by themselves";
            counted(kernel, |pending| pending.checked_sub(1), Some(reason))
        },
        ..NOTHING
    },
    Operator {
        name: "first product adds",
        verifier: &["V-4"],
        sites: |kernel| scaled(kernel, ScaleD::Overwrite, ScaleD::Accumulate),
        ..NOTHING
    },
    Operator {
        name: "further product overwrites",
        result: true,
        sites: |kernel| scaled(kernel, ScaleD::Accumulate, ScaleD::Overwrite),
        ..NOTHING
    },
    Operator {
        name: "accumulator not zeroed",
        verifier: &["V-4"],
        sites: |kernel| {
            let zero = Operand::Imm(Imm::F32(0));
            deleted(kernel.find(|inst| matches!(inst, Inst::Set { src, .. } if *src == zero)))
        },
        ..NOTHING
    },
];

fn is_fence(inst: &Inst) -> bool {
    *inst == Inst::Wgmma(WgmmaInst::Fence)
}

fn is_commit(inst: &Inst) -> bool {
    *inst == Inst::Wgmma(WgmmaInst::Commit)
}

/// What a wait for products comes before: giving a slot back, or meeting who will load into it.
fn relies_on_wait(inst: &Inst) -> bool {
    is_plain_arrival(inst) || matches!(inst, Inst::Barrier(_))
}

/// A fence is for registers that something else than a product has touched. In a loop that only adds to what a
/// product before it has begun, there are none.
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

fn counted(kernel: &Anatomy<'_>, change: fn(u32) -> Option<u32>, reason: Option<&'static str>) -> Vec<Site> {
    let waits = kernel.find(is_product_wait).into_iter();
    let changed = waits.filter_map(|line| {
        let Some(Inst::Wgmma(WgmmaInst::Wait { pending })) = kernel.inst(line) else { return None };
        let wait = WgmmaInst::Wait { pending: change(*pending)? };
        Some(Site::replaced(line, Inst::Wgmma(wait)).equivalent(reason))
    });
    changed.collect()
}

fn scaled(kernel: &Anatomy<'_>, from: ScaleD, to: ScaleD) -> Vec<Site> {
    let products = kernel.find(|inst| mma(inst).is_some_and(|mma| mma.scale_d == from)).into_iter();
    let changed = products.filter_map(|line| {
        let mma = Mma { scale_d: to, ..mma(kernel.inst(line)?)?.clone() };
        Some(Site::replaced(line, Inst::Wgmma(WgmmaInst::Mma(mma))))
    });
    changed.collect()
}
