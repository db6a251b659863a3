//! The step that writes the table of packed sequences.

use fa3_ir::{BufferId, BufferRole, Elem, Program};
use fa3_sched::packed::Plan;

use super::Spec;
use super::params::Params;
use crate::kernels;
use crate::kernels::params::Fill;

/// The program that writes a plan's table and nothing else. Its buffers are those of `cu_seqlens_q`, `cu_seqlens_k`,
/// `seqused_q` and `seqused_k` that the plan has, and `table`, of which it writes the part that is in use.
pub fn program(plan: &Plan) -> Program<kernels::Spec> {
    let mut program = Program::new();
    let table = table(&mut program, plan, BufferRole::InOut);
    step(&mut program, plan, table);
    program
}

/// Adds the arrays of lengths, and the table, which it gives.
pub(crate) fn table(program: &mut Program<kernels::Spec>, plan: &Plan, role: BufferRole) -> BufferId {
    let (count, [q, k]) = (plan.count(), [plan.q().arrays, plan.k().arrays]);
    let arrays = [
        ("cu_seqlens_q", q.cu_seqlens, count + 1),
        ("cu_seqlens_k", k.cu_seqlens, count + 1),
        ("seqused_q", q.seqused, count),
        ("seqused_k", k.seqused, count),
    ];
    for (name, _, entries) in arrays.into_iter().filter(|&(_, is_there, _)| is_there) {
        let array = program.buffer(name, Elem::U32, &[entries], BufferRole::Input);
        program.align(array, 4);
    }
    program.buffer("table", Elem::U32, &[plan.words()], role)
}

/// Adds the step that writes the table.
pub(crate) fn step(program: &mut Program<kernels::Spec>, plan: &Plan, table: BufferId) {
    let params = Params::of(plan, program, table);
    program.step(Spec::of(plan).into(), [1, 1, 1], Fill::args(|by| _ = params.pass(by)));
}
