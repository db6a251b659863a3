//! A call on a GPU: compiles, computes, then times it.

use std::time::Instant;

use fa3::cuda::{Backward, Device, Forward, Lengths, OperationError, Tensors, Workspace};
use fa3::problem::BackwardProblem;
use fa3::{Gradients, Output, OutputGradients, Scalar};
use fa3_types::{KnownProblem, TensorDesc};
use ndarray::{Array1, Array3, Array4, ArrayView1, ArrayView4};

use crate::device::Times;
use crate::gpu::upload;

/// Computes the forward pass over contiguous tensors, and times a launch of its kernel.
pub(super) fn forward<T: Scalar>(
    device: &Device,
    problem: &KnownProblem,
    qkv: [ArrayView4<'_, T>; 3],
    qv: Option<ArrayView4<'_, T>>,
    sink: Option<ArrayView1<'_, f32>>,
) -> Result<(Output<T::Output>, Times), OperationError> {
    let start = Instant::now();
    let forward = Forward::new(device, problem)?;
    let compile = start.elapsed();

    let stream = device.stream()?;
    let [q, k, v] = qkv.map(|x| upload(device, &stream, x));
    let (q, k, v) = (q?, k?, v?);
    let lse_bytes = problem.lse_shape().iter().product::<usize>() * size_of::<f32>();
    let mut o = device.alloc(problem.o().extent_bytes().0 as usize)?;
    let mut lse = device.alloc(lse_bytes)?;
    let mut workspace = Workspace::new(device, &stream, forward.workspace_bytes())?;
    let lengths = Lengths::upload(device, &stream, problem)?;
    let qv = qv.map(|qv| upload(device, &stream, qv)).transpose()?;
    let sink = sink.map(|sink| upload(device, &stream, sink)).transpose()?;
    let times = Times::of_launches(&stream, compile, || {
        let tensors = Tensors::new([("q", &q), ("k", &k), ("v", &v)], [("o", &mut o), ("lse", &mut lse)]);
        let tensors = tensors.input("qv", qv.as_ref()).input("sink", sink.as_ref());
        forward.run(&stream, lengths.beside(tensors), &mut workspace)
    })?;

    let (o, lse) = (o.download(&stream)?, lse.download(&stream)?);
    let o = Array4::from_shape_vec(problem.o().shape.dims(), o).expect("one element each");
    let lse = Array3::from_shape_vec(problem.lse_shape(), lse).expect("one element each");
    Ok((Output::new(o, lse), times))
}

/// Computes the gradients of a call over contiguous tensors from its output, and times a launch of the backward
/// kernels. `known` has the sequence lengths.
pub(super) fn backward<T: Scalar>(
    device: &Device,
    (problem, known): (&BackwardProblem, &KnownProblem),
    qkv: [ArrayView4<'_, T>; 3],
    sink: Option<ArrayView1<'_, f32>>,
    output: &Output<T>,
    of: OutputGradients<'_, T>,
) -> Result<(Gradients<T>, Times), OperationError> {
    let start = Instant::now();
    let backward = Backward::new(device, problem)?;
    let compile = start.elapsed();

    let stream = device.stream()?;
    let [q, k, v] = qkv.map(|x| upload(device, &stream, x));
    let [o, dout] = [output.o.view(), of.dout].map(|x| upload(device, &stream, x));
    let (q, k, v, o, dout) = (q?, k?, v?, o?, dout?);
    let lse = upload(device, &stream, output.lse.view())?;
    let dlse = of.dlse.map(|dlse| upload(device, &stream, dlse)).transpose()?;
    let sink = sink.map(|sink| upload(device, &stream, sink)).transpose()?;
    let mut dsink = sink.as_ref().map(|sink| device.alloc(sink.bytes())).transpose()?;
    let descs = [problem.dq(), problem.dk(), problem.dv()];
    let [dq, dk, dv] = descs.map(|x| device.alloc(x.extent_bytes().0 as usize));
    let (mut dq, mut dk, mut dv) = (dq?, dk?, dv?);
    let mut workspace = Workspace::new(device, &stream, backward.workspace_bytes())?;
    let lengths = Lengths::upload(device, &stream, known)?;
    let times = Times::of_launches(&stream, compile, || {
        let tensors = Tensors::new(
            [("q", &q), ("k", &k), ("v", &v), ("o", &o), ("lse", &lse), ("dout", &dout)],
            [("dq", &mut dq), ("dk", &mut dk), ("dv", &mut dv)],
        )
        .input("dlse", dlse.as_ref())
        .input("sink", sink.as_ref())
        .output("dsink", dsink.as_mut());
        backward.run(&stream, lengths.beside(tensors), &mut workspace)
    })?;

    let [dq, dk, dv] = [dq.download(&stream)?, dk.download(&stream)?, dv.download(&stream)?];
    let array = |x: &TensorDesc, elements| {
        Array4::from_shape_vec(x.shape.dims(), elements).expect("one element each")
    };
    let [q, k, v] = descs;
    let mut gradients = Gradients::new([array(q, dq), array(k, dk), array(v, dv)]);
    gradients.dsink = dsink.map(|dsink| dsink.download(&stream)).transpose()?.map(Array1::from_vec);
    Ok((gradients, times))
}
