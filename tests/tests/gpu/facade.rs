//! Attention on arrays, on the first Hopper GPU beside the CPU. Each result is held to the error law.

mod backward;
mod cache;
mod latent;

use std::sync::LazyLock;

use fa3::half::{bf16, f16};
use fa3::ndarray::{Array4, ArrayView1, ArrayView4, Axis};
use fa3::{Attention, Combine, Device, Error, Output, Rope, RopeStyle, Scalar};
use fa3_ref::law::ForwardLaw;
use fa3_ref::{Forward, Inputs, Precision};
use fa3_types::Problem;

use crate::{Check, Fallible};
use cache::Layout;

/// Shapes of a call: batch, (seqlen_q, seqlen_k), (heads_q, heads_kv), (head_dim, head_dim_v).
type Sizes = (usize, (usize, usize), (usize, usize), (usize, usize));

pub(crate) const CHECKS: [(&str, Check); 53] = [
    ("facade::bf16", |_| law::<bf16>((2, (300, 300), (2, 2), (64, 64)), |attention| attention)),
    ("facade::f16", |_| law::<f16>((2, (300, 300), (2, 2), (64, 64)), |attention| attention)),
    ("facade::causal_grouped_heads", |_| law((1, (200, 513), (6, 2), (128, 128)), causal)),
    ("facade::window_softcap", |_| law((1, (257, 300), (2, 1), (96, 96)), windowed)),
    ("facade::fewer_columns_in_v", |_| law((1, (130, 260), (1, 1), (192, 128)), causal)),
    ("facade::rows_without_keys", |_| law((1, (300, 100), (1, 1), (72, 72)), causal)),
    ("facade::no_keys", |_| law((1, (300, 0), (1, 1), (64, 64)), causal)),
    ("facade::fp8_bf16", |_| fp8::<bf16>((2, (300, 300), (4, 2), (64, 64)))),
    ("facade::fp8_f16", |_| fp8::<f16>((1, (257, 513), (2, 1), (128, 256)))),
    ("facade::fp8_positions", |_| fp8_positions()),
    ("facade::padded_rows", |_| law((2, (130, 200), (2, 1), (33, 100)), causal)),
    ("facade::padded_rows_of_few_columns", |_| law((1, (70, 90), (2, 2), (1, 255)), windowed)),
    ("facade::packed", |_| law::<bf16>((1, (700, 900), (4, 2), (128, 128)), packed)),
    ("facade::packed_padded_rows", |_| law::<f16>((1, (700, 900), (2, 1), (33, 100)), packed)),
    ("facade::packed_in_part", |_| {
        law::<f16>((1, (700, 900), (3, 1), (64, 96)), |x| windowed(packed(x)).seqused_k(&[5, 100, 0, 0, 333]))
    }),
    ("facade::used_in_part", |_| {
        law::<bf16>((3, (130, 200), (2, 1), (256, 256)), |x| {
            x.seqused_q(&[130, 0, 77]).seqused_k(&[9, 4, 200])
        })
    }),
    ("facade::sink", |_| law::<bf16>((2, (300, 300), (4, 2), (64, 64)), |x| sinks(x).causal())),
    ("facade::sink_of_rows_without_keys", |_| {
        law::<f16>((1, (300, 100), (4, 1), (72, 72)), |x| sinks(x).causal())
    }),
    ("facade::packed_sink", |_| law::<bf16>((1, (700, 900), (4, 2), (128, 128)), |x| packed(sinks(x)))),
    ("facade::intervals", |_| law((2, (300, 300), (4, 2), (128, 128)), intervals)),
    ("facade::backward_intervals", |_| backward::law((2, (300, 300), (4, 2), (64, 64)), intervals)),
    ("facade::transposed_view", |_| transposed()),
    ("facade::refusals", |_| refused()),
    ("facade::combine", |_| combined()),
    ("facade::backward_bf16", |_| {
        backward::law::<bf16>((2, (300, 300), (2, 2), (64, 64)), |attention| attention)
    }),
    ("facade::backward_causal_grouped_heads", |_| backward::law((1, (200, 513), (6, 2), (128, 128)), causal)),
    ("facade::backward_window_softcap", |_| backward::law((2, (257, 300), (2, 1), (96, 96)), windowed)),
    ("facade::backward_fewer_columns_in_v", |_| backward::law((1, (130, 260), (1, 1), (192, 128)), causal)),
    ("facade::backward_many_keys", |_| {
        backward::law::<f16>((1, (150, 1300), (2, 1), (64, 64)), |attention| attention)
    }),
    ("facade::backward_padded_rows", |_| backward::law((2, (130, 200), (2, 1), (33, 100)), causal)),
    ("facade::backward_padded_wide_rows", |_| backward::law((1, (70, 90), (2, 2), (7, 255)), windowed)),
    ("facade::backward_sink", |_| {
        backward::law::<bf16>((2, (300, 250), (4, 2), (64, 64)), |attention| sinks(attention).causal())
    }),
    ("facade::backward_packed_sink", |_| {
        backward::law::<bf16>((1, (700, 900), (4, 2), (64, 64)), |x| packed(sinks(x)))
    }),
    ("facade::backward_packed", |_| backward::law::<bf16>((1, (700, 900), (4, 2), (128, 128)), packed)),
    ("facade::backward_packed_padded_rows", |_| {
        backward::law::<f16>((1, (700, 900), (2, 1), (33, 100)), packed)
    }),
    ("facade::backward_packed_in_part", |_| {
        backward::law::<f16>((1, (700, 900), (3, 1), (64, 96)), |x| {
            windowed(packed(x)).seqused_k(&[5, 100, 0, 0, 333])
        })
    }),
    ("facade::backward_used_in_part", |_| {
        backward::law::<bf16>((3, (130, 200), (2, 1), (256, 256)), |x| {
            x.seqused_q(&[130, 0, 77]).seqused_k(&[9, 4, 200])
        })
    }),
    ("facade::backward_deterministic", backward::deterministic),
    ("facade::backward_refusals", |_| backward::refused()),
    ("facade::cache_dense", |_| cache::law::<bf16>(Layout::Dense, 128)),
    ("facade::cache_indexed", |_| cache::law::<f16>(Layout::Indexed, 64)),
    ("facade::cache_left_padded", |_| cache::law::<bf16>(Layout::LeftPadded, 64)),
    ("facade::cache_in_pages", |_| cache::law::<bf16>(Layout::Pages(64), 128)),
    ("facade::cache_in_small_pages", |_| cache::law::<f16>(Layout::Pages(8), 64)),
    ("facade::cache_of_wide_heads", |_| cache::law::<bf16>(Layout::Pages(16), 256)),
    ("facade::cache_packed", |_| cache::packed()),
    ("facade::cache_refusals", |_| cache::refused()),
    ("facade::latent", |_| latent::law::<bf16>((2, (130, 300), (4, 2), (64, 512)), |x| x)),
    ("facade::latent_padded_rows", |_| latent::law((1, (70, 200), (3, 1), (33, 250)), windowed)),
    ("facade::latent_sink", |_| {
        latent::law::<f16>((1, (200, 300), (4, 1), (64, 256)), |x| sinks(x).causal())
    }),
    ("facade::latent_packed", |_| latent::law::<bf16>((1, (700, 900), (4, 1), (64, 512)), packed)),
    ("facade::latent_cache", |_| latent::cache::<bf16>(64)),
    ("facade::latent_cache_in_small_pages", |_| latent::cache::<f16>(1)),
];

