//! Latent attention over a cache that gets rows before.

use fa3::ndarray::{Array2, Array4, ArrayView4, Axis, concatenate};
use fa3::{Attention, CachedAttention, Device, KvCache, NewRows, Output, Scalar};
use fa3_ref::law::ForwardLaw;
use fa3_ref::{Inputs, Precision};
use fa3_types::KnownProblem;

use super::{in_f32, wave};
use crate::{Fallible, ensure};

/// Decoding over pages of so many rows, which get a row of each sequence before: the cache has the bits that the CPU
/// writes.
pub(super) fn cache<T: Scalar<Output = T> + Copy + PartialEq>(page_rows: usize) -> Fallible<String> {
    let device = &Device::gpu()?;
    let (used, pages) = ([140, 0, 63], 320 / page_rows);
    let [mut on_gpu, mut on_cpu] = [(); 2].map(|()| {
        let [k, v] = [(64, 0.9), (512, 1.1)].map(|(d, step)| wave::<T>((4 * pages, page_rows, 1, d), step));
        let page = |(i, page)| ((3 * page + i) * 7 % (4 * pages)) as i32;
        let mut cache = KvCache::paged(k, v, Array2::from_shape_fn((3, pages), page));
        cache.cache_seqlens = used.to_vec();
        cache
    });
    let [q, qv] = [(64, 0.7), (512, 1.3)].map(|(d, step)| wave::<T>((3, 1, 16, d), step));
    let [k, v] = [(64, 1.7), (512, 1.9)].map(|(d, step)| wave::<T>((3, 1, 1, d), step));
    let (call, new) = (CachedAttention::new(&q).qv(&qv).causal(), NewRows::new(&k, &v));
    let output = call.append_forward(device, &mut on_gpu, &new)?;
    call.append_forward(&Device::Cpu, &mut on_cpu, &new)?;
    ensure(on_gpu == on_cpu, "the caches differ")?;

    let table = on_gpu.page_table.as_ref().ok_or("it is in pages")?;
    let rows = on_gpu.cache_seqlens.iter().map(|&used| used as usize).max().unwrap_or(0);
    let gathered = |x: &Array4<T>| {
        Array4::from_shape_fn((3, rows, 1, x.len_of(Axis(3))), |(i, row, head, d)| {
            let page = table[[i, row / page_rows]] as usize;
            x[[page, row % page_rows, head, d]]
        })
    };
    let (k, v) = (gathered(&on_gpu.k), gathered(&on_gpu.v));
    let problem = Attention::new(&q, &k, &v).qv(&qv).seqused_k(&on_gpu.cache_seqlens).causal().problem()?;
    let worst = judge(&problem, [&q, &k, &v, &qv].map(|x| x.view()), output)?;
    Ok(format!("the law holds, with {:.0} % of its bound", 100.0 * worst))
}

/// The largest error of a call on Q, K, V and `qv`, as a part of the law's bound.
fn judge<T: Scalar, O: Scalar>(
    problem: &KnownProblem,
    tensors: [ArrayView4<'_, T>; 4],
    output: Output<O>,
) -> Fallible<f64> {
    let [q, k, v, qv] = tensors.map(|x| x.mapv(T::to_f32));
    let q = concatenate(Axis(3), &[qv.view(), q.view()])?;
    let k = concatenate(Axis(3), &[v.view(), k.view()])?;
    let joined = problem.joined();
    let inputs = Inputs::with_sink(&joined, [q.view(), k.view(), v.view()], None)?;
    let law = ForwardLaw::new(&inputs, Precision::of_output(T::DTYPE));
    let replay = "cargo test --release -p fa3-tests --test gpu facade::latent";
    let satisfied = law.check(&in_f32(output), replay)?;
    Ok(satisfied.iter().map(|part| part.ratio).fold(0.0, f64::max))
}
