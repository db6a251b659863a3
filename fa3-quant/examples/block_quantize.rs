//! FP8 attention with block scales and incoherent processing:
//! `cargo run --release -p fa3-quant --example block_quantize`.

use std::error::Error;

use fa3_quant::ndarray::{Array2, Array4, ArrayView2, Axis};
use fa3_quant::{Fp8Attention, Granularity, Incoherent, Preparation};
use fa3_types::{Dtype, ProblemSpec, Shape};

fn main() -> Result<(), Box<dyn Error>> {
    let shape = Shape { batch: 1, seqlen: 1024, heads: 1, head_dim: 64 };
    let problem = ProblemSpec::dense(Dtype::E4m3, shape, shape).known()?;
    let [q, k, v] = [(10.0, 1), (10.0, 2), (1.0, 3)].map(|(size, seed)| random(shape, size, seed));
    let exact = attention(&q, &k, &v);

    let transform = Incoherent::new(64, 1);
    let blocks = Preparation::new(Granularity::Block { rows: 128 });
    for (name, qk) in [
        ("a scale a tensor", Preparation::new(Granularity::Tensor)),
        ("a scale each 128 rows", blocks),
        ("and incoherent processing", blocks.incoherent(&transform)),
    ] {
        // Q and K get the same transform, which cancels in Q Kᵀ.
        let (q8, k8) = (qk.quantize(q.view(), problem.rows_q())?, qk.quantize(k.view(), problem.rows_k())?);
        let v8 = blocks.quantize(v.view(), problem.rows_k())?;
        let o = Fp8Attention::default().forward(&problem, &q8, &k8, &v8)?.o;
        let error = (&head(&o) - &exact).mapv(|x| x * x).mean().unwrap_or(0.0).sqrt();
        println!("{name:26} {} scales of Q, O errs by {error:.5}", q8.scales().values().len());
    }
    Ok(())
}

/// Numbers from -1 to 1; one in a thousand is multiplied by `size`.
fn random(shape: Shape, size: f32, seed: u32) -> Array4<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    Array4::from_shape_simple_fn(shape.dims(), || if next() > 0.998 { size * next() } else { next() })
}

/// O of the only head in f32.
fn attention(q: &Array4<f32>, k: &Array4<f32>, v: &Array4<f32>) -> Array2<f32> {
    let p = (head(q).dot(&head(k).t()) / 8.0).mapv(f32::exp);
    let sums = p.sum_axis(Axis(1)).insert_axis(Axis(1));
    p.dot(&head(v)) / sums
}

fn head(x: &Array4<f32>) -> ArrayView2<'_, f32> {
    x.view().index_axis_move(Axis(0), 0).index_axis_move(Axis(1), 0)
}
