//! Attention over listed rows of a cache, which is copied to the device.

use fa3_types::Problem;

use super::inputs::DeviceInputs;
use super::{Device, OperationError, over_cache};
use crate::cpu::queries::Queries;
use crate::results::Results;
use crate::{ListedCache, Scalar};

/// Computes attention over listed rows. The problem belongs to the call.
pub(crate) fn forward<T: Scalar>(
    device: &Device,
    problem: &Problem,
    Queries { q, qv, sink }: Queries<'_, T>,
    (cache, extra): (&ListedCache<'_, T>, Option<&ListedCache<'_, T>>),
    results: Results<'_, T>,
) -> Result<(), OperationError> {
    let add = |inputs: &mut DeviceInputs<'_>| {
        inputs.add_padded([("q", q), ("k", cache.k), ("v", cache.v)])?;
        inputs.add_padded(qv.map(|qv| ("qv", qv)))?;
        inputs.add("sink", sink)?;
        inputs.add("indices", [cache.indices])?;
        inputs.add_lists([("seqused_k", cache.lengths)])?;
        let Some(extra) = extra else { return Ok(()) };
        inputs.add_padded([("extra_k", extra.k), ("extra_v", extra.v)])?;
        inputs.add("extra_indices", [extra.indices])?;
        inputs.add_lists([("extra_seqused_k", extra.lengths)])
    };
    over_cache(device, problem, add, results)
}
