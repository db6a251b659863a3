//! Straight-line programs at random.

use fa3_ir::lang::*;
use fa3_ir::*;
use proptest::prelude::*;

use crate::rules::faults_in;

/// Integer additions: each of two earlier values, numbered modulo how many there are.
fn program(operands: &[(usize, usize)]) -> Kernel {
    Kernel::build("program", Launch::threads(32), |b| {
        let mut values = vec![b.tid()];
        for &(x, y) in operands {
            values.push(values[x % values.len()] + values[y % values.len()]);
        }
    })
}

/// The values that a statement reads.
fn reads(stmt: &Stmt) -> Vec<Value> {
    let mut values = Vec::new();
    let Node::Inst { inst, .. } = &stmt.node else { return values };
    inst.visit(&mut |access| {
        if let Access::Read(Operand::Value(value), _) = access {
            values.push(value);
        }
    });
    values
}

proptest! {
    /// A kernel built by handles is sound; without one statement, the verifier reports each read of its result and no
    /// more.
    #[test]
    fn a_missing_definition_is_found(
        operands in proptest::collection::vec((0usize..64, 0usize..64), 1..64),
        missing in 0usize..64,
    ) {
        let mut kernel = program(&operands);
        prop_assert_eq!(verify(&kernel), Ok(()));
        let missing = missing % kernel.prologue.len();
        kernel.prologue.remove(missing);
        let value = Value(missing as u32);
        let expected = kernel.prologue.iter().flat_map(reads).filter(|&read| read == value).count();
        prop_assert_eq!(faults_in(&kernel), vec![Fault::NotVisible { value }; expected]);
    }

    /// Each of two builds prints the same, and a line a statement.
    #[test]
    fn text_is_a_function_of_the_kernel(
        operands in proptest::collection::vec((0usize..64, 0usize..64), 0..64),
    ) {
        let [one, other] = [program(&operands), program(&operands)];
        prop_assert_eq!(one.to_string(), other.to_string());
        let text = ptx::emit(&one).unwrap().text;
        prop_assert_eq!(text.lines().filter(|line| line.contains("add.u32")).count(), operands.len());
        prop_assert_eq!(text, ptx::emit(&other).unwrap().text);
    }
}
