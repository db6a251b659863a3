//! Every row of the table of lane operations as PTX, assembled by ptxas.

use fa3_ir::lang::B32;
use fa3_ir::{
    Elem, Imm, Inst, Kernel, LaneInst, LaneOp, Launch, Node, Operand, Stmt, Ty, Value, ValueInfo, ptx,
};

use crate::ptxas::{assemble, body};
use crate::snapshot;

/// A kernel that runs every row on registers, and on constants where PTX permits them.
fn every_row() -> Kernel {
    let mut kernel = Kernel::build("lane", Launch::threads(32), |b| _ = b.tid());
    let mut define = |ty| {
        kernel.values.push(ValueInfo { ty, name: None, mutable: false });
        Value(kernel.values.len() as u32 - 1)
    };
    let mut insts = Vec::new();
    let move_of = |ty| match ty {
        Ty::Pred => (LaneOp::MovPred, Imm::Pred(true)),
        Ty::B16 => (LaneOp::MovB16, Imm::B16(7)),
        Ty::B32 => (LaneOp::MovB32, Imm::B32(7)),
        Ty::B64 => (LaneOp::MovB64, Imm::B64(7)),
        Ty::F32 => (LaneOp::MovF32, Imm::F32(7.0f32.to_bits())),
    };
    for &op in LaneOp::ALL {
        let src = op.inputs().iter().map(|&ty| {
            let (mov, imm) = move_of(ty);
            let dst = define(ty);
            insts.push(LaneInst { op: mov, dst: vec![dst], src: vec![Operand::Imm(imm)] });
            Operand::Value(dst)
        });
        let src = src.collect();
        let dst = op.outputs().iter().map(|&ty| define(ty)).collect();
        insts.push(LaneInst { op, dst, src });
        if !op.takes_constants() {
            continue;
        }
        let src = op.inputs().iter().map(|&ty| Operand::Imm(move_of(ty).1)).collect();
        let dst = op.outputs().iter().map(|&ty| define(ty)).collect();
        insts.push(LaneInst { op, dst, src });
    }
    let source = kernel.prologue[0].source;
    kernel.prologue.extend(
        insts
            .into_iter()
            .map(|inst| Stmt { node: Node::Inst { guard: None, inst: Inst::Lane(inst) }, source }),
    );
    kernel
}

#[test]
fn every_row_assembles() {
    assemble(&every_row());
}

/// Compares the lines of each row whose operands are registers. Moves of the operands precede each row.
#[test]
fn every_row_prints() {
    let text = ptx::emit(&every_row()).unwrap().text;
    let ends_in_constant = |line: &&str| line.split(' ').next_back().is_some_and(|last| !last.contains('%'));
    let rows: Vec<&str> = text
        .lines()
        .skip_while(|line| !line.contains("%tid"))
        .filter(|line| line.contains('%') && !ends_in_constant(line))
        .map(str::trim)
        .collect();
    snapshot("lane.ptx", &(rows.join("\n") + "\n"));
    assert_eq!(rows.len(), LaneOp::ALL.len() + 1);
}

/// A guard keeps the value of its condition, even if its body assigns the variable that the condition came from.
#[test]
fn guards_are_kept() {
    let kernel = Kernel::build("k", Launch::threads(128), |b| {
        let (x, tid) = (b.param_pointer("x", Elem::U32), b.tid());
        let todo = b.var("todo", tid.eq(0));
        b.guarded(todo, || {
            todo.set(false);
            b.store(x, 1);
        });
    });
    let lines = body(&kernel);
    let guards = lines.iter().filter_map(|line| line.strip_prefix('@')?.split(' ').next());
    let guards: Vec<&str> = guards.collect();
    let [one, other] = guards[..] else { panic!("{lines:?}") };
    assert_eq!(one, other);
    assert!(lines.iter().any(|line| line.starts_with(&format!("mov.pred {one}, "))), "{lines:?}");
}

/// All lanes compute an address, but only the lane that loads a value computes with this value.
#[test]
fn what_only_computes_is_not_guarded() {
    let kernel = Kernel::build("k", Launch::threads(128), |b| {
        let (x, tid) = (b.param_pointer("x", Elem::U32), b.tid());
        b.once_per_warp(|| {
            let at = tid.mad_wide(4, x);
            b.store(at, b.load::<B32>(at) + 1);
        });
    });
    let lines = body(&kernel);
    let guarded = |mnemonic: &str| {
        let line = lines.iter().find(|line| line.contains(mnemonic));
        line.unwrap_or_else(|| panic!("{mnemonic}: {lines:?}")).starts_with('@')
    };
    assert_eq!(
        ["mad.wide.u32", "ld.global", "add.u32", "st.global"].map(guarded),
        [false, true, true, true],
        "{lines:?}"
    );
}
