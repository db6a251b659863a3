//! The step that writes the table of packed sequences.

use fa3_ir::{BufferId, BufferRole, Elem, Program};
use fa3_sched::packed::Plan;

use super::params::{Params, TilesOf};
use super::spec::Spec;
use crate::kernels;
use crate::kernels::params::Fill;
use crate::kernels::parts::side_rows::{ARRAYS_OF_K, ARRAYS_OF_Q};

/// The program that writes a plan's table, and with `with_firsts` the positions of first rows. Its buffers are
/// `cu_seqlens_q`, `cu_seqlens_k`, `seqused_q`, `seqused_k` and `leftpad_k`, if the plan has them; `table`, of which
/// only the valid part is written; and `first_places`.
pub fn program(plan: &Plan, with_firsts: bool) -> Program<kernels::Spec> {
    let mut program = Program::new();
    arrays(&mut program, plan);
    let table = program.buffer("table", Elem::U32, &[plan.words()], BufferRole::InOut);
    let firsts = with_firsts
        .then(|| program.buffer("first_places", Elem::U32, &[plan.count() + 1], BufferRole::Output));
    step(&mut program, plan, TilesOf::Rows, (table, firsts));
    program
}

/// Adds the arrays of lengths, of a plan for tiles of rows.
pub(crate) fn arrays(program: &mut Program<kernels::Spec>, plan: &Plan) {
    let (count, [q, k]) = (plan.count(), [plan.q().arrays, plan.k().arrays]);
    let arrays = [
        (ARRAYS_OF_Q[0], q.cu_seqlens, count + 1),
        (ARRAYS_OF_K[0], k.cu_seqlens, count + 1),
        (ARRAYS_OF_Q[1], q.seqused, count),
        (ARRAYS_OF_K[1], k.seqused, count),
        (ARRAYS_OF_K[2], k.leftpad, count),
    ];
    for (name, _, entries) in arrays.into_iter().filter(|&(_, is_there, _)| is_there) {
        let array = program.buffer(name, Elem::U32, &[entries], BufferRole::Input);
        program.align(array, 4);
    }
}

/// Adds the step that writes the table, and, if `firsts` is an array, the positions of first rows.
pub(crate) fn step(
    program: &mut Program<kernels::Spec>,
    plan: &Plan,
    of: TilesOf,
    (table, firsts): (BufferId, Option<BufferId>),
) {
    let spec = Spec::of(plan);
    let spec = if firsts.is_some() { spec.with_firsts() } else { spec };
    let params = Params::of(plan, program, of, (table, firsts));
    program.step(spec.into(), [1, 1, 1], Fill::args(|by| _ = params.pass(by)));
}
