//! Lowers a plan of a reduction to its program.

use fa3_ir::{Buffer, BufferId, BufferRole, Program};
use fa3_sched::combine::Plan;
use fa3_types::Partials;

use super::params::Params;
use super::spec::Spec;
use crate::kernels::params::Fill;
use crate::kernels::{self, tensors};

/// Lowers a plan to its program, which has no step if there are no rows. Its buffers are `out_partial`, `lse_partial`,
/// `o` and `lse`.
pub fn program(plan: &Plan) -> Program<kernels::Spec> {
    let (problem, mut program) = (plan.problem(), Program::new());
    partials(&mut program, "out_partial", problem.out_partial());
    let lse_partial = partials(&mut program, "lse_partial", problem.lse_partial());
    tensors::output(&mut program, "o", problem.o());
    let lse = tensors::output(&mut program, "lse", problem.lse());
    // A row of LSE has one element, so LSE needs only the alignment of one.
    [lse_partial, lse].into_iter().for_each(|buffer| program.align(buffer, 4));
    if plan.grid() > 0 {
        let params = Params::of(plan, &program);
        program.step(Spec::of(plan).into(), [plan.grid(), 1, 1], Fill::args(|by| _ = params.pass(by)));
    }
    program
}

/// Adds a buffer that extends from the first element of the parts to the last one, gaps included.
fn partials<K>(program: &mut Program<K>, name: &'static str, tensor: &Partials) -> BufferId {
    let (elem, shape) = (tensors::elem(tensor.first.dtype), vec![tensor.extent().0]);
    program.add(Buffer { name, elem, shape, role: BufferRole::Input, align: Buffer::ALIGN, tensor: None })
}
