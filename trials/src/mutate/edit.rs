//! Edits of a kernel, as data.

use fa3_ir::{
    Block, Condition, Inst, Kernel, LaneInst, LaneOp, Node, Operand, Param, ParamKind, Region, RegionKind,
    RoleBody, Stmt, Swizzle, Ty, ValueInfo,
};

use super::anatomy::Anatomy;

/// An edit of a kernel. Statements have the numbers of [`Anatomy`].
pub(super) enum Edit {
    /// Deletes a statement.
    Delete(usize),
    /// Puts a statement before another.
    Before(usize, Stmt),
    /// Puts a statement after another.
    After(usize, Stmt),
    /// Replaces an instruction.
    Inst(usize, Inst),
    /// Replaces an instruction's guard.
    Guard(usize, Option<Condition>),
    /// Adds a register.
    Register(ValueInfo),
    /// Changes the arrival count of the mbarriers of a region.
    Arrivals(Region, u32),
    /// Gives a tensor map another swizzle.
    Swizzle(Param, Swizzle),
}

impl Edit {
    /// Computes a 32-bit number before statement `line`.
    pub(super) fn compute(
        kernel: &Anatomy<'_>,
        line: usize,
        op: LaneOp,
        src: Vec<Operand>,
    ) -> (Operand, Vec<Edit>) {
        let number = kernel.next_register();
        let inst = Inst::Lane(LaneInst { op, dst: vec![number], src });
        let stmt = Stmt { node: Node::Inst { guard: None, inst }, source: kernel.stmt(line).source };
        let register = ValueInfo { ty: Ty::B32, name: None, mutable: false };
        (Operand::Value(number), vec![Edit::Register(register), Edit::Before(line, stmt)])
    }
}

/// The kernel after all of `edits`.
pub(super) fn edited(kernel: &Kernel, edits: &[Edit]) -> Kernel {
    let mut next = 0;
    let prologue = block(&kernel.prologue, &mut next, edits);
    let role = |role: &RoleBody| RoleBody { block: block(&role.block, &mut next, edits), ..role.clone() };
    let roles = kernel.roles.iter().map(role).collect();
    let mut kernel = Kernel { prologue, roles, ..kernel.clone() };
    for edit in edits {
        match edit {
            Edit::Register(info) => kernel.values.push(info.clone()),
            Edit::Arrivals(Region(region), arrivals) => {
                kernel.smem.regions[*region as usize].kind = RegionKind::Mbarriers { arrivals: *arrivals };
            }
            Edit::Swizzle(Param(param), swizzle) => {
                if let ParamKind::TensorMap(shape) = &mut kernel.params[*param as usize].kind {
                    shape.swizzle = *swizzle;
                }
            }
            Edit::Delete(_) | Edit::Before(..) | Edit::After(..) | Edit::Inst(..) | Edit::Guard(..) => {}
        }
    }
    kernel
}

fn block(stmts: &Block, next: &mut usize, edits: &[Edit]) -> Block {
    let mut changed = Block::new();
    for stmt in stmts {
        let number = *next;
        *next += 1;
        let node = match &stmt.node {
            Node::Inst { .. } | Node::Break { .. } => stmt.node.clone(),
            Node::If { condition, uniform, then, otherwise } => Node::If {
                condition: *condition,
                uniform: *uniform,
                then: block(then, next, edits),
                otherwise: block(otherwise, next, edits),
            },
            Node::Loop { body } => Node::Loop { body: block(body, next, edits) },
        };
        changed.extend(statement(number, Stmt { node, source: stmt.source }, edits));
    }
    changed
}

/// Applies the edits to a statement whose children are already edited.
fn statement(number: usize, mut stmt: Stmt, edits: &[Edit]) -> Block {
    let (mut before, mut after, mut stays) = (Block::new(), Block::new(), true);
    for edit in edits {
        match edit {
            Edit::Delete(line) if *line == number => stays = false,
            Edit::Before(line, extra) if *line == number => before.push(extra.clone()),
            Edit::After(line, extra) if *line == number => after.push(extra.clone()),
            Edit::Inst(line, new) if *line == number => {
                if let Node::Inst { inst, .. } = &mut stmt.node {
                    inst.clone_from(new);
                }
            }
            Edit::Guard(line, new) if *line == number => {
                if let Node::Inst { guard, .. } = &mut stmt.node {
                    *guard = *new;
                }
            }
            Edit::Delete(_)
            | Edit::Before(..)
            | Edit::After(..)
            | Edit::Inst(..)
            | Edit::Guard(..)
            | Edit::Register(_)
            | Edit::Arrivals(..)
            | Edit::Swizzle(..) => {}
        }
    }
    before.extend(stays.then_some(stmt));
    before.extend(after);
    before
}
