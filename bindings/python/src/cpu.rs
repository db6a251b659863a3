//! Calls on the CPU, which the crate `fa3` computes over torch's memory. Other threads of Python go on meanwhile.

mod fp8;
mod memory;
mod quantize;
mod threads;

use fa3::half::{bf16, f16};
use fa3::ndarray::{Array3, Array4, ArrayView3, ArrayView4, ArrayViewMut3, ArrayViewMut4};
use fa3::{Attention, Device, Output, OutputGradients, Scalar};
use fa3_types::{
    Address, Addresses, BackwardAddresses, BackwardProblem, BackwardSpec, Dtype, Problem, ProblemSpec,
    TensorDesc, TensorName,
};

use crate::error::Error;
use crate::{backward, call};
use memory::{slice, slice_mut, view};

pub(crate) use quantize::{check as check_quantize, quantize};
pub(crate) use threads::run;

/// The problem of a call, of contiguous tensors: any strides will do.
///
/// # Errors
/// What is wrong with it.
pub(crate) fn check(call: &call::Call) -> Result<Problem, Error> {
    if call.sm_margin() < 0 {
        return Err(Error::NegativeMargin { margin: call.sm_margin() });
    }
    Ok(contiguous(call.spec()?).validate()?)
}

/// The problem of a backward pass, of contiguous tensors.
///
/// # Errors
/// What is wrong with it.
pub(crate) fn check_backward(call: &backward::Call) -> Result<BackwardProblem, Error> {
    check(call.forward())?;
    let mut spec = BackwardSpec::contiguous(contiguous(call.forward().spec()?));
    spec.dout = TensorDesc::contiguous(call.dout().dtype, call.dout().shape);
    Ok(spec.validate().map_err(fa3_cuda::host::BackwardError::from)?)
}

fn contiguous(mut spec: ProblemSpec) -> ProblemSpec {
    for x in [&mut spec.q, &mut spec.k, &mut spec.v] {
        *x = TensorDesc::contiguous(x.dtype, x.shape);
    }
    spec
}

/// Computes the forward pass of `call` over the tensors that lie `at`.
///
/// # Errors
/// What is wrong with the call.
pub(crate) fn forward(call: &call::Call, at: Addresses) -> Result<(), Error> {
    let problem = check(call)?;
    let spec = call.spec()?;
    match problem.dtype() {
        Dtype::F32 => forward_of::<f32>(&spec, &problem, at),
        Dtype::F16 => forward_of::<f16>(&spec, &problem, at),
        Dtype::Bf16 => forward_of::<bf16>(&spec, &problem, at),
        Dtype::E4m3 => fp8::forward(&spec, &problem, at),
    }
}

fn forward_of<T: Scalar<Output = T>>(
    spec: &ProblemSpec,
    problem: &Problem,
    at: Addresses,
) -> Result<(), Error> {
    // SAFETY: the Python sources take the addresses from tensors of the problem's shapes, strides and dtypes, which
    // they hold until the call is over. O and LSE are new ones, which nobody else knows. That nobody writes to the
    // others meanwhile is up to the caller, as with torch's own operators.
    #[allow(unsafe_code, reason = "torch's tensors are plain addresses")]
    let (qkv, o, lse) = unsafe { (qkv::<T>(spec, at.q, at.k, at.v)?, o(problem, at)?, lse(problem, at)?) };
    match lse {
        Some(lse) => attention(spec, qkv).forward_into(&Device::Cpu, o, lse)?,
        None => {
            let mut unwanted = Array3::zeros(problem.lse_shape());
            attention(spec, qkv).forward_into(&Device::Cpu, o, unwanted.view_mut())?;
        }
    }
    Ok(())
}

/// Computes the backward pass of `call` over the tensors that lie `at`.
///
/// # Errors
/// What is wrong with the call.
pub(crate) fn backward(call: &backward::Call, at: BackwardAddresses) -> Result<(), Error> {
    let problem = check_backward(call)?;
    let spec = call.forward().spec()?;
    match problem.forward().dtype() {
        Dtype::F32 => backward_of::<f32>(&spec, call.dout(), &problem, at),
        Dtype::F16 => backward_of::<f16>(&spec, call.dout(), &problem, at),
        Dtype::Bf16 => backward_of::<bf16>(&spec, call.dout(), &problem, at),
        Dtype::E4m3 => unreachable!("no gradients of e4m3 are a valid problem"),
    }
}

