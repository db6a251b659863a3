//! Quantization on a GPU: the bits of thousands of problems, and the speed compared with a copy.

use std::sync::Arc;

use fa3_cuda::cudarc::driver::{CudaContext, CudaStream, result};
use fa3_cuda::host::{Device, DeviceBuffer, HostError, Quantize, Stream, Tensors, Workspace};
use fa3_quant::Incoherent;
use fa3_tests::quantize::Case;
use fa3_types::{Dtype, Positions, QuantizeSpec, RopeStyle, Rotary, Scaling, Shape, ValueLayout};

use crate::{Check, Fallible, random};

pub(crate) const CHECKS: [(&str, Check); 2] = [
    ("quantize::random_problems", |device| {
        random::problems(device, |seed, kernels| Case::random(seed, kernels).trial(132))
    }),
    ("quantize::speed_beside_a_copy", speed),
];

/// Bytes of memory that the buffers cycle through, so that no reused buffer is in L2.
const COLD: usize = 400 << 20;

/// The steps of a quantization other than rounding.
#[derive(Clone, Copy)]
struct Parts {
    rotates: bool,
    transforms: bool,
    scales: Scaling,
    layout: ValueLayout,
}

/// Whether a separate pass computes the scales.
fn reads_twice(scales: Scaling) -> bool {
    matches!(scales, Scaling::Channel | Scaling::Heads { .. } | Scaling::Tensor)
}

/// Times with 2048 columns, and times of copies with the same number of bytes.
fn speed(device: &Device) -> Fallible<String> {
    let layout = ValueLayout::Rows;
    let all = |rows| Parts { rotates: true, transforms: true, scales: Scaling::Block { rows }, layout };
    let whole = [4096, 16384, 65536]
        .into_iter()
        .flat_map(|tokens| [64, 96, 128, 192, 256].map(|dim| [64, 128].map(|rows| (tokens, dim, all(rows)))))
        .flatten();
    let less = [64, 128, 256].into_iter().flat_map(|dim| {
        let parts = all(128);
        let plain = |rows| Parts { rotates: false, transforms: false, ..all(rows) };
        [
            plain(128),
            Parts { layout: ValueLayout::Transposed, ..plain(64) },
            Parts { layout: ValueLayout::Transposed, ..plain(128) },
            Parts { transforms: false, ..parts },
            Parts { rotates: false, ..parts },
            Parts { scales: Scaling::Given(0.01), ..parts },
        ]
        .map(|parts| (16384, dim, parts))
    });
    let twice = [64, 128, 256].into_iter().flat_map(|dim| {
        let plain = |scales| Parts { rotates: false, transforms: false, scales, layout };
        let [channels, heads] = [Scaling::Channel, Scaling::Heads { heads: 1 }].map(plain);
        let transposed = Parts { layout: ValueLayout::Transposed, ..channels };
        [channels, transposed, heads, Parts { scales: heads.scales, ..all(128) }]
            .map(|parts| (16384, dim, parts))
    });
    let mut said =
        String::from("tokens x heads x head_dim: us, ratio to a copy of tensor and codes, of all bytes");
    let mut least: f64 = 1.0;
    for (tokens, head_dim, parts) in whole.chain(less).chain(twice) {
        let shape = Shape { batch: 1, seqlen: tokens, heads: 2048 / head_dim, head_dim };
        let Race { ours, copies: [of_tensors, of_all] } = race(device, shape, parts)?;
        let Parts { rotates, transforms, scales, layout } = parts;
        said += &format!(
            "\n{tokens} x {} x {head_dim}, {scales:?}{}{}, {layout:?}: {ours:.2}, {:.3}, {:.3}",
            shape.heads,
            if rotates { ", rotary" } else { "" },
            if transforms { ", Hadamard" } else { "" },
            of_tensors / ours,
            of_all / ours,
        );
        // Head dimensions that are no powers of two need two transforms.
        let is_bound = layout == ValueLayout::Rows && !reads_twice(scales) && head_dim.is_power_of_two();
        if tokens == 16384 && is_bound {
            least = least.min(of_all / ours);
        }
    }
    if !device.name().contains("H100") {
        return Ok(format!("{said}\n{least:.3} at least; not judged: the bound is for an H100's memory"));
    }
    if least > 0.85 {
        Ok(said)
    } else {
        Err(format!("{said}\n{least:.3} at 16k tokens, in rows, head_dim a power of two").into())
    }
}

/// Times in microseconds.
struct Race {
    ours: f64,
    /// Times of two copies: of the bytes of the tensor and its codes, and of the bytes of all buffers.
    copies: [f64; 2],
}