fn causal(attention: Attention<'_, bf16>) -> Attention<'_, bf16> {
    attention.causal()
}

/// Sinks below, among and above the scores, and none.
static SINKS: [f32; 4] = [-9.0, 0.5, f32::NEG_INFINITY, 9.0];

fn sinks<T: Scalar>(attention: Attention<'_, T>) -> Attention<'_, T> {
    attention.sink(&SINKS)
}

/// The sinks of a problem, if it has some.
fn sinks_of(problem: &Problem) -> Option<ArrayView1<'static, f32>> {
    problem.has_sink().then(|| ArrayView1::from(&SINKS))
}

/// The first 4 keys and the last 70 of 300 rows.
fn intervals(attention: Attention<'_, bf16>) -> Attention<'_, bf16> {
    static BOUNDS: LazyLock<Array4<i32>> = LazyLock::new(|| {
        Array4::from_shape_fn((1, 1, 300, 4), |(_, _, row, bound)| {
            [0, 4, row as i32 - 69, row as i32 + 1][bound]
        })
    });
    attention.intervals(&*BOUNDS)
}

fn windowed(attention: Attention<'_, f16>) -> Attention<'_, f16> {
    attention.window(Some(70), Some(3)).softcap(8.0)
}

/// Sequences of many lengths, and rows behind them.
fn packed<T: Scalar>(attention: Attention<'_, T>) -> Attention<'_, T> {
    attention.packed(&[0, 7, 260, 260, 300, 690], &[0, 5, 105, 400, 400, 880]).causal()
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

/// Holds the GPU to the error law, and says how far it is from the CPU.
fn law<T: Scalar>(sizes: Sizes, with: impl Fn(Attention<'_, T>) -> Attention<'_, T>) -> Fallible<String> {
    let device = &Device::gpu()?;
    let [q, k, v] = inputs::<T>(sizes);
    let attention = with(Attention::new(q.view(), k.view(), v.view()));
    let (gpu, cpu) = (in_f32(attention.forward(device)?), in_f32(attention.forward(&Device::Cpu)?));

    // The law takes numbers in f32, which hold those in 16 bits exactly.
    let [q, k, v] = [&q, &k, &v].map(|x| x.mapv(T::to_f32));
    let [q, k, v]: [ArrayView4<'_, f32>; 3] = [q.view(), k.view(), v.view()];
    let problem = attention.problem()?;
    let inputs = Inputs::with_sink(&problem, [q, k, v], sinks_of(&problem))?;
    let law = ForwardLaw::new(&inputs, Precision::of_output(T::DTYPE));
    law.check(&gpu, "cargo test --release -p fa3-tests --test gpu facade::")?;
    let difference = gpu.o.iter().zip(&cpu.o).map(|(gpu, cpu)| (gpu - cpu).abs()).fold(0.0, f32::max);
    Ok(format!("the law holds, and O is within {difference:.1e} of the cpu's"))
}

/// In 8 bits the GPU has the emulator's codes, and an error like its.
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

/// Rows whose positions are listed have the bits of rows at the same positions from a first one on.
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

/// With heads outside rows it is the same problem.
fn transposed() -> Fallible<String> {
    let device = &Device::gpu()?;
    let heads_first = wave::<bf16>((2, 3, 200, 64), 0.7);
    let view = || heads_first.view().permuted_axes([0, 2, 1, 3]);
    let rows_first = view().as_standard_layout().into_owned();
    let given = Attention::new(view(), view(), view()).forward(device)?;
    let copied = Attention::new(rows_first.view(), rows_first.view(), rows_first.view()).forward(device)?;
    if given == copied { Ok("the same bits".to_owned()) } else { Err("another result".into()) }
}

/// A problem that the kernels do not take is an error, and is not computed on the CPU instead.
/// Attention over all keys is what its parts are merged to.
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

fn refused() -> Fallible<String> {
    let device = &Device::gpu()?;
    let x = Array4::<f32>::zeros((1, 8, 1, 64));
    match Attention::new(x.view(), x.view(), x.view()).forward(device).err() {
        Some(Error::Cuda(single)) => Ok(single.to_string()),
        other => Err(format!("f32: {other:?}").into()),
    }
}
