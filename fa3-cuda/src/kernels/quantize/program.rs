//! What a plan of quantization lowers to.

use fa3_ir::{BufferRole, Elem, Program};
use fa3_sched::quantize::Plan;
use fa3_types::{Positions, Shape, ValueLayout};

use super::Spec;
use super::channels::{self, ChannelBuffers};
use super::params::Params;
use crate::kernels::params::Fill;
use crate::kernels::{self, tensors};

/// The program of a plan, without steps if there are no rows. Its buffers are those of [`fa3_types::QuantizeAddresses`]
/// that the problem has, in that order.
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
    let channels = plan.channels().zip(scales).zip(mean).map(|((channels, scales), mean)| {
        let Shape { batch, heads, head_dim, .. } = problem.x().shape;
        let mut scratch =
            |name, shape: &[usize]| program.buffer(name, Elem::F32, &dims(shape), BufferRole::Scratch);
        let inverse = scratch("inverse", &[batch, heads, head_dim]);
        let spans = scratch("spans", &[batch, heads, 3 * channels.parts() as usize, head_dim]);
        let buffers = ChannelBuffers { spans, scales, mean, inverse };
        channels::steps(&mut program, plan, &channels, x, buffers);
        buffers
    });
    if plan.grid() > 0 {
        let mut args = Fill::default();
        Params::of(plan, &program, channels).pass(&mut args);
        program.step(kernels::Spec::Quantize(Spec::of(plan)), [plan.grid(), 1, 1], args.0);
    }
    program
}
