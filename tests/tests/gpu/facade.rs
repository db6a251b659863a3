//! Attention on arrays, on the first Hopper GPU and on the CPU. Each result is checked against the error law.

mod backward;
mod cache;

use fa3::half::{bf16, f16};
use fa3::ndarray::{Array4, Axis};
use fa3::{Attention, Combine, Device, Error, Output, Rope, RopeStyle, Scalar, ScoreFunction, ScoreTable};
use fa3_ref::Forward;
use fa3_tests::fwd::dense;
use fa3_tests::intervals::Kind;
use fa3_tests::{Case, facade, testdata};
use fa3_types::Dtype;

use crate::{Check, Fallible, no_faults};
use cache::Layout;

/// Shapes of a call: batch, (seqlen_q, seqlen_k), (heads_q, heads_kv), (head_dim, head_dim_v).
type Sizes = (usize, (usize, usize), (usize, usize), (usize, usize));

pub(crate) const CHECKS: [(&str, Check); 17] = [
    ("facade::calls", |_| calls()),
    ("facade::fp8_bf16", |_| fp8::<bf16>((2, (300, 300), (4, 2), (64, 64)))),
    ("facade::fp8_f16", |_| fp8::<f16>((1, (257, 513), (2, 1), (128, 256)))),
    ("facade::fp8_positions", |_| fp8_positions()),
    ("facade::transposed_view", |_| transposed()),
    ("facade::refusals", |_| refused()),
    ("facade::combine", |_| combined()),
    ("facade::backward_deterministic", backward::deterministic),
    ("facade::cache_dense", |_| cache::law::<bf16>(Layout::Dense, 128)),
    ("facade::cache_indexed", |_| cache::law::<f16>(Layout::Indexed, 64)),
    ("facade::cache_left_padded", |_| cache::law::<bf16>(Layout::LeftPadded, 64)),
    ("facade::cache_in_pages", |_| cache::law::<bf16>(Layout::Pages(64), 128)),
    ("facade::cache_in_small_pages", |_| cache::law::<f16>(Layout::Pages(8), 64)),
    ("facade::cache_of_wide_heads", |_| cache::law::<bf16>(Layout::Pages(16), 256)),
    ("facade::cache_packed", |_| cache::packed()),
    ("facade::latent_cache", |_| cache::latent::<bf16>(64)),
    ("facade::latent_cache_in_small_pages", |_| cache::latent::<f16>(1)),
];

/// Checks the chosen calls, their gradients, and calls under intervals and with functions of scores against the error
/// law. `FA3_CASE` selects one call.
fn calls() -> Fallible<String> {
    let device = &Device::gpu()?;
    // Kernels support 16-bit types, and gradients up to head dimension 256. With few rows the law's bound depends on
    // chance.
    let is_taken = |Case { problem, .. }: &Case| {
        let narrow = problem.head_dim().max(problem.head_dim_v()) <= 256 || problem.qv().is_some();
        problem.dtype() != Dtype::F32 && narrow && problem.q().shape.seqlen >= 64
    };
    let intervals = [64, 128].map(|head_dim| {
        let spec = dense(Dtype::Bf16, 2, (300, 300), (4, 2), head_dim);
        Case::normal("intervals", Kind::SinkAndWindow.of(spec, false, false), 1)
    });
    let slopes = ScoreTable::new(&[4], [0.5, 0.25, 0.125, 0.0625])?;
    let text = "c * tanh(s / c) + slope[h] * (k - q)";
    let alibi =
        |slopes: ScoreTable| ScoreFunction::parse(text, [("slope", slopes.into()), ("c", 5.0.into())]);
    let [fixed, learned] = [alibi(slopes.clone())?, alibi(slopes.with_gradient())?];
    let functions =
        [(64, &fixed), (128, &fixed), (256, &fixed), (64, &learned), (128, &learned), (256, &learned)];
    let scored = functions.map(|(head_dim, function)| {
        let spec = dense(Dtype::Bf16, 2, (300, 300), (4, 2), head_dim).causal();
        Case::normal("a function of scores", spec.known().expect("it is valid").with_score(function), 1)
    });
    let chosen = testdata::chosen("facade.toml").into_iter();
    let mut cases: Vec<Case> = chosen.chain(intervals).chain(scored).collect();
    cases.retain(is_taken);
    let (mut worst, mut faults) = (0.0_f64, Vec::new());
    for case in &cases {
        match facade::check(case, device) {
            Ok(ratio) => worst = worst.max(ratio),
            Err(fault) => faults.push(fault),
        }
    }
    let said = no_faults(cases.len() as u64, &faults)?;
    Ok(format!("{said}, error / bound up to {worst:.2}"))
}

/// Q, K and V.
fn inputs<T: Scalar>(
    (batch, (seqlen_q, seqlen_k), (heads_q, heads_kv), (head_dim, head_dim_v)): Sizes,
) -> [Array4<T>; 3] {
    [
        wave((batch, seqlen_q, heads_q, head_dim), 0.7),
        wave((batch, seqlen_k, heads_kv, head_dim), 0.9),
        wave((batch, seqlen_k, heads_kv, head_dim_v), 1.1),
    ]
}

