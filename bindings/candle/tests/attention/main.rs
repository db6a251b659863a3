//! Tests of attention and its gradients. In f32, results are compared with candle's own operations. In every type, they
//! are compared with the crate `fa3` bit by bit, on the CPU and, with the feature `cuda`, on a GPU.

mod gpu;
mod reference;
mod refusals;
mod same_bits;
mod views;

use candle_core::{DType, Device, Result, Shape, Tensor};

fn random(dims: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Tensor> {
    Tensor::randn(0f32, 1., dims, &Device::Cpu)?.to_dtype(dtype)?.to_device(device)
}

/// The elements as f32, which holds them exactly.
fn bits(x: &Tensor) -> Result<Vec<f32>> {
    x.to_dtype(DType::F32)?.flatten_all()?.to_vec1()
}
