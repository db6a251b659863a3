//! Attention over candle's tensors on the CPU, which the crate `fa3` computes where they lie.

use candle_core::{CpuStorage, Layout, Result, Storage, Tensor, WithDType};
use fa3::half::{bf16, f16};
use fa3::ndarray::{Array3, ArrayView3, ArrayView4, ShapeBuilder};
use fa3::problem::{BackwardSpec, Dtype, ProblemSpec, TensorDesc, TensorName};
use fa3::{Attention, Device, Output, OutputGradients, Scalar};

use crate::Packed;
use crate::call::{Call, desc};
use crate::error::Error;
use crate::op::Gradients;

/// Computes O and LSE.
///
/// # Errors
/// The call makes no sense.
pub(crate) fn forward(
    call: &Call,
    packed: Option<&Packed>,
    inputs: [(&CpuStorage, &Layout); 3],
) -> Result<(CpuStorage, CpuStorage)> {
    let spec = call.clone().contiguous().spec();
    spec.clone().validate().map_err(Error::from)?;
    match call.dtype() {
        Dtype::F32 => forward_of::<f32>(&spec, packed, inputs),
        Dtype::F16 => forward_of::<f16>(&spec, packed, inputs),
        Dtype::Bf16 => forward_of::<bf16>(&spec, packed, inputs),
        Dtype::E4m3 => unreachable!("no type of candle is taken for e4m3"),
    }
}

fn forward_of<T: Scalar<Output = T> + WithDType>(
    spec: &ProblemSpec,
    packed: Option<&Packed>,
    inputs: [(&CpuStorage, &Layout); 3],
) -> Result<(CpuStorage, CpuStorage)> {
    let [q, k, v] = inputs.map(|(storage, layout)| view::<T>(storage, layout));
    let lists = packed.map(Packed::read).transpose()?;
    let attention = attention(spec, [q?, k?, v?], lists.as_ref())?;
    let output = attention.forward(&Device::Cpu).map_err(Error::from)?;
    let (o, _) = output.o.into_raw_vec_and_offset();
    let (lse, _) = output.lse.into_raw_vec_and_offset();
    Ok((T::to_cpu_storage_owned(o), CpuStorage::F32(lse)))
}

/// Computes dQ, dK and dV.
///
/// # Errors
/// The call makes no sense, or O or a gradient is of another one.
pub(crate) fn backward(given: &Gradients<'_>) -> Result<[Tensor; 3]> {
    let mut spec = BackwardSpec::contiguous(given.call.clone().contiguous().spec());
    let dout = desc(TensorName::DOut, (given.dout.dtype(), given.dout.layout()), given.packed.is_some())?;
    spec.dout = TensorDesc::contiguous(dout.dtype, dout.shape);
    spec.clone().validate().map_err(Error::from)?;
    match given.call.dtype() {
        Dtype::F32 => backward_of::<f32>(&spec, given),
        Dtype::F16 => backward_of::<f16>(&spec, given),
        Dtype::Bf16 => backward_of::<bf16>(&spec, given),
        Dtype::E4m3 => unreachable!("no type of candle is taken for e4m3"),
    }
}

fn backward_of<T: Scalar<Output = T> + WithDType>(
    spec: &BackwardSpec,
    given: &Gradients<'_>,
) -> Result<[Tensor; 3]> {
    let [q, k, v] = given.inputs;
    let tensors = [q, k, v, given.o, given.dout].map(Tensor::storage_and_layout);
    let [q, k, v, o, dout] = tensors.each_ref().map(|(storage, layout)| match &**storage {
        Storage::Cpu(storage) => view::<T>(storage, layout),
        Storage::Cuda(_) | Storage::Metal(_) => {
            Err(Error::Device { given: storage.device().location() }.into())
        }
    });
    // (batch, heads, seqlen) of dense tensors, (heads, total) of packed ones, whose batch is 1.
    let q_shape = spec.forward.q.shape;
    let of_lse = [q_shape.batch, q_shape.heads, q_shape.seqlen];
    let lse = Array3::from_shape_vec(of_lse, given.lse.flatten_all()?.to_vec1()?).expect("one a row");
    let output = Output::new(o?.to_owned(), lse);
    let dlse = given.dlse.map(|dlse| dlse.flatten_all()?.to_vec1::<f32>()).transpose()?;
    let mut gradients = OutputGradients::new(dout?);
    if let Some(dlse) = &dlse {
        gradients = gradients.dlse(ArrayView3::from_shape(of_lse, dlse).expect("one a row"));
    }
    let lists = given.packed.map(Packed::read).transpose()?;
    let attention = attention(&spec.forward, [q?, k?, v?], lists.as_ref())?;
    let computed = attention.backward(&Device::Cpu, &output, gradients).map_err(Error::from)?;
    let [dq, dk, dv] = [computed.dq, computed.dk, computed.dv].map(|x| x.into_raw_vec_and_offset().0);
    let [of_q, of_k, of_v] = given.call.input_shapes();
    let tensor = |elements: Vec<T>, shape| Tensor::from_vec(elements, shape, &candle_core::Device::Cpu);
    Ok([tensor(dq, of_q)?, tensor(dk, of_k)?, tensor(dv, of_v)?])
}

/// The call as `fa3` has it.
fn attention<'a, T: Scalar>(
    spec: &ProblemSpec,
    [q, k, v]: [ArrayView4<'a, T>; 3],
    lists: Option<&'a [Vec<i32>; 2]>,
) -> Result<Attention<'a, T>> {
    let mut attention = Attention::new(q, k, v).mask(spec.mask.clone().map_err(Error::from)?);
    if let Some(scale) = spec.softmax_scale {
        attention = attention.softmax_scale(scale);
    }
    if let Some(cap) = spec.softcap {
        attention = attention.softcap(cap);
    }
    Ok(match lists {
        Some([of_q, of_k]) => attention.packed(of_q, of_k),
        None => attention,
    })
}

/// The elements of a tensor where they lie: (batch, seqlen, heads, head_dim), or (total, heads, head_dim) as one batch.
///
/// # Errors
/// A tensor of another type.
fn view<'a, T: WithDType>(storage: &'a CpuStorage, layout: &Layout) -> Result<ArrayView4<'a, T>> {
    let mut dims = [1; 4];
    let mut strides = [0; 4];
    let first = dims.len() - layout.dims().len();
    dims[first..].copy_from_slice(layout.dims());
    strides[first..].copy_from_slice(layout.stride());
    let elements = storage.as_slice::<T>()?;
    if dims.contains(&0) {
        return Ok(ArrayView4::from_shape(dims, &[]).expect("there are no elements"));
    }
    let elements = &elements[layout.start_offset()..];
    Ok(ArrayView4::from_shape(dims.strides(strides), elements).expect("a tensor lies in its storage"))
}
