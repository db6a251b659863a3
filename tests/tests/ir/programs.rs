//! Random straight-line programs.

use fa3_ir::lang::*;
use fa3_ir::*;
use proptest::prelude::*;

use crate::rules::faults_in;

/// A kernel of integer additions. Each adds two earlier values, with indices modulo the number of values.
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
    /// A kernel that is built from typed handles is sound. If a statement is removed, the verifier reports exactly the
    /// reads of the statement's result.
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

    /// Two builds print the same text, with one line for each statement.
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
