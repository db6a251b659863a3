//! The speed of the split-KV reduction on a GPU, compared with a copy.

use fa3_cuda::host::{Combine, Device, HostError, Tensors, Workspace};
use fa3_types::{CombineSpec, Dtype, Shape};

use crate::quantize::{streams, time, time_of_copies};
use crate::{Check, Fallible};

pub(crate) const CHECKS: [(&str, Check); 1] = [("combine::speed_beside_a_copy", speed)];

/// Times of large reductions and of copies with the same number of bytes, and times of small reductions, whose partial
/// results are in L2.
fn speed(device: &Device) -> Fallible<String> {
    let large = Shape { batch: 4, seqlen: 4096, heads: 32, head_dim: 128 };
    let mut said = String::from("parts x rows x head_dim: us, ratio to a copy of all bytes");
    let mut least: f64 = 1.0;
    for (splits, head_dim, dtype) in
        [(2, 128, Dtype::F32), (4, 64, Dtype::F32), (2, 512, Dtype::F32), (2, 128, Dtype::Bf16)]
    {
        let shape = Shape { head_dim, seqlen: large.seqlen * 128 / head_dim, ..large };
        let [ours, copy] = race(device, dtype, splits, shape)?;
        said += &format!("\n{splits} {dtype} x {shape}: {ours:.1}, {:.3}", copy / ours);
        least = least.min(copy / ours);
    }
    for (splits, seqlen, heads, head_dim) in [
        (16, 256, 32, 128),
        (132, 64, 32, 128),
        (2, 1, 32, 128),
        (8, 1, 32, 128),
        (32, 1, 32, 128),
        (132, 1, 32, 128),
        (132, 1, 16, 512),
        (256, 4, 16, 128),
    ] {
        let shape = Shape { batch: 1, seqlen, heads, head_dim };
        let [ours, copy] = race(device, Dtype::F32, splits, shape)?;
        said += &format!("\n{splits} f32 x {shape}: {ours:.2}, {:.3}", copy / ours);
    }
    if least > 0.8 { Ok(said) } else { Err(format!("{said}\n{least:.3} at least").into()) }
}

/// Microseconds of a reduction to bf16, and of a copy with the same number of bytes.
fn race(device: &Device, dtype: Dtype, splits: usize, shape: Shape) -> Fallible<[f64; 2]> {
    let problem = CombineSpec::contiguous(dtype, Dtype::Bf16, splits, shape).validate()?;
    let combine = Combine::new(device, &problem)?;
    let (raw, stream) = streams(device)?;
    let bytes = [
        problem.out_partial().extent_bytes(),
        problem.lse_partial().extent_bytes(),
        problem.o().extent_bytes(),
        problem.lse().extent_bytes(),
    ]
    .map(|bytes| bytes.0 as usize);
    let zeros = |bytes: usize| {
        let mut buffer = device.alloc(bytes)?;
        buffer.fill(&stream, 0)?;
        Ok::<_, HostError>(buffer)
    };
    let [out_partial, lse_partial, o, lse] = bytes.map(zeros);
    let (out_partial, lse_partial, mut o, mut lse) = (out_partial?, lse_partial?, o?, lse?);
    let mut workspace = Workspace::new(device, &stream, combine.workspace_bytes())?;
    let ours = time(&stream, 4, |_| {
        let tensors = Tensors::new(
            [("out_partial", &out_partial), ("lse_partial", &lse_partial)],
            [("o", &mut o), ("lse", &mut lse)],
        );
        combine.run(&stream, tensors, &mut workspace).map_err(Into::into)
    })?;
    Ok([ours, time_of_copies(device, &raw, &stream, 1, bytes.iter().sum())?])
}