fn backward_of<T: Scalar<Output = T>>(
    spec: &ProblemSpec,
    dout: &TensorDesc,
    problem: &BackwardProblem,
    at: BackwardAddresses,
) -> Result<(), Error> {
    let forward = problem.forward();
    let (of_o, of_lse) = (forward.o().shape.dims(), forward.lse_shape());
    let count = |x: &TensorDesc| x.shape.dims().iter().product::<usize>();
    let rows = of_lse.iter().product();
    // SAFETY: the Python sources take the addresses from tensors of the problem's shapes, strides and dtypes, which
    // they hold until the call is over; those of the gradients that are written are new ones, which nobody else knows.
    // That nobody writes to the others meanwhile is up to the caller, as with torch's own operators.
    #[allow(unsafe_code, reason = "torch's tensors are plain addresses")]
    let (qkv, dout, o, lse, dlse, [dq, dk, dv]) = unsafe {
        let dlse = at.dlse.map(|dlse| slice::<f32>(TensorName::DLse, rows, dlse)).transpose()?;
        let gradients = [
            slice_mut::<T>(TensorName::DQ, count(forward.q()), at.dq)?,
            slice_mut(TensorName::DK, count(forward.k()), at.dk)?,
            slice_mut(TensorName::DV, count(forward.v()), at.dv)?,
        ];
        let dout = view::<T>(TensorName::DOut, dout, at.dout)?;
        let o = slice::<T>(TensorName::O, count(forward.o()), at.o)?;
        let lse = slice::<f32>(TensorName::Lse, rows, at.lse)?;
        (qkv::<T>(spec, at.q, at.k, at.v)?, dout, o, lse, dlse, gradients)
    };
    let o = Array4::from_shape_vec(of_o, o.to_vec()).expect("they are so many");
    let lse = Array3::from_shape_vec(of_lse, lse.to_vec()).expect("they are so many");
    let output = Output::new(o, lse);
    let mut given = OutputGradients::new(dout);
    if let Some(dlse) = dlse {
        given = given.dlse(ArrayView3::from_shape(of_lse, dlse).expect("they are so many"));
    }
    let gradients = attention(spec, qkv).backward(&Device::Cpu, &output, given)?;
    write(&gradients.dq, dq);
    write(&gradients.dk, dk);
    write(&gradients.dv, dv);
    Ok(())
}

fn write<T: Scalar>(from: &Array4<T>, to: &mut [T]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
}

/// The call as `fa3` has it.
fn attention<'a, T: Scalar>(spec: &ProblemSpec, [q, k, v]: [ArrayView4<'a, T>; 3]) -> Attention<'a, T> {
    let mut attention = Attention::new(q, k, v).mask(spec.mask);
    if let Some(scale) = spec.softmax_scale {
        attention = attention.softmax_scale(scale);
    }
    match spec.softcap {
        Some(cap) => attention.softcap(cap),
        None => attention,
    }
}

/// Q, K and V.
///
/// # Safety
/// Tensors that look like those of `spec` lie there. They live, and nobody writes to them, for as long as the views.
///
/// # Errors
/// Those of an address.
#[allow(unsafe_code, reason = "torch's tensors are plain addresses")]
unsafe fn qkv<'a, T: Scalar>(
    spec: &ProblemSpec,
    q: Address,
    k: Address,
    v: Address,
) -> Result<[ArrayView4<'a, T>; 3], Error> {
    // SAFETY: the caller vouches for it.
    unsafe {
        Ok([
            view(TensorName::Q, &spec.q, q)?,
            view(TensorName::K, &spec.k, k)?,
            view(TensorName::V, &spec.v, v)?,
        ])
    }
}

/// O, to be written.
///
/// # Safety
/// The problem's O of that type lies there, which nobody else uses for as long as the view.
///
/// # Errors
/// Those of an address.
#[allow(unsafe_code, reason = "torch's tensors are plain addresses")]
unsafe fn o<'a, T: Scalar>(problem: &Problem, at: Addresses) -> Result<ArrayViewMut4<'a, T>, Error> {
    let dims = problem.o().shape.dims();
    // SAFETY: the caller vouches for it.
    let o = unsafe { slice_mut(TensorName::O, dims.iter().product(), at.o) }?;
    Ok(ArrayViewMut4::from_shape(dims, o).expect("they are so many"))
}

/// LSE, to be written, if it is wanted.
///
/// # Safety
/// The problem's LSE lies there, which nobody else uses for as long as the view.
///
/// # Errors
/// Those of an address.
#[allow(unsafe_code, reason = "torch's tensors are plain addresses")]
unsafe fn lse<'a>(problem: &Problem, at: Addresses) -> Result<Option<ArrayViewMut3<'a, f32>>, Error> {
    let Some(address) = at.lse else { return Ok(None) };
    let dims = problem.lse_shape();
    // SAFETY: the caller vouches for it.
    let lse = unsafe { slice_mut(TensorName::Lse, dims.iter().product(), address) }?;
    Ok(Some(ArrayViewMut3::from_shape(dims, lse).expect("they are so many")))
}
