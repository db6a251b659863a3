//! On a GPU, beside the CPU, which takes the same tensors: without one, or without the feature `cuda`, it says so.

use candle_core::{DType, Device, Result, Tensor, Var};
use fa3_candle::{Attention, Packed};

/// The first GPU.
fn gpu() -> Option<Device> {
    let device = if cfg!(feature = "cuda") { Device::new_cuda(0).ok() } else { None };
    if device.is_none() {
        println!("skipped: no gpu, or no feature `cuda`");
    }
    device
}

fn random(dims: &[usize], dtype: DType) -> Result<Tensor> {
    Tensor::randn(0f32, 1., dims, &Device::Cpu)?.to_dtype(dtype)
}

/// O, LSE, dQ, dK and dV of two numbers that depend on O and LSE, in f32 on the CPU.
fn compute(attention: &Attention, tensors: [&Tensor; 3], lists: Option<[&Tensor; 2]>) -> Result<Vec<Tensor>> {
    let [q, k, v] = tensors.map(Var::from_tensor);
    let (q, k, v) = (q?, k?, v?);
    let (o, lse) = match lists {
        Some([of_q, of_k]) => {
            attention.forward_varlen_with_lse(&q, &k, &v, &Packed::new(of_q, of_k, 300, 300)?)?
        }
        None => attention.forward_with_lse(&q, &k, &v)?,
    };
    let wide = o.to_dtype(DType::F32)?;
    let phi = (wide.sqr()?.sum_all()? + lse.sin()?.sum_all()?)?;
    let gradients = phi.backward()?;
    let gradients = [&q, &k, &v].map(|x| gradients.get(x).expect("it has a gradient").clone());
    let all = [o, lse].into_iter().chain(gradients);
    all.map(|x| x.detach().to_dtype(DType::F32)?.to_device(&Device::Cpu)).collect()
}

/// Compares a GPU with the CPU engine. Both round O and gradients to 16 bits, from sums in another order, and the GPU
/// rounds P and dS to 16 bits as well: errors of some units in the last place of the largest number.
fn check(
    device: &Device,
    attention: &Attention,
    tensors: [&Tensor; 3],
    lists: Option<[&Tensor; 2]>,
) -> Result<()> {
    let unit = if tensors[0].dtype() == DType::F16 { 2f32.powi(-11) } else { 2f32.powi(-8) };
    let expected = compute(attention, tensors, lists)?;
    let [q, k, v] = tensors.map(|x| x.to_device(device));
    let moved = lists.map(|lists| lists.map(|x| x.to_device(device).expect("a list fits")));
    let given = compute(attention, [&q?, &k?, &v?], moved.as_ref().map(|[q, k]| [q, k]))?;
    for ((name, given), expected) in ["o", "lse", "dq", "dk", "dv"].into_iter().zip(given).zip(expected) {
        assert_eq!(given.dims(), expected.dims(), "{name}");
        let (given, expected) = (given.flatten_all()?.to_vec1::<f32>()?, expected.flatten_all()?.to_vec1()?);
        let largest =
            expected.iter().copied().filter(|x: &f32| x.is_finite()).fold(0., |a: f32, x| a.max(x.abs()));
        for (given, expected) in given.into_iter().zip(expected) {
            let near = (given - expected).abs() <= 8. * unit * largest;
            assert!(near || given == expected, "{name}: {given}, expected {expected} of up to {largest}");
        }
    }
    Ok(())
}

#[test]
fn dense_tensors() -> Result<()> {
    let Some(device) = gpu() else { return Ok(()) };
    for dtype in [DType::F16, DType::BF16] {
        for (heads_kv, head_dim) in [(4, 64), (2, 128), (1, 256)] {
            let q = random(&[2, 150, 4, head_dim], dtype)?;
            let [k, v] = [
                random(&[2, 300, heads_kv, head_dim], dtype)?,
                random(&[2, 300, heads_kv, head_dim], dtype)?,
            ];
            let plain = Attention::new(0.125);
            let capped = plain.clone().causal().softcap(5.).deterministic();
            let window = plain.clone().window(Some(40), Some(10));
            for attention in [plain.clone(), plain.causal(), window, capped] {
                check(&device, &attention, [&q, &k, &v], None)?;
            }
        }
    }
    Ok(())
}

#[test]
fn packed_sequences() -> Result<()> {
    let Some(device) = gpu() else { return Ok(()) };
    let list = |of: &[u32]| Tensor::new(of, &Device::Cpu);
    let (of_q, of_k) = (list(&[0, 100, 100, 350])?, list(&[0, 30, 330, 600])?.to_dtype(DType::I32)?);
    let q = random(&[360, 4, 64], DType::BF16)?;
    let [k, v] = [random(&[600, 2, 64], DType::BF16)?, random(&[600, 2, 64], DType::BF16)?];
    for attention in [Attention::new(0.125), Attention::new(0.125).causal()] {
        check(&device, &attention, [&q, &k, &v], Some([&of_q, &of_k]))?;
    }
    Ok(())
}

/// Views that kernels read where they lie, and one that is copied before.
#[test]
fn views() -> Result<()> {
    let Some(device) = gpu() else { return Ok(()) };
    let whole = random(&[2, 200, 3, 4, 72], DType::F16)?.to_device(&device)?;
    let part = |index, column: usize| whole.narrow(2, index, 1)?.squeeze(2)?.narrow(3, column, 64);
    let attention = Attention::new(0.125).causal();
    for column in [8, 3] {
        let [q, k, v] = [part(0, column)?, part(1, column)?, part(2, column)?];
        let given = attention.forward(&q, &k, &v)?;
        let copies =
            attention.forward(&q.force_contiguous()?, &k.force_contiguous()?, &v.force_contiguous()?)?;
        let bits = |x: Tensor| x.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
        assert!(bits(given)? == bits(copies)?);
    }
    Ok(())
}

#[test]
fn what_no_kernel_computes_is_refused() -> Result<()> {
    let Some(device) = gpu() else { return Ok(()) };
    let refused = |dtype, head_dim: usize| {
        let x = random(&[1, 10, 2, head_dim], dtype)?.to_device(&device)?;
        Ok::<_, candle_core::Error>(Attention::new(0.125).forward(&x, &x, &x).unwrap_err().to_string())
    };
    assert!(refused(DType::F32, 64)?.contains("f32"));
    assert!(refused(DType::F16, 60)?.contains("head_dim 60"));
    let x = random(&[10, 2, 64], DType::F16)?.to_device(&device)?;
    let list = Tensor::new(&[0u32, 10], &Device::Cpu)?;
    let packed = Packed::new(&list, &list, 10, 10)?;
    let error = Attention::new(0.125).forward_varlen(&x, &x, &x, &packed).unwrap_err().to_string();
    assert!(error.starts_with("cu_seqlens_q is on Cpu, and q is on Cuda { gpu_id: 0 }"), "{error}");
    Ok(())
}
