//! Gradients.

use fa3::half::bf16;
use fa3::ndarray::{Array3, Array4};
use fa3::{Attention, Device, Error, Gradients, OutputGradients, Scalar, cuda};
use fa3_ref::law::BackwardLaw;
use fa3_ref::{Inputs, Precision};
use fa3_sched::backward::{DqBy, Plan};
use fa3_tests::fwd::dense;
use fa3_types::{BackwardSpec, Dtype};

use super::{Sizes, inputs, sinks_of, wave};
use crate::{Fallible, ensure};

/// Holds the GPU's gradients to the error law, without and with a gradient of LSE, and says how far they are from the
/// CPU's.
pub(super) fn law<T: Scalar<Output = T>>(
    sizes: Sizes,
    with: impl Fn(Attention<'_, T>) -> Attention<'_, T>,
) -> Fallible<String> {
    let device = &Device::gpu()?;
    let (batch, (seqlen_q, _), (heads_q, _), (_, head_dim_v)) = sizes;
    let [q, k, v] = inputs::<T>(sizes);
    let dout = wave::<T>((batch, seqlen_q, heads_q, head_dim_v), 1.3);
    let dlse =
        Array3::from_shape_fn((batch, heads_q, seqlen_q), |(b, h, s)| ((5 * b + 3 * h + s) as f32).cos());
    let attention = with(Attention::new(q.view(), k.view(), v.view()));
    let output = attention.forward(device)?;

    let problem = attention.problem()?;
    let [q, k, v, dout_f32] = [&q, &k, &v, &dout].map(|x| x.mapv(T::to_f32));
    let inputs = Inputs::with_sink(&problem, [q.view(), k.view(), v.view()], sinks_of(&problem))?;
    let mut difference = 0.0f32;
    for dlse in [None, Some(dlse.view())] {
        let mut of = OutputGradients::new(&dout);
        of.dlse = dlse;
        let gpu = in_f32(attention.backward(device, &output, of)?);
        let cpu = in_f32(attention.backward(&Device::Cpu, &output, of)?);
        let of = fa3_ref::OutputGradients { dout: dout_f32.view(), dlse };
        let law = BackwardLaw::new(&inputs, of, Precision::of_output(T::DTYPE))?;
        law.check(&gpu, "cargo test --release -p fa3-tests --test gpu facade::backward")?;
        for (gpu, cpu) in [(&gpu.dq, &cpu.dq), (&gpu.dk, &cpu.dk), (&gpu.dv, &cpu.dv)] {
            difference = gpu.iter().zip(cpu).map(|(gpu, cpu)| (gpu - cpu).abs()).fold(difference, f32::max);
        }
    }
    Ok(format!("the law holds, and gradients are within {difference:.1e} of the cpu's"))
}

fn in_f32<T: Scalar>(Gradients { dq, dk, dv, dsink, .. }: Gradients<T>) -> fa3_ref::Gradients<f32> {
    let [dq, dk, dv] = [dq, dk, dv].map(|x| x.mapv(T::to_f32));
    fa3_ref::Gradients { dq, dk, dv, dsink }
}

/// The same bits in every run, of a problem whose dQ would be added up in any order: rows see more than 4096 keys. A
/// causal mask would not do: tiles of keys may then come to each row in order by themselves.
pub(super) fn deterministic(gpu: &cuda::Device) -> Fallible<String> {
    let spec = dense(Dtype::Bf16, 1, (1000, 4200), (4, 2), 128);
    let plan = Plan::new(&BackwardSpec::contiguous(spec).validate()?, &gpu.limits())?;
    ensure(matches!(plan.dq(), DqBy::Additions), &format!("dQ is not added up in any order:\n{plan}"))?;

    let device = &Device::gpu()?;
    let [q, k, v] = inputs::<bf16>((1, (1000, 4200), (4, 2), (128, 128)));
    let in_any_order = Attention::new(q.view(), k.view(), v.view());
    let attention = in_any_order.clone().deterministic();
    let output = attention.forward(device)?;
    let first = attention.backward(device, &output, q.view())?;
    for run in 1..5 {
        let same = attention.backward(device, &output, q.view())? == first;
        ensure(same, &format!("run {run} has other gradients"))?;
    }
    let other = in_any_order.backward(device, &output, q.view())?;
    ensure(other.dq != first.dq, "dQ is the same in any order")?;
    Ok("the same bits five times, and others in any order".to_owned())
}

/// A problem that the kernels do not take is an error, and is not computed on the CPU instead.
pub(super) fn refused() -> Fallible<String> {
    let device = &Device::gpu()?;
    let x = Array4::<f32>::zeros((1, 8, 1, 64));
    let single = Attention::new(x.view(), x.view(), x.view());
    let single = single.backward(device, &single.forward(&Device::Cpu)?, x.view());
    match single.err() {
        Some(Error::Cuda(single)) => Ok(single.to_string()),
        other => Err(format!("f32: {other:?}").into()),
    }
}
