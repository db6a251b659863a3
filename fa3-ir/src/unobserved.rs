//! Kernels without observations, for the driver.

use crate::inst::Access;
use crate::{Block, Inst, Kernel, Node, RoleBody, Stmt, Value};

/// A kernel without its observations, and without values that are computed for them alone.
pub(crate) struct Unobserved {
    pub(crate) kernel: Kernel,
    /// For each value, whether it was removed.
    pub(crate) gone: Vec<bool>,
}

impl Unobserved {
    pub(crate) fn new(kernel: &Kernel) -> Unobserved {
        let nothing = || vec![false; kernel.values.len()];
        let mut readers = Readers { observed: nothing(), needed: nothing(), gone: nothing() };
        // Visits statements from the end to the beginning, because readers of a value come after its definition.
        let role = |role: &RoleBody| RoleBody { block: readers.block(&role.block), ..role.clone() };
        let roles = kernel.roles.iter().map(role).collect();
        let prologue = readers.block(&kernel.prologue);
        Unobserved { kernel: Kernel { prologue, roles, ..kernel.clone() }, gone: readers.gone }
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
    fn block(&mut self, block: &Block) -> Block {
        let mut kept: Block = block.iter().rev().filter_map(|stmt| self.stmt(stmt)).collect();
        kept.reverse();
        kept
    }

    /// The statement, if it is kept.
    fn stmt(&mut self, stmt: &Stmt) -> Option<Stmt> {
        let (node, stays) = match &stmt.node {
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
                (stmt.node.clone(), stays)
            }
            Node::If { condition, uniform, then, otherwise } => {
                let was_empty = then.is_empty() && otherwise.is_empty();
                let (then, otherwise) = (self.block(then), self.block(otherwise));
                let stays = was_empty || !then.is_empty() || !otherwise.is_empty();
                self.read(condition.pred, stays);
                (Node::If { condition: *condition, uniform: *uniform, then, otherwise }, stays)
            }
            Node::Loop { body } => (Node::Loop { body: self.block(body) }, true),
            Node::Break { condition } => {
                self.read(condition.pred, true);
                (stmt.node.clone(), true)
            }
        };
        stays.then_some(Stmt { node, source: stmt.source })
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
