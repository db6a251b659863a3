//! Compares results with the crate `fa3` bit by bit, in every type, so that no conversion or loss goes unnoticed.

use candle_core::{DType, Device, Result, Tensor, Var, WithDType};
use fa3::half::{bf16, f16};
use fa3::ndarray::{Array1, Array3, Array4, array};
use fa3::{CachedAttention, KvCache, OutputGradients, Scalar};
use fa3_candle::{Attention, Cached, Packed};

const Q: (usize, usize, usize, usize) = (2, 33, 4, 24);
const K: (usize, usize, usize, usize) = (2, 45, 2, 24);

fn wave<T: Scalar>(dims: (usize, usize, usize, usize), step: f32) -> Array4<T> {
    Array4::from_shape_fn(dims, |(b, s, h, d)| {
        T::from_f32((step * (11 * b + 7 * s + 3 * h + 5 * d) as f32).sin())
    })
}

/// A tensor with the elements of the array, in the array's order.
fn tensor<T: WithDType>(array: &Array4<T>, packed: bool, device: &Device) -> Result<Var> {
    let (batch, seqlen, heads, head_dim) = array.dim();
    let elements = array.iter().copied().collect::<Vec<T>>();
    let x = Tensor::from_vec(elements, (batch, seqlen, heads, head_dim), device)?;
    Var::from_tensor(&if packed { x.squeeze(0)? } else { x })
}

fn elements<T: WithDType>(x: &Tensor) -> Result<Vec<T>> {
    x.flatten_all()?.to_vec1()
}

/// Compares calls of dense tensors, of packed sequences and over a cache, without and with sinks. `same` is `fa3`'s
/// handle of the device `device`.
pub(crate) fn check<T: Scalar<Output = T> + WithDType>(device: &Device, same: &fa3::Device) -> Result<()> {
    for sink in [None, Some(array![0.3, -2., 0., 5.])] {
        check_call::<T>(false, sink.as_ref(), device, same)?;
        check_call::<T>(true, sink.as_ref(), device, same)?;
        check_cached::<T>(false, sink.as_ref(), device, same)?;
        check_cached::<T>(true, sink.as_ref(), device, same)?;
    }
    Ok(())
}

fn check_call<T: Scalar<Output = T> + WithDType>(
    packed: bool,
    sink: Option<&Array1<f32>>,
    device: &Device,
    same: &fa3::Device,
) -> Result<()> {
    let single = |(batch, rows, heads, head_dim)| {
        if packed { (1, batch * rows, heads, head_dim) } else { (batch, rows, heads, head_dim) }
    };
    let [q, k, v] = [wave::<T>(single(Q), 0.3), wave(single(K), 0.5), wave(single(K), 0.7)];
    let (dout, of_q, of_k) = (wave::<T>(single(Q), 0.9), [0, 20, 60], [0, 50, 90]);
    let (batch, rows, heads, _) = single(Q);
    let dlse = Array3::from_shape_fn((batch, heads, rows), |(b, h, s)| ((5 * b + 3 * h + s) as f32).cos());

    let call = fa3::Attention::new(&q, &k, &v).causal().softmax_scale(0.25).softcap(2.).deterministic();
    let call = if packed { call.packed(&of_q, &of_k) } else { call };
    let call = sink.into_iter().fold(call, |call, sink| call.sink(sink));
    let computed = call.forward(same).expect("the call is correct");
    // Gradients start from O, from LSE, and from both in one backward pass: gradients of two passes would be rounded
    // before they are added.
    let zeros = Array4::from_elem(dout.dim(), T::default());
    let backward = |gradients: OutputGradients<'_, T>| {
        call.backward(same, &computed, gradients).expect("the output is of this call")
    };
    let expected = [
        backward((&dout).into()),
        backward(OutputGradients::new(&zeros).dlse(&dlse)),
        backward(OutputGradients::new(&dout).dlse(&dlse)),
    ];

    let [q, k, v] = [tensor(&q, packed, device)?, tensor(&k, packed, device)?, tensor(&v, packed, device)?];
    let attention = Attention::new(0.25).causal().softcap(2.).deterministic();
    let sink = sink.map(|sink| Var::new(sink.to_vec(), device)).transpose()?;
    let attention = sink.as_deref().into_iter().fold(attention, Attention::sink);
    let (o, lse) = if packed {
        let list = |of: [i32; 3]| Tensor::new(&of, device);
        attention.forward_varlen_with_lse(&q, &k, &v, &Packed::new(&list(of_q)?, &list(of_k)?, 40, 50)?)?
    } else {
        attention.forward_with_lse(&q, &k, &v)?
    };
    assert!(elements::<T>(&o)? == computed.o.into_raw_vec_and_offset().0);
    assert!(elements::<f32>(&lse)? == computed.lse.into_raw_vec_and_offset().0);
    let dout = tensor(&dout, packed, device)?;
    let dlse = Tensor::from_vec(dlse.into_raw_vec_and_offset().0, lse.shape(), device)?;
    let of_o = (&o * dout.as_tensor())?.sum_all()?.to_dtype(DType::F32)?;
    let of_lse = (&lse * &dlse)?.sum_all()?;
    let both = (&of_o + &of_lse)?;
    for (phi, expected) in [of_o, of_lse, both].into_iter().zip(expected) {
        let gradients = phi.backward()?;
        for (x, expected) in [&q, &k, &v].into_iter().zip([expected.dq, expected.dk, expected.dv]) {
            let given = elements::<T>(gradients.get(x).expect("it has a gradient"))?;
            // Candle adds gradients to zeros: -0 becomes 0, which is equal.
            assert!(given == expected.into_raw_vec_and_offset().0);
        }
        if let (Some(sink), Some(expected)) = (&sink, expected.dsink) {
            let given = elements::<f32>(gradients.get(sink).expect("it has a gradient"))?;
            assert!(given == expected.to_vec());
        }
    }
    Ok(())
}

