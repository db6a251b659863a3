//! Quantization on a GPU: compiles, computes, then times it.

use std::time::Instant;

use fa3::cuda::{Device, HostError, OperationError, Quantize, Tensors, Workspace};
use fa3::problem::QuantizeProblem;
use fa3::{Quantized, RopeTable, Scalar};
use ndarray::ArrayView4;

use crate::device::Times;
use crate::gpu::{floats, upload};

/// Quantizes a contiguous tensor, and times a launch of the kernel.
pub(super) fn quantize<T: Scalar>(
    device: &Device,
    problem: &QuantizeProblem,
    x: ArrayView4<'_, T>,
    table: Option<&RopeTable>,
) -> Result<(Quantized, Times), OperationError> {
    let start = Instant::now();
    let quantize = Quantize::new(device, problem)?;
    let compile = start.elapsed();

    let stream = device.stream()?;
    let x = upload(device, &stream, x)?;
    let tables = table.map(|table| [table.cos(), table.sin()].map(|x| upload(device, &stream, x.view())));
    let tables = tables.map(|[cos, sin]| Ok::<_, HostError>((cos?, sin?))).transpose()?;
    let (cos, sin) = tables.as_ref().map(|(cos, sin)| (cos, sin)).unzip();
    let mut codes = device.alloc(problem.codes_bytes().0 as usize)?;
    let mut scales = floats(device, problem.scales_shape())?;
    let mut mean = floats(device, problem.mean_shape())?;
    let mut workspace = Workspace::new(device, &stream, quantize.workspace_bytes())?;

    let times = Times::of_launches(&stream, compile, || {
        let tensors = Tensors::new([("x", &x)], [("codes", &mut codes)]).input("cos", cos).input("sin", sin);
        let tensors = tensors.output("scales", scales.as_mut()).output("mean", mean.as_mut());
        quantize.run(&stream, tensors, &mut workspace)
    })?;

    let codes = codes.download(&stream)?;
    let [scales, mean] =
        [scales, mean].map(|numbers| numbers.map_or(Ok(Vec::new()), |numbers| numbers.download(&stream)));
    Ok((Quantized::new(problem, codes, scales?, mean?), times))
}
