//! Kernels without observations, for the driver.

use crate::inst::Access;
use crate::{Block, Inst, Kernel, Node, RoleBody, Stmt, Value};

/// The code of a kernel without its observations, and without values that are computed for them alone.
pub(crate) struct Unobserved<'k> {
    pub(crate) prologue: Vec<Kept<'k>>,
    pub(crate) roles: Vec<(&'k RoleBody, Vec<Kept<'k>>)>,
    /// For each value, whether it was removed.
    pub(crate) gone: Vec<bool>,
}

/// A statement that is kept.
pub(crate) struct Kept<'k> {
    pub(crate) stmt: &'k Stmt,
    /// The statements that are kept in its blocks: both blocks of a branch, or the body of a loop and nothing.
    pub(crate) blocks: [Vec<Kept<'k>>; 2],
}

impl<'k> Unobserved<'k> {
    pub(crate) fn new(kernel: &'k Kernel) -> Unobserved<'k> {
        let nothing = || vec![false; kernel.values.len()];
        let mut readers = Readers { observed: nothing(), needed: nothing(), gone: nothing() };
        // Visits statements from the end to the beginning, because readers of a value come after its definition.
        let roles = kernel.roles.iter().map(|role| (role, readers.block(&role.block))).collect();
        let prologue = readers.block(&kernel.prologue);
        Unobserved { prologue, roles, gone: readers.gone }
    }
}

/// Facts about each value, from the statements visited so far.
struct Readers {
    /// Whether the value is read by an observation, or by a statement that was removed with an observation.
    observed: Vec<bool>,
    /// Whether a statement that stays reads the value.
    needed: Vec<bool>,
    gone: Vec<bool>,
}

impl Readers {
    fn block<'k>(&mut self, block: &'k Block) -> Vec<Kept<'k>> {
        let mut kept: Vec<Kept<'_>> = block.iter().rev().filter_map(|stmt| self.stmt(stmt)).collect();
        kept.reverse();
        kept
    }

    /// The statement, if it is kept.
    fn stmt<'k>(&mut self, stmt: &'k Stmt) -> Option<Kept<'k>> {
        let (blocks, stays) = match &stmt.node {
            Node::Inst { guard, inst } => {
                let stays = !self.is_observation(inst);
                guard.iter().for_each(|guard| self.read(guard.pred, stays));
                inst.visit(&mut |access| {
                    if let Access::Write(value, _) = access {
                        self.gone[value.0 as usize] |= !stays;
                    } else if let Some(value) = access.value() {
                        self.read(value, stays);
                    }
                });
                (Default::default(), stays)
            }
            Node::If { condition, uniform: _, then, otherwise } => {
                let was_empty = then.is_empty() && otherwise.is_empty();
                let (then, otherwise) = (self.block(then), self.block(otherwise));
                let stays = was_empty || !then.is_empty() || !otherwise.is_empty();
                self.read(condition.pred, stays);
                ([then, otherwise], stays)
            }
            Node::Loop { body } => ([self.block(body), Vec::new()], true),
            Node::Break { condition } => {
                self.read(condition.pred, true);
                (Default::default(), true)
            }
        };
        stays.then_some(Kept { stmt, blocks })
    }

    /// Whether an instruction is an observation, or has no effect except on values that only observations read.
    fn is_observation(&self, inst: &Inst) -> bool {
        if let Inst::Observe(_) = inst {
            return true;
        }
        let (mut observed, mut needed) = (false, !inst.only_computes());
        inst.visit(&mut |access| {
            if let Access::Write(Value(value), _) = access {
                observed |= self.observed[value as usize];
                needed |= self.needed[value as usize];
            }
        });
        observed && !needed
    }

    fn read(&mut self, Value(value): Value, stays: bool) {
        let readers = if stays { &mut self.needed } else { &mut self.observed };
        readers[value as usize] = true;
    }
}
