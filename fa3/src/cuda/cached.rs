//! Attention over a cache: copied to the device, and back if rows were appended.

use fa3_types::{CachedProblem, Problem};

use super::inputs::DeviceInputs;
use super::{CachedForward, Device, HostError, OperationError, OutputBuffers, over_cache};
use crate::results::Results;
use crate::{CacheView, CacheViewMut, CachedAttention, NewRows, Scalar};

/// Computes attention over a cache without an append. `problem` is the problem of `call`.
pub(crate) fn forward<T: Scalar, C: Scalar>(
    device: &Device,
    problem: &Problem,
    call: &CachedAttention<'_, T>,
    cache: &CacheView<'_, C>,
    results: Results<'_, T>,
) -> Result<(), OperationError> {
    let add = |inputs: &mut DeviceInputs<'_>| {
        inputs.add_padded([("q", call.q())].into_iter().chain(call.qv_view().map(|qv| ("qv", qv))))?;
        inputs.add_padded([("k", cache.k), ("v", cache.v)])?;
        add_data_of(inputs, call, cache)
    };
    over_cache(device, problem, add, results)
}

/// Computes attention over a cache with an append first. The cache is written only if there is no error.
pub(crate) fn append_forward<T: Scalar, C: Scalar>(
    device: &Device,
    problem: &CachedProblem,
    call: &CachedAttention<'_, T>,
    cache: &mut CacheViewMut<'_, C>,
    new: &NewRows<'_, T>,
    results: Results<'_, T>,
) -> Result<(), OperationError> {
    let (forward, attention) = (CachedForward::new(device, problem)?, problem.attention());
    let mut inputs = DeviceInputs::new(device)?;
    let [k_new, v_new] = new.tensors();
    for (name, x) in [("q", call.q()), ("k_new", k_new), ("v_new", v_new)] {
        inputs.add(name, [x])?;
    }
    inputs.add("qv", call.qv_view())?;
    inputs.add_tables(["rotary_cos", "rotary_sin"], new.table())?;
    inputs.add_lists([("cu_seqlens_k_new", new.packed()), ("rotary_seqlens", new.listed())])?;
    add_data_of(&mut inputs, call, &cache.view())?;
    let [k, v] = [&cache.k, &cache.v].map(|x| {
        let x = x.as_standard_layout();
        device.upload(&inputs.stream, x.as_slice().expect("the standard layout has no gaps"))
    });
    let (mut k, mut v, mut outputs) = (k?, v?, OutputBuffers::new(device, attention)?);
    let tensors = inputs.tensors().output("k", &mut k).output("v", &mut v);
    inputs.run(&forward, outputs.beside(tensors))?;
    for (to, from) in [(&mut cache.k, &k), (&mut cache.v, &v)] {
        let (entries, rows, heads, columns) = to.dim();
        to.assign(&inputs.download(from, [entries, rows, heads, columns])?);
    }
    Ok(outputs.download_to(&inputs, attention, results)?)
}

/// Uploads the sinks, scales, intervals and tables of a call, the lengths and pages of its cache, and the sequence
/// lists of Q.
fn add_data_of<T: Scalar, C: Scalar>(
    inputs: &mut DeviceInputs<'_>,
    call: &CachedAttention<'_, T>,
    cache: &CacheView<'_, C>,
) -> Result<(), HostError> {
    let ((table, index), [ends, used], [of_k, of_v]) = (cache.table(), call.lists(), call.scales());
    inputs.add("sink", call.sinks())?;
    inputs.add("k_descale", of_k)?;
    inputs.add("v_descale", of_v)?;
    let [of_k, of_v] = call.scales_of_tokens();
    inputs.add("k_scales", of_k)?;
    inputs.add("v_scales", of_v)?;
    inputs.add("page_table", table)?;
    inputs.add("intervals", call.interval_rows())?;
    inputs.add_score(call.function())?;
    inputs.add_lists([
        ("seqused_k", Some(cache.cache_seqlens)),
        ("cache_batch_idx", index),
        ("leftpad_k", cache.cache_leftpad),
        ("cu_seqlens_q", ends),
        ("seqused_q", used),
    ])
}
