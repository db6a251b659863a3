//! A quantization on a GPU: compiled, computed, then timed.

use std::time::Instant;

use fa3::cuda::{Device, HostError, Quantize, QuantizeError, QuantizeTensors, RotaryTensors};
use fa3::{QuantizeProblem, Quantized, RopeTable, Scalar, Scaling};
use ndarray::{Array3, Array4, ArrayView4};

use crate::run::gpu::{timed, upload};
use crate::run::place::Times;

/// Quantizes a contiguous tensor, and how long a launch of the kernel takes.
///
/// # Errors
/// The tensor is too large, or what the driver says.
pub(super) fn quantize<T: Scalar>(
    device: &Device,
    problem: &QuantizeProblem,
    x: ArrayView4<'_, T>,
    table: Option<&RopeTable>,
) -> Result<(Quantized, Times), QuantizeError> {
    let start = Instant::now();
    let quantize = Quantize::new(device, problem)?;
    let compile = Some(start.elapsed());

    let stream = device.stream()?;
    let x = upload(device, &stream, x)?;
    let tables = table.map(|table| [table.cos(), table.sin()].map(|x| upload(device, &stream, x.view())));
    let tables = tables.map(|[cos, sin]| Ok::<_, HostError>((cos?, sin?))).transpose()?;
    let rotary = tables.as_ref().map(|(cos, sin)| RotaryTensors { cos, sin, positions: None });
    let mut codes = device.alloc(problem.codes_bytes().0 as usize)?;
    let shape = problem.scales_shape();
    let mut scales = shape.map(|shape| device.alloc(4 * shape.iter().product::<usize>())).transpose()?;

    let (call, launches) = timed(&stream, || {
        quantize.run(&stream, QuantizeTensors { x: &x, codes: &mut codes, scales: scales.as_mut(), rotary })
    })?;

    let codes = codes.download(&stream)?;
    let scales = match (shape, scales, problem.scaling()) {
        (Some(shape), Some(scales), _) => {
            Array3::from_shape_vec(shape, scales.download(&stream)?).expect("one scale each")
        }
        (_, _, Scaling::Given(scale)) => Array3::from_elem([1; 3], scale),
        (_, _, Scaling::Block { .. }) => unreachable!("blocks have scales"),
    };
    let codes = Array4::from_shape_vec(problem.codes().shape.dims(), codes).expect("one code each");
    Ok((Quantized { codes, scales, scaling: problem.scaling() }, Times { compile, call, launches }))
}
