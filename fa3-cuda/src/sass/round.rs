//! One iteration of a loop.

use super::{Class, Instruction};

/// One iteration of a loop, in the order in which it runs, including conditional code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Round<'l> {
    /// The instructions.
    pub instructions: Vec<&'l Instruction>,
}

impl Round<'_> {
    /// Number of instructions of a kind.
    pub fn count(&self, class: Class) -> usize {
        self.instructions.iter().filter(|instruction| instruction.class() == class).count()
    }
}
