//! One round of a loop.

use super::{Class, Instruction};

/// One round of a loop, in the order in which it runs, with what runs under a condition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Round<'l> {
    /// Its instructions.
    pub instructions: Vec<&'l Instruction>,
}

impl Round<'_> {
    /// How many instructions are of a kind.
    pub fn count(&self, class: Class) -> usize {
        self.instructions.iter().filter(|instruction| instruction.class() == class).count()
    }
}
