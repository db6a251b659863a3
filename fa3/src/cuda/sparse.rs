//! Attention over listed rows of a cache, which is copied to the device.

use fa3_types::Problem;

use super::inputs::DeviceInputs;
use super::rows::unpad;
use super::{Device, Forward, ForwardOptions, OperationError, SplitKeys, attend};
use crate::cache::Outputs;
use crate::cpu::queries::Queries;
use crate::{ListedCache, Scalar};

/// Computes attention over listed rows. The problem belongs to the call.
pub(crate) fn forward<T: Scalar>(
    device: &Device,
    problem: &Problem,
    Queries { q, qv, sink }: Queries<'_, T>,
    (cache, extra): (&ListedCache<'_, T>, Option<&ListedCache<'_, T>>),
    (o_to, lse_to): Outputs<'_, T>,
) -> Result<(), OperationError> {
    let padded = problem.padded();
    let options = ForwardOptions::default().split_keys(SplitKeys::Even);
    let forward = Forward::with(device, &padded, &options)?;
    let mut inputs = DeviceInputs::new(device)?;
    inputs.add_padded([("q", q), ("k", cache.k), ("v", cache.v)])?;
    inputs.add_padded(qv.map(|qv| ("qv", qv)))?;
    inputs.add("sink", sink)?;
    inputs.add("indices", [cache.indices])?;
    inputs.add_lists([("seqused_k", cache.lengths)])?;
    if let Some(extra) = extra {
        inputs.add_padded([("extra_k", extra.k), ("extra_v", extra.v)])?;
        inputs.add("extra_indices", [extra.indices])?;
        inputs.add_lists([("extra_seqused_k", extra.lengths)])?;
    }
    let (o, lse) = attend(device, &forward, &inputs, &padded)?;
    unpad(o, problem.head_dim_v()).assign_to(o_to);
    lse.assign_to(lse_to);
    Ok(())
}
