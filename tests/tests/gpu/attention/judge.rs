//! Judges the rows that are furthest from the oracle by the error law.

use fa3_ref::rows::{RowsLaw, SatisfiedRows, telling_rows};
use fa3_ref::{Element, Inputs as Arrays, Precision};
use fa3_types::{Dtype, Problem};
use half::slice::HalfBitsSliceExt;
use half::{bf16, f16};
use ndarray::{ArrayView3, ArrayView4, ShapeBuilder};

use super::fp8;
use super::tensor::Tensor;
use super::trial::{Inputs, Outputs};

/// Judges the results of a trial.
///
/// # Errors
/// The violation of the law.
pub(super) fn judge(
    problem: &Problem,
    tile_m: usize,
    inputs: &Inputs,
    outputs: &Outputs,
) -> Result<SatisfiedRows, String> {
    if let Some(fault) = outputs.o.fault() {
        return Err(fault);
    }
    if let Some(nan) = outputs.lse.iter().position(|lse| lse.is_nan()) {
        return Err(format!("element {nan} of lse is NaN"));
    }
    match problem.dtype() {
        Dtype::F16 => rows(problem, tile_m, inputs, outputs, |bits| bits.reinterpret_cast::<f16>()),
        Dtype::Bf16 => rows(problem, tile_m, inputs, outputs, |bits| bits.reinterpret_cast::<bf16>()),
        Dtype::E4m3 => fp8::judge(problem, inputs, outputs),
        dtype @ (Dtype::F32 | Dtype::Int8) => Err(format!("no kernel takes {dtype}")),
    }
}

fn rows<T: Element>(
    problem: &Problem,
    tile_m: usize,
    inputs: &Inputs,
    outputs: &Outputs,
    numbers: fn(&[u16]) -> &[T],
) -> Result<SatisfiedRows, String> {
    let view = |x| view(x, numbers);
    let problem = &problem.known().map_err(|error| error.to_string())?;
    let arrays = Arrays::new(problem, view(&inputs.q), view(&inputs.k), view(&inputs.v));
    let arrays = arrays.map_err(|error| error.to_string())?;
    let law = RowsLaw::new(&arrays, Precision::of_output(problem.dtype()), &telling_rows(problem, &[tile_m]));
    let lse = ArrayView3::from_shape(problem.lse_shape(), &outputs.lse).expect("lse has its shape");
    law.check(view(&outputs.o), lse).map_err(|violation| violation.to_string())
}

/// A tensor as an array over its memory, without its gaps.
fn view<T>(x: &Tensor, numbers: fn(&[u16]) -> &[T]) -> ArrayView4<'_, T> {
    let (dims, strides) = (x.desc.shape.dims(), x.desc.strides);
    let strides = [strides.batch, strides.seqlen, strides.heads, strides.head_dim];
    // Strides of an empty tensor do not matter.
    let strides = strides.map(|stride| if dims.contains(&0) { 0 } else { stride as usize });
    ArrayView4::from_shape(dims.strides(strides), numbers(&x.bits)).expect("the memory holds the tensor")
}