/// Times of a quantization and of copies.
fn race(device: &Device, shape: Shape, parts: Parts) -> Fallible<Race> {
    let mut spec = QuantizeSpec::contiguous(Dtype::Bf16, shape);
    (spec.scaling, spec.layout) = (parts.scales, parts.layout);
    let rotary_dim = shape.head_dim;
    if parts.rotates {
        let (style, positions) = (RopeStyle::HalfSplit, Positions::From(0));
        spec.rotary = Some(Rotary { style, rotary_dim, table_rows: shape.seqlen, positions });
    }
    if parts.transforms {
        spec.signs = Some(Incoherent::new(shape.head_dim, 1).signs().ok_or("no signs")?);
    }
    let problem = spec.validate()?;
    let quantize = Quantize::new(device, &problem)?;
    let (raw, stream) = streams(device)?;

    // Number of elements of x, and of the codes in either layout: no length of these problems needs padding.
    let elements = problem.codes_bytes().0 as usize;
    let bits: Vec<u16> =
        (0..elements as u32).map(|i| (i.wrapping_mul(0x9E37_79B9) >> 16) as u16 & 0x83FF | 0x3C00).collect();
    let table: Vec<f32> = (0..shape.seqlen * rotary_dim / 2).map(|i| (i as f32).sin()).collect();
    let bytes = |shape: Option<[usize; 3]>| shape.map_or(0, |shape| 4 * shape.iter().product::<usize>());
    let [scales, mean] = [problem.scales_shape(), problem.mean_shape()].map(bytes);
    let mut workspace = Workspace::new(device, &stream, quantize.workspace_bytes())?;
    let tables = if parts.rotates { 2 * 4 * table.len() } else { 0 };
    let sets = (COLD / (3 * elements)).clamp(2, 16);
    let mut buffers = (0..sets)
        .map(|_| {
            let (cos, sin) = (device.upload(&stream, &table)?, device.upload(&stream, &table)?);
            let x = device.upload(&stream, &bits)?;
            let numbers = [device.alloc(scales.max(4))?, device.alloc(mean.max(4))?];
            Ok((x, [cos, sin], device.alloc(elements)?, numbers))
        })
        .collect::<Result<Vec<_>, HostError>>()?;
    let ours = time(&stream, sets, |index| {
        let (x, [cos, sin], codes, [scales_to, mean_to]) = &mut buffers[index];
        let (cos, sin) = (parts.rotates.then_some(&*cos), parts.rotates.then_some(&*sin));
        let (scales, mean) = ((scales > 0).then_some(scales_to), (mean > 0).then_some(mean_to));
        let tensors = Tensors::new([("x", &*x)], [("codes", codes)]).input("cos", cos).input("sin", sin);
        let tensors = tensors.output("scales", scales).output("mean", mean);
        quantize.run(&stream, tensors, &mut workspace).map_err(Into::into)
    })?;
    let again = if reads_twice(parts.scales) { 2 * elements } else { 0 };
    let copy = |bytes| time_of_copies(device, &raw, &stream, sets, bytes);
    let copies = [copy(3 * elements)?, copy(3 * elements + again + tables + scales + mean)?];
    Ok(Race { ours, copies })
}

/// A stream of cudarc, and a handle of this library to it.
pub(crate) fn streams(device: &Device) -> Fallible<(Arc<CudaStream>, Stream)> {
    let raw = CudaContext::new(0)?.new_stream()?;
    // SAFETY: the stream belongs to the device's context, and the callers keep it longer than the handle.
    #[allow(unsafe_code, reason = "the copy's stream is cudarc's")]
    let stream = unsafe { Stream::from_raw(device, raw.cu_stream() as usize) };
    Ok((raw, stream))
}

/// Microseconds of a copy that reads and writes `bytes` bytes in total, between the buffers of one of `pairs` in turn.
pub(crate) fn time_of_copies(
    device: &Device,
    raw: &CudaStream,
    stream: &Stream,
    pairs: usize,
    bytes: usize,
) -> Fallible<f64> {
    // A copied byte is read and written.
    let half = bytes / 2;
    let copies = (0..pairs)
        .map(|_| Ok([device.alloc(half)?, device.alloc(half)?]))
        .collect::<Result<Vec<[DeviceBuffer; 2]>, HostError>>()?;
    time(stream, pairs.max(4), |index| {
        let [from, to] = &copies[index % pairs];
        // SAFETY: both buffers have `half` bytes, and live until the stream is synchronized.
        #[allow(unsafe_code, reason = "a copy that the host layer has no need of")]
        let copied =
            unsafe { result::memcpy_dtod_async(to.address(), from.address(), half, raw.cu_stream()) };
        copied.map_err(Into::into)
    })
}

/// The median of ten rounds, in microseconds per call.
pub(crate) fn time(
    stream: &Stream,
    sets: usize,
    mut call: impl FnMut(usize) -> Fallible<()>,
) -> Fallible<f64> {
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
