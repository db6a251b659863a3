//! Gradients of the public API on a GPU.

use fa3::half::bf16;
use fa3::{Attention, Device, cuda};
use fa3_sched::backward::{DqBy, Plan};
use fa3_tests::fwd::dense;
use fa3_types::{BackwardSpec, Dtype};

use super::inputs;
use crate::{Fallible, ensure};

/// Deterministic gradients have equal bits in every run. By default dQ would have additions in any order here, because
/// rows see more than 4096 keys. Under a causal mask, KV tiles might reach each row in order by chance.
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
