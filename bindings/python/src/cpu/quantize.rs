//! Quantization to e4m3.

use fa3::half::{bf16, f16};
use fa3::ndarray::{Array2, ArrayViewMut4};
use fa3::{Device, E4m3, Quantize, Quantized, RopeTable, Scalar};
use fa3_types::{Dtype, Positions, QuantizeAddresses, QuantizeProblem, Rotary, TensorName, ValueLayout};

use super::memory::{slice, slice_mut, view};
use crate::error::Error;
use crate::quantize::Call;

/// The problem of a call, of a contiguous tensor: any strides will do.
///
/// # Errors
/// What is wrong with it.
pub(crate) fn check(call: &Call) -> Result<QuantizeProblem, Error> {
    Ok(call.contiguous().problem().map_err(fa3_cuda::host::QuantizeError::from)?)
}

/// Computes codes, scales and means of the tensor that lies `at`.
///
/// # Errors
/// What is wrong with the call.
pub(crate) fn quantize(call: &Call, at: QuantizeAddresses) -> Result<(), Error> {
    let problem = check(call)?;
    match problem.x().dtype {
        Dtype::F16 => quantize_of::<f16>(call, &problem, at),
        Dtype::Bf16 => quantize_of::<bf16>(call, &problem, at),
        Dtype::F32 | Dtype::E4m3 => unreachable!("x has 16 bits in a valid problem"),
    }
}

fn quantize_of<T: Scalar>(
    call: &Call,
    problem: &QuantizeProblem,
    at: QuantizeAddresses,
) -> Result<(), Error> {
    let shape = problem.x().shape;
    let listed = |rotary: Rotary| rotary.positions == Positions::Listed;
    // SAFETY: the Python sources take the addresses from tensors of the problem's shapes, strides and dtypes, which
    // they hold until the call is over. That nobody writes to them meanwhile is up to the caller, as with torch's own
    // operators.
    #[allow(unsafe_code, reason = "torch's tensors are plain addresses")]
    let (x, tables, positions) = unsafe {
        let x = view::<T>(TensorName::X, call.x(), at.x)?;
        let tables = match (call.rotary(), at.cos, at.sin) {
            (Some(rotary), Some(cos), Some(sin)) => {
                let count = rotary.table_rows * (rotary.rotary_dim / 2);
                Some((rotary, slice(TensorName::Cos, count, cos)?, slice(TensorName::Sin, count, sin)?))
            }
            _ => None,
        };
        let positions = at.positions.filter(|_| call.rotary().is_some_and(listed));
        let rows = shape.batch * shape.seqlen;
        (x, tables, positions.map(|at| slice::<i32>(TensorName::Positions, rows, at)).transpose()?)
    };
    let table = tables.map(|(rotary, cos, sin)| table(rotary, cos, sin)).transpose()?;
    let mut quantize = Quantize::new(x).scaling(problem.scaling());
    if let Some(table) = &table {
        quantize = quantize.rotary(table);
    }
    match (call.rotary().map(|rotary| rotary.positions), positions) {
        (Some(Positions::From(first)), _) => quantize = quantize.first_position(first),
        (Some(Positions::Listed), Some(positions)) => quantize = quantize.positions(positions),
        (Some(Positions::Listed), None) | (None, _) => {}
    }
    if let Some(seed) = call.hadamard_seed() {
        quantize = quantize.hadamard(seed);
    }
    write(problem, &quantize.run(&Device::Cpu)?, at)
}

fn table(rotary: Rotary, cos: &[f32], sin: &[f32]) -> Result<RopeTable, Error> {
    let dims = [rotary.table_rows, rotary.rotary_dim / 2];
    let array = |numbers: &[f32]| Array2::from_shape_vec(dims, numbers.to_vec()).expect("they are so many");
    Ok(RopeTable::new(rotary.style, array(cos), array(sin))?)
}

fn write(problem: &QuantizeProblem, quantized: &Quantized, at: QuantizeAddresses) -> Result<(), Error> {
    let [batch, seqlen, heads, head_dim] = problem.codes().shape.dims();
    let (dims, transposed) = match problem.layout() {
        ValueLayout::Rows => ([batch, seqlen, heads, head_dim], false),
        ValueLayout::Transposed => ([batch, heads, head_dim, ValueLayout::keys_of_row(seqlen)], true),
    };
    // SAFETY: the Python sources take the addresses from new tensors of the problem's shapes and dtypes, which nobody
    // else knows, and hold them until the call is over.
    #[allow(unsafe_code, reason = "torch's tensors are plain addresses")]
    let (codes, scales, mean) = unsafe {
        let codes = slice_mut::<E4m3>(TensorName::Codes, dims.iter().product(), at.codes)?;
        let numbers = |tensor, count, at| slice_mut::<f32>(tensor, count, at);
        let scales = at.scales.map(|at| numbers(TensorName::Scales, quantized.scales.len(), at));
        let count = quantized.mean.as_ref().map_or(0, |mean| mean.len());
        (codes, scales.transpose()?, at.mean.map(|at| numbers(TensorName::Mean, count, at)).transpose()?)
    };
    let mut codes = ArrayViewMut4::from_shape(dims, codes).expect("they are so many");
    if transposed {
        codes.fill(E4m3::ZERO);
        for ((batch, key, head, element), &code) in quantized.codes.indexed_iter() {
            codes[[batch, head, element, ValueLayout::place_of_key(key)]] = code;
        }
    } else {
        codes.assign(&quantized.codes);
    }
    for (to, from) in [(scales, Some(&quantized.scales)), (mean, quantized.mean.as_ref())] {
        let both = to.into_iter().flatten().zip(from.into_iter().flatten());
        both.for_each(|(to, from)| *to = *from);
    }
    Ok(())
}
