//! Edits of a kernel, as data.

use fa3_ir::{
    Block, Condition, Inst, Kernel, LaneInst, LaneOp, Node, Operand, Param, ParamKind, Region, RegionKind,
    Stmt, Swizzle, Ty, ValueInfo,
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

/// Applies all of `edits` to the kernel.
pub(super) fn edited(kernel: &Kernel, edits: &[Edit]) -> Kernel {
    let (mut kernel, mut next) = (kernel.clone(), 0);
    edit_block(&mut kernel.prologue, &mut next, edits);
    kernel.roles.iter_mut().for_each(|role| edit_block(&mut role.block, &mut next, edits));
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

fn edit_block(stmts: &mut Block, next: &mut usize, edits: &[Edit]) {
    let mut at = 0;
    while at < stmts.len() {
        let number = *next;
        *next += 1;
        match &mut stmts[at].node {
            Node::Inst { .. } | Node::Break { .. } => {}
            Node::If { then, otherwise, .. } => {
                edit_block(then, next, edits);
                edit_block(otherwise, next, edits);
            }
            Node::Loop { body } => edit_block(body, next, edits),
        }
        at += edit_stmt(stmts, at, number, edits);
    }
}

/// Edits the statement at `at`, whose children are already edited. Returns the number of statements that replace it.
fn edit_stmt(stmts: &mut Block, at: usize, number: usize, edits: &[Edit]) -> usize {
    let (mut before, mut after, mut stays) = (Block::new(), Block::new(), true);
    for edit in edits {
        match (edit, &mut stmts[at].node) {
            (Edit::Delete(line), _) if *line == number => stays = false,
            (Edit::Before(line, extra), _) if *line == number => before.push(extra.clone()),
            (Edit::After(line, extra), _) if *line == number => after.push(extra.clone()),
            (Edit::Inst(line, new), Node::Inst { inst, .. }) if *line == number => inst.clone_from(new),
            (Edit::Guard(line, new), Node::Inst { guard, .. }) if *line == number => *guard = *new,
            _ => {}
        }
    }
    let count = before.len() + usize::from(stays) + after.len();
    if !stays || count > 1 {
        let stmt = stays.then(|| stmts[at].clone());
        stmts.splice(at..=at, before.into_iter().chain(stmt).chain(after));
    }
    count
}
