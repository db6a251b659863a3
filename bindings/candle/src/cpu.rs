//! Attention over candle's tensors on the CPU, by the crate `fa3`, without copies.

use candle_core::{CpuStorage, Layout, Result, Storage, Tensor, WithDType};
use fa3::half::{bf16, f16};
use fa3::ndarray::{Array1, Array3, ArrayView3, ArrayView4, ShapeBuilder};
use fa3::problem::{BackwardSpec, Dtype, Problem, TensorDesc, TensorName};
use fa3::{Attention, CacheView, CachedAttention, Device, Output, OutputGradients, Scalar};

use crate::call::{Call, desc};
use crate::error::Error;
use crate::pass::{Gradients, Pass};
use crate::rows::Numbers;

/// Computes O and LSE.
///
/// # Errors
/// A tensor, a list or a number is invalid.
pub(crate) fn forward(
    pass: &Pass,
    call: &Call,
    inputs: [(&CpuStorage, &Layout); 3],
) -> Result<(CpuStorage, CpuStorage)> {
    let problem = call.clone().contiguous().spec().validate().map_err(Error::from)?;
    match call.dtype() {
        Dtype::F32 => forward_of::<f32>(pass, &problem, inputs),
        Dtype::F16 => forward_of::<f16>(pass, &problem, inputs),
        Dtype::Bf16 => forward_of::<bf16>(pass, &problem, inputs),
        Dtype::E4m3 | Dtype::Int8 => unreachable!("no type of candle is taken for 8 bits"),
    }
}

fn forward_of<T: Scalar<Output = T> + WithDType>(
    pass: &Pass,
    problem: &Problem,
    inputs: [(&CpuStorage, &Layout); 3],
) -> Result<(CpuStorage, CpuStorage)> {
    let [q, k, v] = inputs.map(|(storage, layout)| view::<T>(storage, layout));
    let (q, k, v, numbers, sink) = (q?, k?, v?, pass.rows.read()?, sink(pass)?);
    let output = match &numbers.seqused_k {
        Some(used) => {
            let cache = CacheView {
                k,
                v,
                cache_seqlens: used,
                page_table: numbers.page_table.as_ref().map(|table| table.view()),
                cache_batch_idx: None,
                cache_leftpad: None,
            };
            let attention = CachedAttention::new(q).for_problem(problem);
            let attention = sink.iter().fold(attention, |attention, sink| attention.sink(sink));
            let ends = numbers.cu_seqlens_q.iter();
            ends.fold(attention, |attention, ends| attention.cu_seqlens_q(ends)).forward(&Device::Cpu, cache)
        }
        None => attention(problem, [q, k, v], &numbers, sink.as_ref()).forward(&Device::Cpu),
    };
    let output = output.map_err(Error::from)?;
    let (o, _) = output.o.into_raw_vec_and_offset();
    let (lse, _) = output.lse.into_raw_vec_and_offset();
    Ok((T::to_cpu_storage_owned(o), CpuStorage::F32(lse)))
}

/// Computes dQ, dK and dV, and dsink if there are sinks.
///
/// # Errors
/// The errors of [`forward`]; or O or a gradient belongs to another call.
pub(crate) fn backward(given: &Gradients<'_>) -> Result<([Tensor; 3], Option<Tensor>)> {
    let mut spec = BackwardSpec::contiguous(given.call.clone().contiguous().spec());
    let is_packed = given.pass.rows.cu_seqlens_q.is_some();
    let dout = desc(TensorName::DOut, (given.dout.dtype(), given.dout.layout()), is_packed)?;
    spec.dout = TensorDesc::contiguous(dout.dtype, dout.shape);
    let problem = spec.validate().map_err(Error::from)?;
    match given.call.dtype() {
        Dtype::F32 => backward_of::<f32>(given, problem.forward()),
        Dtype::F16 => backward_of::<f16>(given, problem.forward()),
        Dtype::Bf16 => backward_of::<bf16>(given, problem.forward()),
        Dtype::E4m3 | Dtype::Int8 => unreachable!("no type of candle is taken for 8 bits"),
    }
}

fn backward_of<T: Scalar<Output = T> + WithDType>(
    given: &Gradients<'_>,
    problem: &Problem,
) -> Result<([Tensor; 3], Option<Tensor>)> {
    let [q, k, v] = given.inputs;
    let tensors = [q, k, v, given.o, &given.dout].map(Tensor::storage_and_layout);
    let [q, k, v, o, dout] = tensors.each_ref().map(|(storage, layout)| match &**storage {
        Storage::Cpu(storage) => view::<T>(storage, layout),
        Storage::Cuda(_) | Storage::Metal(_) => {
            Err(Error::Device { given: storage.device().location() }.into())
        }
    });
    let q = q?;
    // LSE is (batch, heads, seqlen) for dense tensors, and (heads, total) for packed tensors, whose batch is 1.
    let (batch, seqlen, heads, _) = q.dim();
    let rows = |x: &Tensor| x.flatten_all()?.to_vec1::<f32>();
    let of_rows = [batch, heads, seqlen];
    let lse = Array3::from_shape_vec(of_rows, rows(given.pass.lse())?).expect("each row has one");
    let output = Output::new(o?.to_owned(), lse);
    let dlse = given.dlse.as_ref().map(rows).transpose()?;
    let mut gradients = OutputGradients::new(dout?);
    if let Some(dlse) = &dlse {
        gradients = gradients.dlse(ArrayView3::from_shape(of_rows, dlse).expect("each row has one"));
    }
    let (numbers, sink) = (given.pass.rows.read()?, sink(given.pass)?);
    let attention = attention(problem, [q, k?, v?], &numbers, sink.as_ref());
    let computed = attention.backward(&Device::Cpu, &output, gradients).map_err(Error::from)?;
    let cpu = &candle_core::Device::Cpu;
    let [dq, dk, dv] = [computed.dq, computed.dk, computed.dv].map(|x| x.into_raw_vec_and_offset().0);
    let [of_q, of_k, of_v] = given.call.input_shapes();
    let tensor = |elements: Vec<T>, shape| Tensor::from_vec(elements, shape, cpu);
    let dsink = computed.dsink.map(|dsink| Tensor::from_iter(dsink, cpu)).transpose()?;
    Ok(([tensor(dq, of_q)?, tensor(dk, of_k)?, tensor(dv, of_v)?], dsink))
}

/// The call as an `fa3::Attention`, unless K and V are a cache.
fn attention<'a, T: Scalar>(
    problem: &Problem,
    [q, k, v]: [ArrayView4<'a, T>; 3],
    numbers: &'a Numbers,
    sink: Option<&'a Array1<f32>>,
) -> Attention<'a, T> {
    let attention = Attention::new(q, k, v).for_problem(problem);
    let attention = sink.into_iter().fold(attention, |attention, sink| attention.sink(sink));
    let ends = numbers.cu_seqlens_q.iter().zip(&numbers.cu_seqlens_k);
    ends.fold(attention, |attention, (of_q, of_k)| attention.packed(of_q, of_k))
}

/// The sinks, if given.
///
/// # Errors
/// The sinks are on another device.
fn sink(pass: &Pass) -> Result<Option<Array1<f32>>> {
    pass.sink.as_ref().map(|sink| sink.to_vec1().map(Array1::from_vec)).transpose()
}

/// A view of a tensor (batch, seqlen, heads, head_dim), or (total, heads, head_dim) as a batch of 1.
///
/// # Errors
/// The tensor has another type.
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
