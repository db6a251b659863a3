//! A call on a GPU: compiled, computed, then timed.

use std::time::{Duration, Instant};

use fa3::cuda::{
    Backward, BackwardError, BackwardTensors, Device, DeviceBuffer, Forward, ForwardError, ForwardTensors,
    HostError, Stream, Workspace,
};
use fa3::problem::BackwardProblem;
use fa3::{Gradients, Output, OutputGradients, Scalar};
use fa3_types::{Problem, TensorDesc};
use ndarray::{Array3, Array4, ArrayView, ArrayView4, Dimension};

use super::place::Times;

/// Launches that warm up, and that find out how long one takes.
const FEW: u32 = 3;
/// Milliseconds of launches back to back that are timed: as many as `fa3 bench` times at once.
const SLICE_MS: f64 = 25.0;

/// Computes a call of contiguous tensors, and how long a launch of its kernel takes.
///
/// # Errors
/// No kernel computes the problem, or what the driver says.
pub(super) fn forward<T: Scalar>(
    device: &Device,
    problem: &Problem,
    qkv: [ArrayView4<'_, T>; 3],
) -> Result<(Output<T::Output>, Times), ForwardError> {
    let start = Instant::now();
    let forward = Forward::new(device, problem)?;
    let compile = Some(start.elapsed());

    let stream = device.stream()?;
    let [q, k, v] = qkv.map(|x| upload(device, &stream, x));
    let (q, k, v) = (q?, k?, v?);
    let lse_bytes = problem.lse_shape().iter().product::<usize>() * size_of::<f32>();
    let mut o = device.alloc(problem.o().extent_bytes().0 as usize)?;
    let mut lse = device.alloc(lse_bytes)?;
    let mut workspace = Workspace::new(device, &stream, forward.workspace_bytes())?;
    let (call, launches) = timed(&stream, || {
        let tensors = ForwardTensors::new(&q, &k, &v, &mut o).lse(&mut lse);
        forward.run(&stream, tensors, &mut workspace)
    })?;

    let (o, lse) = (o.download(&stream)?, lse.download(&stream)?);
    let o = Array4::from_shape_vec(problem.o().shape.dims(), o).expect("one element each");
    let lse = Array3::from_shape_vec(problem.lse_shape(), lse).expect("one element each");
    Ok((Output::new(o, lse), Times { compile, call, launches, warm: true }))
}

/// Computes the gradients of such a call from its output, and how long a launch of their kernels takes.
///
/// # Errors
/// No kernel computes the problem, or what the driver says.
pub(super) fn backward<T: Scalar>(
    device: &Device,
    problem: &BackwardProblem,
    qkv: [ArrayView4<'_, T>; 3],
    output: &Output<T>,
    of: OutputGradients<'_, T>,
) -> Result<(Gradients<T>, Times), BackwardError> {
    let start = Instant::now();
    let backward = Backward::new(device, problem)?;
    let compile = Some(start.elapsed());

    let stream = device.stream()?;
    let [q, k, v] = qkv.map(|x| upload(device, &stream, x));
    let [o, dout] = [output.o.view(), of.dout].map(|x| upload(device, &stream, x));
    let (q, k, v, o, dout) = (q?, k?, v?, o?, dout?);
    let lse = upload(device, &stream, output.lse.view())?;
    let dlse = of.dlse.map(|dlse| upload(device, &stream, dlse)).transpose()?;
    let descs = [problem.dq(), problem.dk(), problem.dv()];
    let [dq, dk, dv] = descs.map(|x| device.alloc(x.extent_bytes().0 as usize));
    let (mut dq, mut dk, mut dv) = (dq?, dk?, dv?);
    let mut workspace = Workspace::new(device, &stream, backward.workspace_bytes())?;
    let (call, launches) = timed(&stream, || {
        let gradients = [&mut dq, &mut dk, &mut dv];
        let tensors = BackwardTensors::new([&q, &k, &v], [&o, &lse], &dout, gradients).dlse(dlse.as_ref());
        backward.run(&stream, tensors, &mut workspace)
    })?;

    let [dq, dk, dv] = [dq.download(&stream)?, dk.download(&stream)?, dv.download(&stream)?];
    let array = |x: &TensorDesc, elements| {
        Array4::from_shape_vec(x.shape.dims(), elements).expect("one element each")
    };
    let [q, k, v] = descs;
    let gradients = Gradients::new([array(q, dq), array(k, dk), array(v, dv)]);
    Ok((gradients, Times { compile, call, launches, warm: true }))
}

/// How long a launch takes on the GPU, of how many that were timed back to back.
///
/// # Errors
/// Those of `launch`, or what the driver says.
pub(crate) fn timed<E: From<HostError>>(
    stream: &Stream,
    mut launch: impl FnMut() -> Result<(), E>,
) -> Result<(Duration, u32), E> {
    let mut slice = |launches: u32| -> Result<Duration, E> {
        let start = stream.record()?;
        (0..launches).try_for_each(|_| launch())?;
        let end = stream.record()?;
        Ok(Duration::from_secs_f64(f64::from(end.millis_since(&start)?) / 1e3))
    };
    slice(FEW)?;
    let one_ms = slice(FEW)?.as_secs_f64() * 1e3 / f64::from(FEW);
    let launches = ((SLICE_MS / one_ms.max(1e-3)) as u32).max(FEW);
    Ok((slice(launches)? / launches, launches))
}

/// An array with nothing between its elements.
///
/// # Errors
/// What the driver says.
pub(crate) fn upload<T: Scalar, D: Dimension>(
    device: &Device,
    stream: &Stream,
    x: ArrayView<'_, T, D>,
) -> Result<DeviceBuffer, HostError> {
    device.upload(stream, x.as_slice().expect("a file's tensors and tables have no gaps"))
}
