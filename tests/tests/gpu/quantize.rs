//! Quantization on a GPU: bits of thousands of problems, and its speed beside a copy's.

use fa3_cuda::cudarc::driver::{CudaContext, result};
use fa3_cuda::host::{Device, DeviceBuffer, HostError, Quantize, QuantizeTensors, RotaryTensors, Stream};
use fa3_quant::Incoherent;
use fa3_tests::gpu;
use fa3_tests::quantize::Case;
use fa3_types::{Dtype, Positions, QuantizeSpec, RopeStyle, Rotary, Shape};
use rayon::prelude::*;

use crate::{Check, Fallible};

pub(crate) const CHECKS: [(&str, Check); 2] =
    [("quantize::random_problems", random_problems), ("quantize::speed_beside_a_copy", speed)];

/// Random problems, and the kernels that they take.
const PROBLEMS: u64 = 3000;
const KERNELS: u64 = 100;

/// Memory that is gone over before any of it is used again, so that L2 has none of it.
const COLD: usize = 400 << 20;

fn random_problems(device: &Device) -> Fallible<String> {
    let faults: Vec<String> = (0..PROBLEMS)
        .into_par_iter()
        .filter_map(|seed| {
            let trial = Case::random(seed, KERNELS).trial(132);
            match gpu::run(device, &trial.program, &trial.before) {
                Ok(after) => trial.check(&after).err(),
                Err(error) => Some(error.to_string()),
            }
        })
        .collect();
    let said = format!("{PROBLEMS} problems, {} faults", faults.len());
    if faults.is_empty() {
        Ok(said)
    } else {
        Err(format!("{said}: {}", faults[..faults.len().min(3)].join("\n")).into())
    }
}

/// Times of everything at once and of a copy of as many bytes, at 2048 columns.
fn speed(device: &Device) -> Fallible<String> {
    let mut said =
        String::from("tokens x heads x head_dim, rows of a scale: us, us of a copy of as many bytes, ratio");
    let mut at_16k = 0.0;
    for (tokens, head_dim, rows) in [4096, 16384, 65536].into_iter().flat_map(|tokens| {
        [64, 128, 256].into_iter().flat_map(move |dim| [64, 128].map(|rows| (tokens, dim, rows)))
    }) {
        let shape = Shape { batch: 1, seqlen: tokens, heads: 2048 / head_dim, head_dim };
        let (ours, copy) = race(device, shape, rows)?;
        said += &format!(
            "\n{tokens} x {} x {head_dim}, {rows}: {ours:.2}, {copy:.2}, {:.3}",
            shape.heads,
            copy / ours
        );
        if (tokens, head_dim, rows) == (16384, 128, 128) {
            at_16k = copy / ours;
        }
    }
    if at_16k > 0.8 { Ok(said) } else { Err(format!("{said}\n{at_16k:.3} at 16k tokens").into()) }
}

/// Microseconds of quantization, with a rotation and a transform, and of a copy.
fn race(device: &Device, shape: Shape, rows: usize) -> Fallible<(f64, f64)> {
    let (style, rotary_dim, positions) = (RopeStyle::HalfSplit, shape.head_dim, Positions::From(0));
    let rotary = Rotary { style, rotary_dim, table_rows: shape.seqlen, positions };
    let signs = Incoherent::new(shape.head_dim, 1).signs().ok_or("no signs")?;
    let spec = QuantizeSpec::contiguous(Dtype::Bf16, shape).block_rows(rows).rotary(rotary).signs(signs);
    let problem = spec.validate()?;
    let quantize = Quantize::new(device, &problem)?;
    let raw = CudaContext::new(0)?.new_stream()?;
    // SAFETY: a stream of the device's context, which lives until the end of this function.
    #[allow(unsafe_code, reason = "the copy's stream is cudarc's")]
    let stream = unsafe { Stream::from_raw(device, raw.cu_stream() as usize) };

    let elements = problem.codes().extent().0 as usize;
    let bits: Vec<u16> =
        (0..elements as u32).map(|i| (i.wrapping_mul(0x9E37_79B9) >> 16) as u16 & 0x83FF | 0x3C00).collect();
    let table: Vec<f32> = (0..shape.seqlen * rotary_dim / 2).map(|i| (i as f32).sin()).collect();
    let uploaded = |bits: &[u16]| -> Result<DeviceBuffer, HostError> {
        let mut buffer = device.alloc(2 * elements)?;
        buffer.upload(&stream, bits)?;
        Ok(buffer)
    };
    let mut cos = device.alloc(4 * table.len())?;
    cos.upload(&stream, &table)?;
    let tables = RotaryTensors { cos: &cos, sin: &cos, positions: None };
    let sets = (COLD / (3 * elements)).clamp(2, 16);
    let mut sets: Vec<(DeviceBuffer, DeviceBuffer, DeviceBuffer)> = (0..sets)
        .map(|_| Ok((uploaded(&bits)?, device.alloc(elements)?, device.alloc(elements / 16)?)))
        .collect::<Result<_, HostError>>()?;
    let ours = time(&stream, sets.len(), |index| {
        let (x, codes, scales) = &mut sets[index];
        let tensors = QuantizeTensors { x, codes, scales: Some(scales), rotary: Some(tables) };
        quantize.run(&stream, tensors).map_err(Into::into)
    })?;
    // As many bytes are read and written: 2 and 1 for an element.
    let half = 3 * elements / 2;
    let copies: Vec<[DeviceBuffer; 2]> = (0..sets.len())
        .map(|_| Ok([device.alloc(half)?, device.alloc(half)?]))
        .collect::<Result<_, HostError>>()?;
    let copy = time(&stream, copies.len(), |index| {
        let [from, to] = &copies[index];
        // SAFETY: both buffers have so many bytes, and live until the stream is waited for.
        #[allow(unsafe_code, reason = "a copy that the host layer has no need of")]
        let copied =
            unsafe { result::memcpy_dtod_async(to.address(), from.address(), half, raw.cu_stream()) };
        copied.map_err(Into::into)
    })?;
    Ok((ours, copy))
}

/// The median of ten rounds, in microseconds a call.
fn time(stream: &Stream, sets: usize, mut call: impl FnMut(usize) -> Fallible<()>) -> Fallible<f64> {
    let mut micros = Vec::new();
    for round in 0..12 {
        let start = stream.record()?;
        let calls = 5 * sets;
        (0..calls).try_for_each(|index| call(index % sets))?;
        let end = stream.record()?;
        end.synchronize()?;
        if round > 1 {
            micros.push(f64::from(end.millis_since(&start)?) * 1e3 / calls as f64);
        }
    }
    micros.sort_by(f64::total_cmp);
    Ok(micros[micros.len() / 2])
}
