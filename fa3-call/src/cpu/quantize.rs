//! Quantization to e4m3.

use fa3::half::{bf16, f16};
use fa3::ndarray::ArrayViewMut4;
use fa3::{Device, E4m3, Quantize, Quantized, Scalar};
use fa3_types::{Dtype, QuantizeProblem, ValueLayout};

use super::call::CpuCall;
use super::memory::Memory;
use super::rotary::{self, RowPositions};
use crate::call::Call;
use crate::error::Error;
use crate::quantize::Quantization;

impl CpuCall for Quantization {
    fn check_for_cpu(&self) -> Result<(), Error> {
        self.contiguous().problem().map(drop)
    }

    fn compute(&self, memory: &Memory<'_>) -> Result<(), Error> {
        quantize(self, memory)
    }
}

/// Quantizes the tensor in `memory`: computes codes, scales and means.
///
/// # Errors
/// The call or an address is invalid.
fn quantize(call: &Quantization, memory: &Memory<'_>) -> Result<(), Error> {
    // The CPU takes any strides.
    let problem = call.contiguous().problem()?;
    match problem.x().dtype {
        Dtype::F16 => quantize_of::<f16>(call, &problem, memory),
        Dtype::Bf16 => quantize_of::<bf16>(call, &problem, memory),
        Dtype::F32 | Dtype::E4m3 | Dtype::Int8 => unreachable!("x has 16 bits in a valid problem"),
    }
}

fn quantize_of<T: Scalar>(
    call: &Quantization,
    problem: &QuantizeProblem,
    memory: &Memory<'_>,
) -> Result<(), Error> {
    // SAFETY: the maker of `memory` guarantees the call's tensors.
    #[allow(unsafe_code, reason = "tensors are plain addresses")]
    let (x, rotation) = unsafe {
        let rotation = call.rotary.map(|of| {
            let positions = rotary::positions("positions", of, call.x.shape, memory)?;
            Ok::<_, Error>((rotary::table(of, memory)?, positions))
        });
        (memory.view::<T>("x", &call.x)?, rotation.transpose()?)
    };
    let mut quantize = Quantize::new(x).scaling(problem.scaling());
    if let Some((table, positions)) = &rotation {
        quantize = quantize.rotary(table);
        quantize = match positions {
            RowPositions::From(first) => quantize.first_position(*first),
            RowPositions::Listed(list) => quantize.positions(list),
        };
    }
    if let Some(seed) = call.hadamard_seed {
        quantize = quantize.hadamard(seed);
    }
    write(problem, &quantize.run(&Device::Cpu)?, memory)
}

fn write(problem: &QuantizeProblem, quantized: &Quantized, memory: &Memory<'_>) -> Result<(), Error> {
    let [batch, seqlen, heads, head_dim] = problem.codes().shape.dims();
    let (dims, transposed) = match problem.layout() {
        ValueLayout::Rows => ([batch, seqlen, heads, head_dim], false),
        ValueLayout::Transposed => ([batch, heads, head_dim, ValueLayout::keys_of_row(seqlen)], true),
    };
    // SAFETY: the maker of `memory` guarantees the call's tensors.
    #[allow(unsafe_code, reason = "tensors are plain addresses")]
    let (codes, scales, mean) = unsafe {
        let codes = memory.slice_mut::<E4m3>("codes", dims.iter().product())?;
        let numbers =
            |tensor, count| memory.has(tensor).then(|| memory.slice_mut::<f32>(tensor, count)).transpose();
        let count = quantized.mean.as_ref().map_or(0, |mean| mean.len());
        (codes, numbers("scales", quantized.scales.len())?, numbers("mean", count)?)
    };
    let mut codes = ArrayViewMut4::from_shape(dims, codes).expect("one element for each index");
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