/// Compares a call over a cache: dense queries over a dense cache, or packed queries over pages.
fn check_cached<T: Scalar<Output = T> + WithDType>(
    paged: bool,
    sink: Option<&Array1<f32>>,
    device: &Device,
    same: &fa3::Device,
) -> Result<()> {
    // These lengths need no rounding as hints, so both plans have the same hint.
    let used = [40, 96];
    let (of_q, table) = ([0, 3, 5], array![[4, 0, 9], [2, 1, 3]]);
    let (q, cache) = if paged { ((1, 5, 4, 24), (5, 32, 2, 24)) } else { ((2, 3, 4, 24), (2, 100, 2, 24)) };
    let [q, k, v] = [wave::<T>(q, 0.3), wave(cache, 0.5), wave(cache, 0.7)];
    let mut held = if paged {
        KvCache::paged(k.clone(), v.clone(), table.clone())
    } else {
        KvCache::dense(k.clone(), v.clone())
    };
    held.cache_seqlens = used.to_vec();
    let call = CachedAttention::new(&q).window(Some(70), Some(0)).softmax_scale(0.25).softcap(2.);
    let call = if paged { call.cu_seqlens_q(&of_q) } else { call };
    let call = sink.into_iter().fold(call, |call, sink| call.sink(sink));
    let expected = call.forward(same, &held).expect("the call is correct");

    let [q, k, v] = [tensor(&q, paged, device)?, tensor(&k, false, device)?, tensor(&v, false, device)?];
    let mut cached = Cached::new(&Tensor::new(&used.map(|rows| rows as u32), device)?, 96)?;
    if paged {
        let table = Tensor::from_iter(table, device)?.reshape((2, 3))?;
        cached = cached.page_table(&table)?.packed_queries(&Tensor::new(&of_q, device)?, 3)?;
    }
    let sink = sink.map(|sink| Tensor::new(sink.to_vec(), device)).transpose()?;
    let attention = Attention::new(0.25).window(Some(70), Some(0)).softcap(2.);
    let attention = sink.iter().fold(attention, Attention::sink);
    let (o, lse) = attention.forward_cached_with_lse(&q, &k, &v, &cached)?;
    assert!(elements::<T>(&o)? == expected.o.into_raw_vec_and_offset().0);
    assert!(elements::<f32>(&lse)? == expected.lse.into_raw_vec_and_offset().0);
    assert!(elements::<T>(&attention.forward_cached(&q, &k, &v, &cached)?)? == elements::<T>(&o)?);
    Ok(())
}

#[test]
fn of_f16() -> Result<()> {
    check::<f16>(&Device::Cpu, &fa3::Device::Cpu)
}

#[test]
fn of_bf16() -> Result<()> {
    check::<bf16>(&Device::Cpu, &fa3::Device::Cpu)
}

#[test]
fn of_f32() -> Result<()> {
    check::<f32>(&Device::Cpu, &fa3::Device::Cpu)
}
