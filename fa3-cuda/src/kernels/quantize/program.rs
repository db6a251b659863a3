//! What a plan of quantization lowers to.

use fa3_ir::{BufferRole, Elem, Program};
use fa3_sched::quantize::Plan;
use fa3_types::{Positions, ValueLayout};

use super::Spec;
use super::params::Params;
use crate::kernels::params::Fill;
use crate::kernels::{self, tensors};

/// The program of a plan, without steps if there are no rows. Its buffers are those of [`fa3_types::QuantizeAddresses`]
/// that the problem has, in that order.
pub fn program(plan: &Plan) -> Program<kernels::Spec> {
    let (problem, mut program) = (plan.problem(), Program::new());
    let dims = |dims: &[usize]| dims.iter().map(|&dim| dim as u32).collect::<Vec<_>>();
    tensors::input(&mut program, "x", problem.x());
    match problem.layout() {
        ValueLayout::Rows => tensors::output(&mut program, "codes", problem.codes()),
        ValueLayout::Transposed => {
            let shape = tensors::transposed_dims(problem.codes().shape);
            program.buffer("codes", Elem::E4m3, &shape, BufferRole::Output)
        }
    };
    if let Some(shape) = problem.scales_shape() {
        program.buffer("scales", Elem::F32, &dims(&shape), BufferRole::Output);
    }
    if let Some(rotary) = problem.rotary() {
        let table = dims(&[rotary.table_rows, rotary.rotary_dim / 2]);
        program.buffer("cos", Elem::F32, &table, BufferRole::Input);
        program.buffer("sin", Elem::F32, &table, BufferRole::Input);
        if rotary.positions == Positions::Listed {
            let shape = problem.x().shape;
            program.buffer("positions", Elem::U32, &dims(&[shape.batch, shape.seqlen]), BufferRole::Input);
        }
    }
    if plan.grid() > 0 {
        let mut args = Fill::default();
        Params::of(plan, &program).pass(&mut args);
        program.step(kernels::Spec::Quantize(Spec::of(plan)), [plan.grid(), 1, 1], args.0);
    }
    program
}
