//! Every synchronisation of the attention kernel is needed: without it some schedule finds a broken rule.

use fa3_ir::lang::*;
use fa3_ir::*;
use fa3_sim::{Mode, Outcome, Policy};

use crate::attention::{Head, attention};
use crate::copied::{run_squares, squares};

/// A change that makes one statement wrong.
#[derive(Clone, Copy, Debug)]
enum Mutation {
    Removed,
    OneGroupMore,
    BytesMore,
    BytesLess,
    OtherParity,
}

/// The statement after a mutation: `Some(None)` if it is removed, `None` if the mutation does not apply to it.
fn mutate(inst: &Inst, mutation: Mutation) -> Option<Option<Inst>> {
    use Mutation::*;
    let constant = |operand: &Operand, by: i32| match operand {
        Operand::Imm(Imm::B32(bytes)) => Some(Operand::Imm(Imm::B32(bytes.wrapping_add_signed(by)))),
        Operand::Imm(_) | Operand::Value(_) => None,
    };
    match (inst, mutation) {
        (
            Inst::Barrier(_)
            | Inst::Fence(_)
            | Inst::Wgmma(WgmmaInst::Fence | WgmmaInst::Commit | WgmmaInst::Wait { .. })
            | Inst::Mbarrier(_),
            Removed,
        ) => Some(None),
        (Inst::Wgmma(WgmmaInst::Wait { pending }), OneGroupMore) => {
            Some(Some(Inst::Wgmma(WgmmaInst::Wait { pending: pending + 1 })))
        }
        (Inst::Mbarrier(MbarrierInst::ArriveExpect { addr, bytes }), BytesMore | BytesLess) => {
            let bytes = constant(bytes, if matches!(mutation, BytesMore) { 16 } else { -16 })?;
            Some(Some(Inst::Mbarrier(MbarrierInst::ArriveExpect { addr: *addr, bytes })))
        }
        (Inst::Mbarrier(MbarrierInst::Wait { addr, parity }), OtherParity) => {
            let parity = match parity {
                Operand::Imm(Imm::B32(parity)) => Operand::Imm(Imm::B32(parity ^ 1)),
                Operand::Imm(_) | Operand::Value(_) => return None,
            };
            Some(Some(Inst::Mbarrier(MbarrierInst::Wait { addr: *addr, parity })))
        }
        _ => None,
    }
}

/// Mutates the `target`-th statement that can be; whether there was one.
fn apply(block: &mut Block, target: &mut usize, mutation: Mutation) -> Option<Source> {
    let mut index = 0;
    while index < block.len() {
        let source = block[index].source;
        match &mut block[index].node {
            Node::Inst { inst, .. } => {
                if let Some(mutant) = mutate(inst, mutation) {
                    if *target == 0 {
                        match mutant {
                            Some(mutant) => *inst = mutant,
                            None => drop(block.remove(index)),
                        }
                        return Some(source);
                    }
                    *target -= 1;
                }
            }
            Node::If { then, otherwise, .. } => {
                if let Some(source) =
                    apply(then, target, mutation).or_else(|| apply(otherwise, target, mutation))
                {
                    return Some(source);
                }
            }
            Node::Loop { body } => {
                if let Some(source) = apply(body, target, mutation) {
                    return Some(source);
                }
            }
            Node::Break { .. } => {}
        }
        index += 1;
    }
    None
}

fn mutant(kernel: &Kernel, mutation: Mutation, target: usize) -> Option<(Kernel, Source)> {
    let mut kernel = kernel.clone();
    let mut target = target;
    let mut source = apply(&mut kernel.prologue, &mut target, mutation);
    for role in &mut kernel.roles {
        source = source.or_else(|| apply(&mut role.block, &mut target, mutation));
    }
    source.map(|source| (kernel, source))
}

/// Fails unless a schedule finds fault with every mutant of `kernel`.
fn hunt(kernel: &Kernel, run: impl Fn(&Kernel, Policy) -> Outcome) {
    use Mutation::*;
    let mut survivors = Vec::new();
    let mut count = 0;
    for mutation in [Removed, OneGroupMore, BytesMore, BytesLess, OtherParity] {
        for target in 0.. {
            let Some((kernel, source)) = mutant(kernel, mutation, target) else { break };
            count += 1;
            let found = [Policy::Eager, Policy::Lazy, Policy::Random(1)].into_iter().find_map(|policy| {
                let findings = run(&kernel, policy).findings;
                findings.first().map(|finding| finding.rule)
            });
            match found {
                Some(rule) => println!("{mutation:?} of line {}: {rule}", source.line()),
                None => survivors.push(format!("{mutation:?} of line {}", source.line())),
            }
        }
    }
    assert!(survivors.is_empty(), "{} of {count} survive: {survivors:#?}", survivors.len());
}

#[test]
fn every_mutant_is_found() {
    hunt(&attention(), |kernel, policy| Head::new(512).run(kernel, policy, Mode::Skeleton));
}

/// So do mutants of a ring that a warp fills by copies of 16 bytes and another one fences.
#[test]
fn every_mutant_of_a_copied_ring_is_found() {
    hunt(&squares(), |kernel, policy| run_squares(kernel, policy).0);
}
