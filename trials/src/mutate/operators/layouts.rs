//! Layout of operands in shared memory, as stated by a descriptor or made by a copy.

use fa3_ir::{
    Inst, LaneInst, LaneOp, Major, Mma, Operand, Param, ParamKind, Swizzle, TmaInst, Value, WarpInst, WgmmaA,
    WgmmaInst,
};
use fa3_sim::Rule::*;

use super::{constant, sites};
use crate::mutate::edit::Edit;
use crate::mutate::kinds::mma;
use crate::mutate::{Anatomy, Operator, Site};

pub(super) const OPERATORS: &[Operator] = &[
    Operator::new("descriptor: LBO and SBO swapped", &[], |kernel| {
        descriptors(kernel, |low, high| (low & 0xFFFF | high << 16, high & !0xFFFF | low >> 16))
    })
    .or_result(),
    Operator::new("descriptor: next swizzle", &[W8], |kernel| {
        descriptors(kernel, |low, high| (low, high.wrapping_add(1 << 30)))
    })
    .or_result(),
    Operator::new("tensor map: no swizzle", &[], |kernel| {
        let params = kernel.kernel.params.iter().zip(0..);
        let swizzled = params.filter_map(|(param, index)| {
            let ParamKind::TensorMap(shape) = param.kind else { return None };
            (shape.swizzle != Swizzle::None).then_some(Param(index))
        });
        let site = |param| Some(Site::new(user(kernel, param)?, vec![Edit::Swizzle(param, Swizzle::None)]));
        swizzled.filter_map(site).collect()
    })
    .or_verifier(&["V-24", "V-21"])
    .or_result(),
    Operator::new("ldmatrix or stmatrix: transposes, or no longer", &[], |kernel| {
        sites(0..kernel.len(), |line| other_way(kernel, line))
    })
    .or_result(),
    Operator::new("prmt: the next bytes", &[], |kernel| {
        sites(0..kernel.len(), |line| next_bytes(kernel, line))
    })
    .or_result(),
    Operator::new("product: B of the other major", &[], |kernel| {
        majors(kernel, |mma| Mma { b_major: other(mma.b_major), ..mma })
    })
    .or_verifier(&["V-9"])
    .or_result(),
    Operator::new("product: A of the other major", &[], |kernel| {
        majors(kernel, |mma| {
            let a = match mma.a {
                WgmmaA::Shared { desc, major } => WgmmaA::Shared { desc, major: other(major) },
                registers @ WgmmaA::Registers(_) => registers,
            };
            Mma { a, ..mma }
        })
    })
    .or_verifier(&["V-9"])
    .or_result(),
];

fn other(major: Major) -> Major {
    match major {
        Major::K => Major::Mn,
        Major::Mn => Major::K,
    }
}

fn majors(kernel: &Anatomy<'_>, change: fn(Mma) -> Mma) -> Vec<Site> {
    sites(kernel.find(|inst| mma(inst).is_some()), |line| {
        let product = mma(kernel.inst(line)?)?;
        let changed = change(product.clone());
        // An operand in registers has no major order to change.
        (changed != *product).then(|| Site::replaced(line, Inst::Wgmma(WgmmaInst::Mma(changed))))
    })
}

/// Toggles the transposition of a matrix copy between registers and shared memory.
fn other_way(kernel: &Anatomy<'_>, line: usize) -> Option<Site> {
    let mut inst = kernel.inst(line)?.clone();
    let Inst::Warp(WarpInst::Ldmatrix { trans, .. } | WarpInst::Stmatrix { trans, .. }) = &mut inst else {
        return None;
    };
    *trans = !*trans;
    Some(Site::replaced(line, inst))
}

/// Shifts the selection of bytes from two words (prmt) by four bytes.
fn next_bytes(kernel: &Anatomy<'_>, line: usize) -> Option<Site> {
    let Some(Inst::Lane(lane @ LaneInst { op: LaneOp::PrmtB32, src, .. })) = kernel.inst(line) else {
        return None;
    };
    let &[upper, lower, bytes] = src.as_slice() else { return None };
    let next = constant((bytes.constant()? + 0x1111) & 0x7777);
    Some(Site::replaced(line, Inst::Lane(LaneInst { src: vec![upper, lower, next], ..lane.clone() })))
}

/// The first copy that uses a tensor map.
fn user(kernel: &Anatomy<'_>, param: Param) -> Option<usize> {
    let uses = |inst: &Inst| {
        matches!(inst, Inst::Tma(TmaInst::Load { map, .. } | TmaInst::Store { map, .. } | TmaInst::ReduceAdd { map, .. })
            if map.0 == param)
    };
    kernel.find(uses).first().copied()
}

/// Changes the constants of the descriptors that products share. Each step's descriptor has a constant upper half. Its
/// lower half is the first step's lower half, or the sum of this half and an offset.
fn descriptors(kernel: &Anatomy<'_>, change: fn(u32, u32) -> (u32, u32)) -> Vec<Site> {
    let pairs = kernel.find(|inst| matches!(lane(inst), Some((LaneOp::PackB64, _, [_, Operand::Imm(_)]))));
    let firsts = kernel.find(|inst| matches!(lane(inst), Some((LaneOp::OrB32, _, [_, Operand::Imm(_)]))));
    let site = |line: usize| {
        let Some((_, first, &[address, low])) = lane(kernel.inst(line)?) else { return None };
        let mut edits = Vec::new();
        for &pair in &pairs {
            let Some((_, dst, &[lower, high])) = lane(kernel.inst(pair)?) else { return None };
            if lower_half(kernel, lower) == Some(first) {
                let (low, high) = change(low.constant()?, high.constant()?);
                if edits.is_empty() {
                    edits.push(replaced(line, LaneOp::OrB32, first, vec![address, constant(low)]));
                }
                edits.push(replaced(pair, LaneOp::PackB64, dst, vec![lower, constant(high)]));
            }
        }
        (!edits.is_empty()).then(|| Site::new(line, edits))
    };
    sites(firsts, site)
}

/// The first step's lower half, to which `half` adds an offset, or `half` itself.
fn lower_half(kernel: &Anatomy<'_>, half: Operand) -> Option<Value> {
    let Operand::Value(half) = half else { return None };
    let inst = kernel.inst(kernel.definition(half)?)?;
    if let Some((LaneOp::AddU32, _, &[Operand::Value(first), Operand::Imm(_)])) = lane(inst) {
        return Some(first);
    }
    Some(half)
}

fn lane(inst: &Inst) -> Option<(LaneOp, Value, &[Operand])> {
    let Inst::Lane(LaneInst { op, dst, src }) = inst else { return None };
    Some((*op, *dst.first()?, src))
}

fn replaced(line: usize, op: LaneOp, dst: Value, src: Vec<Operand>) -> Edit {
    Edit::Inst(line, Inst::Lane(LaneInst { op, dst: vec![dst], src }))
}
