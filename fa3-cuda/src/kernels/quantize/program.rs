//! Lowers a plan of quantization to its program.

use fa3_ir::{BufferId, BufferRole, Elem, Program};
use fa3_sched::quantize::{Plan, Scales};
use fa3_types::{Positions, ValueLayout};

use super::Spec;
use super::params::{Params, Scale};
use super::scales;
use crate::kernels::params::Fill;
use crate::kernels::{self, tensors};

/// Lowers a plan to its program, without steps that have nothing to compute. Its buffers are `x` and `codes`; `scales`,
/// `mean`, `cos`, `sin`, `positions` and `cu_seqlens`, if the problem has them; and then its workspace.
pub fn program(plan: &Plan) -> Program<kernels::Spec> {
    let (problem, mut program) = (plan.problem(), Program::new());
    let dims = |dims: &[usize]| dims.iter().map(|&dim| dim as u32).collect::<Vec<_>>();
    let x = tensors::input(&mut program, "x", problem.x());
    match problem.layout() {
        ValueLayout::Rows => tensors::output(&mut program, "codes", problem.codes()),
        ValueLayout::Transposed => {
            let shape = tensors::transposed_dims(problem.codes().shape);
            program.buffer("codes", Elem::E4m3, &shape, BufferRole::Output)
        }
    };
    let mut output =
        |name, shape: [usize; 3]| program.buffer(name, Elem::F32, &dims(&shape), BufferRole::Output);
    let scales = problem.scales_shape().map(|shape| output("scales", shape));
    let mean = problem.mean_shape().map(|shape| output("mean", shape));
    if let Some(rotary) = problem.rotary() {
        let table = dims(&[rotary.table_rows, rotary.rotary_dim / 2]);
        program.buffer("cos", Elem::F32, &table, BufferRole::Input);
        program.buffer("sin", Elem::F32, &table, BufferRole::Input);
        if rotary.positions == Positions::Listed {
            let shape = problem.x().shape;
            program.buffer("positions", Elem::U32, &dims(&[shape.batch, shape.seqlen]), BufferRole::Input);
        }
    }
    if let Some(packed) = plan.packed() {
        let ends = program.buffer("cu_seqlens", Elem::U32, &[packed.sequences + 1], BufferRole::Input);
        program.align(ends, 4);
    }
    // A problem has the buffers of scales and means that its scaling needs, and the others are never read.
    let [scales, mean] = [scales, mean].map(|buffer| buffer.unwrap_or(BufferId(usize::MAX)));
    let scale = match plan.scales() {
        Scales::Blocks => Scale::Blocks(scales),
        Scales::Given(scale) => Scale::Given { inverse: 1.0 / scale },
        Scales::Maxima(maxima) => scales::heads(&mut program, plan, &maxima, scales),
        Scales::Channels(channels) => scales::channels(&mut program, plan, &channels, [x, scales, mean]),
    };
    if plan.grid() > 0 {
        let params = Params::of(plan, &program, scale);
        program.step(Spec::of(plan).into(), [plan.grid(), 1, 1], Fill::args(|by| _ = params.pass(by)));
    }
    program
}