/// FP8 on the GPU has the emulator's codes, and an error similar to the emulator's.
fn fp8<T: Scalar<Output = T>>(sizes: Sizes) -> Fallible<String> {
    let device = &Device::gpu()?;
    let [q, k, v] = inputs::<T>(sizes);
    let attention = Attention::new(q.view(), k.view(), v.view()).causal();
    let exact = in_f32(attention.forward(&Device::Cpu)?);
    let mut said = Vec::new();
    for (v, fp8) in [("blocks", attention.clone().fp8()), ("channels", attention.fp8().v_channels())] {
        let fp8 = fp8.hadamard(5);
        let (gpu, cpu) = (in_f32(fp8.forward(device)?), in_f32(fp8.forward(&Device::Cpu)?));
        let error = |x: &Forward<f32>| (&x.o - &exact.o).iter().map(|x| x * x).sum::<f32>().sqrt();
        let ratio = error(&gpu) / error(&cpu);
        let of_lse = gpu.lse.iter().zip(&cpu.lse).map(|(gpu, cpu)| (gpu - cpu).abs()).fold(0.0, f32::max);
        said.push(format!(
            "V by {v}: the error of O is {ratio:.2} of the emulator's, LSE within {of_lse:.1e}"
        ));
        if !(0.7..1.4).contains(&ratio) || of_lse >= 0.09 {
            return Err(said.join("; ").into());
        }
    }
    Ok(said.join("; "))
}

/// Rows with listed positions have the same bits as rows whose first position is given, if the positions are equal.
fn fp8_positions() -> Fallible<String> {
    let device = &Device::gpu()?;
    let [q, k, v] = inputs::<bf16>((2, (200, 300), (4, 2), (64, 64)));
    let table = Rope::new(RopeStyle::HalfSplit, 64, 10_000.0)?.table(400);
    let list = |rows, first| (0..2 * rows).map(|row| first + row % rows).collect::<Vec<i32>>();
    let (of_q, of_k) = (list(200, 120), list(300, 20));
    let fp8 = Attention::new(&q, &k, &v).causal().fp8().rotary(&table).hadamard(5);
    let expected = fp8.clone().first_positions(120, 20).forward(device)?;
    let listed = fp8.q_positions(&of_q);
    let [both, one] = [listed.clone().k_positions(&of_k), listed.first_positions(0, 20)];
    if both.forward(device)? == expected && one.forward(device)? == expected {
        Ok("the same bits".to_owned())
    } else {
        Err("other bits".into())
    }
}

fn in_f32<T: Scalar>(Output { o, lse, .. }: Output<T>) -> Forward<f32> {
    Forward { o: o.mapv(T::to_f32), lse }
}

fn wave<T: Scalar>(dim: (usize, usize, usize, usize), step: f32) -> Array4<T> {
    let mut x = 0.0f32;
    Array4::from_shape_simple_fn(dim, || {
        x += step;
        T::from_f32(2.0 * x.sin())
    })
}

/// Arrays with heads before rows are the same problem.
fn transposed() -> Fallible<String> {
    let device = &Device::gpu()?;
    let heads_first = wave::<bf16>((2, 3, 200, 64), 0.7);
    let view = || heads_first.view().permuted_axes([0, 2, 1, 3]);
    let rows_first = view().as_standard_layout().into_owned();
    let given = Attention::new(view(), view(), view()).forward(device)?;
    let copied = Attention::new(rows_first.view(), rows_first.view(), rows_first.view()).forward(device)?;
    if given == copied { Ok("the same bits".to_owned()) } else { Err("another result".into()) }
}

/// Attention over all keys equals the reduction of results over parts of the keys.
fn combined() -> Fallible<String> {
    let device = &Device::gpu()?;
    let number = |(_, s, h, d)| f16::from_f32(((s * 7 + h * 5 + d * 3) as f32).sin());
    let x = Array4::from_shape_fn((1, 300, 4, 64), number);
    let of_keys = |from: usize, to: usize| {
        let keys = x.slice_axis(Axis(1), (from..to).into());
        Attention::new(x.view(), keys, keys).forward(device)
    };
    let (parts, whole) = ([of_keys(0, 100)?, of_keys(100, 101)?, of_keys(101, 300)?], of_keys(0, 300)?);
    let combined = Combine::of(&parts).run::<f32>(device)?;
    let of_o = whole.o.iter().zip(&combined.o).map(|(x, y)| (x.to_f32() - y).abs()).fold(0.0, f32::max);
    let lse = whole.lse.view().permuted_axes([0, 2, 1]);
    let of_lse = lse.iter().zip(&combined.lse).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
    let said = format!("O differs by {of_o:e}, LSE by {of_lse:e}");
    if of_o < 2e-3 && of_lse < 1e-4 { Ok(said) } else { Err(said.into()) }
}

/// Problems that kernels do not support are errors, and are not computed on the CPU instead.
fn refused() -> Fallible<String> {
    let device = &Device::gpu()?;
    let x = Array4::<f32>::zeros((1, 8, 1, 64));
    let single = Attention::new(x.view(), x.view(), x.view());
    let output = single.forward(&Device::Cpu)?;
    let errors =
        [single.forward(device).err(), single.backward(device, &output, x.view()).err(), cache::of_f32()];
    let said = errors.map(|error| match error {
        Some(Error::Cuda(single)) => Ok(single.to_string()),
        other => Err(format!("f32: {other:?}")),
    });
    Ok(said.into_iter().collect::<Result<Vec<_>, _>>()?.join("; "))
}
