//! Tests on a GPU. Without a GPU, or without the feature `cuda`, they print that they are skipped.

use candle_core::{DType, Device, Result, Tensor};
use fa3_candle::{Attention, Cached, Packed, flash_attn_varlen_paged_windowed};

use crate::{bits, random};

/// The first GPU.
fn gpu() -> Option<Device> {
    let device = if cfg!(feature = "cuda") { Device::new_cuda(0).ok() } else { None };
    if device.is_none() {
        println!("skipped: no gpu, or no feature `cuda`");
    }
    device
}

/// Compares results with the crate `fa3`, whose kernels have their own tests.
#[cfg(feature = "cuda")]
#[test]
fn results_are_the_same_bits_as_those_of_fa3() -> Result<()> {
    use fa3::half::{bf16, f16};

    let Some(device) = gpu() else { return Ok(()) };
    let same = fa3::Device::Cuda(fa3::cuda::Device::open(0).map_err(candle_core::Error::wrap)?);
    crate::same_bits::check::<f16>(&device, &same)?;
    crate::same_bits::check::<bf16>(&device, &same)
}

#[test]
fn views() -> Result<()> {
    gpu().map_or(Ok(()), |device| crate::views::check_all(&device))
}

/// The GPU computes the lengths of sequences in pages if the list is u32. If it is i32, the host does.
#[test]
fn pages() -> Result<()> {
    let Some(device) = gpu() else { return Ok(()) };
    let pool = || random((6, 16, 2, 64), DType::BF16, &device);
    let (q, k, v) = (random((5, 4, 64), DType::BF16, &device)?, pool()?, pool()?);
    let (of_q, table) = (Tensor::new(&[0u32, 3, 5], &device)?, Tensor::new(&[[3u32, 1], [5, 0]], &device)?);
    let cached = Cached::new(&Tensor::new(&[20u32, 25], &device)?, 25)?;
    let cached = cached.page_table(&table)?.packed_queries(&of_q, 3)?;
    let expected = bits(&Attention::new(0.125).causal().forward_cached(&q, &k, &v, &cached)?)?;
    assert!(expected.iter().any(|&x| x != 0.));
    let right = Some(0);
    for dtype in [DType::U32, DType::I32] {
        let of_k = Tensor::new(&[0u32, 20, 45], &Device::Cpu)?.to_dtype(dtype)?.to_device(&device)?;
        let o = flash_attn_varlen_paged_windowed(
            &q, &k, &v, &of_q, &of_k, &table, None, 3, 25, 0.125, None, right, 16, None,
        )?;
        assert!(bits(&o)? == expected, "{dtype:?}");
    }
    Ok(())
}

/// Each call reads the rows that candle has written to the cache before the call, on candle's stream.
#[test]
fn decoding() -> Result<()> {
    let Some(device) = gpu() else { return Ok(()) };
    let on_cpu = |heads| random((2, 40, heads, 64), DType::F16, &Device::Cpu);
    let (q, k, v) = (on_cpu(8)?, on_cpu(2)?, on_cpu(2)?);
    let attention = Attention::new(0.125).causal();
    let expected = attention.forward(&q, &k, &v)?;
    let cache = || Tensor::zeros((2, 64, 2, 64), DType::F16, &device);
    let (k_cache, v_cache) = (cache()?, cache()?);
    for row in 0..40 {
        let token = |x: &Tensor| x.narrow(1, row, 1)?.contiguous()?.to_device(&device);
        k_cache.slice_set(&token(&k)?, 1, row)?;
        v_cache.slice_set(&token(&v)?, 1, row)?;
        let cached = Cached::new(&Tensor::new(&[row as u32 + 1; 2], &device)?, row + 1)?;
        let o = attention.forward_cached(&token(&q)?, &k_cache, &v_cache, &cached)?;
        let (given, expected) = (bits(&o)?, bits(&expected.narrow(1, row, 1)?)?);
        // O of f16 is rounded on both devices, and so is P.
        let is_near =
            |(given, expected): (&f32, &f32)| (given - expected).abs() <= 4e-3 * expected.abs().max(1.);
        assert!(given.iter().zip(&expected).all(is_near), "row {row}");
    }
    Ok(())
}

#[test]
fn what_no_kernel_computes_is_refused() -> Result<()> {
    let Some(device) = gpu() else { return Ok(()) };
    let refused = |dtype, head_dim: usize| {
        let x = random((1, 10, 2, head_dim), dtype, &device)?;
        Ok::<_, candle_core::Error>(Attention::new(0.125).forward(&x, &x, &x).unwrap_err().to_string())
    };
    assert!(refused(DType::F32, 64)?.contains("f32"));
    assert!(refused(DType::F16, 60)?.contains("head_dim 60"));
    let x = random((10, 2, 64), DType::F16, &device)?;
    let list = Tensor::new(&[0u32, 10], &Device::Cpu)?;
    let packed = Packed::new(&list, &list, 10, 10)?;
    let error = Attention::new(0.125).forward_varlen(&x, &x, &x, &packed).unwrap_err().to_string();
    assert!(error.starts_with("cu_seqlens_q is on Cpu, and q is on Cuda { gpu_id: 0 }"), "{error}");
    let attention = Attention::new(0.125).sink(&Tensor::zeros(2, DType::F32, &Device::Cpu)?);
    let x = random((1, 10, 2, 64), DType::F16, &device)?;
    let error = attention.forward(&x, &x, &x).unwrap_err().to_string();
    assert!(error.starts_with("sink is on Cpu, and q is on Cuda { gpu_id: 0 }"), "{error}");
    Ok(())
}
