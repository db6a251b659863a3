//! Attention over a cache: copied to the device, and back if rows were appended.

use fa3_types::{CachedProblem, Problem};
use ndarray::{Array4, ArrayView, ArrayView1, Dimension};

use super::rows::{pad, unpad};
use super::{
    CachedForward, Device, DeviceBuffer, Forward, ForwardOptions, HostError, OperationError, OutputBuffers,
    SplitKeys, Stream, Tensors, Workspace, tables, upload,
};
use crate::{CacheView, CacheViewMut, CachedAttention, NewRows, Output, Scalar};

/// Computes attention over a cache without an append. The problem belongs to the call.
pub(crate) fn forward<T: Scalar, C: Scalar, O: Scalar>(
    device: &Device,
    problem: &Problem,
    call: &CachedAttention<'_, T>,
    cache: &CacheView<'_, C>,
) -> Result<Output<O>, OperationError> {
    let padded = problem.padded();
    // It uses split-KV if Q has few rows.
    let options = ForwardOptions::default().split_keys(SplitKeys::Even);
    let forward = Forward::with(device, &padded, &options)?;
    let stream = device.stream()?;
    let q = upload(device, &stream, pad(call.q()).view())?;
    let [k, v] = [cache.k, cache.v].map(|x| upload(device, &stream, pad(x).view()));
    let (k, v) = (k?, v?);
    let lists = Lists::of_call(device, &stream, call, cache)?;
    let sink = call.sinks().map(|sink| upload(device, &stream, sink)).transpose()?;
    let qv = call.qv_view().map(|qv| upload(device, &stream, pad(qv).view())).transpose()?;
    let [k_descale, v_descale] = scales(device, &stream, call)?;
    let OutputBuffers { mut o, mut lse } = OutputBuffers::new(device, &padded)?;
    let mut workspace = Workspace::new(device, &stream, forward.workspace_bytes())?;
    let tensors = Tensors::new([("q", &q), ("k", &k), ("v", &v)], [("o", &mut o), ("lse", &mut lse)]);
    let tensors = tensors.input("qv", qv.as_ref()).input("sink", sink.as_ref());
    let tensors = tensors.input("k_descale", k_descale.as_ref()).input("v_descale", v_descale.as_ref());
    forward.run(&stream, lists.beside(tensors), &mut workspace)?;
    let (o, lse) = OutputBuffers { o, lse }.download(&stream, &padded)?;
    Ok(Output::new(unpad(o, problem.head_dim_v()), lse))
}

/// Computes attention over a cache with an append first. K and V of the cache are written unless there is an error.
pub(crate) fn append_forward<T: Scalar, C: Scalar, O: Scalar>(
    device: &Device,
    problem: &CachedProblem,
    call: &CachedAttention<'_, T>,
    cache: &mut CacheViewMut<'_, C>,
    new: &NewRows<'_, T>,
) -> Result<Output<O>, OperationError> {
    let (forward, attention) = (CachedForward::new(device, problem)?, problem.attention());
    let stream = device.stream()?;
    let [k_new, v_new] = new.tensors();
    let [q, k_new, v_new] = [call.q(), k_new, v_new].map(|x| upload(device, &stream, x));
    let [k, v] = [&cache.k, &cache.v].map(|x| upload(device, &stream, x.view()));
    let [k_descale, v_descale] = scales(device, &stream, call)?;
    let (q, k_new, v_new, mut k, mut v) = (q?, k_new?, v_new?, k?, v?);
    let (cos, sin) = tables(device, &stream, new.table())?;
    let mut lists = Lists::of_call(device, &stream, call, &cache.view())?;
    lists.add(device, &stream, "cu_seqlens_k_new", new.packed().map(ArrayView1::from))?;
    lists.add(device, &stream, "rotary_seqlens", new.listed().map(ArrayView1::from))?;
    let sink = call.sinks().map(|sink| upload(device, &stream, sink)).transpose()?;
    let qv = call.qv_view().map(|qv| upload(device, &stream, qv)).transpose()?;
    let OutputBuffers { mut o, mut lse } = OutputBuffers::new(device, attention)?;
    let mut workspace = Workspace::new(device, &stream, forward.workspace_bytes())?;
    let tensors = Tensors::new(
        [("q", &q), ("k_new", &k_new), ("v_new", &v_new)],
        [("k", &mut k), ("v", &mut v), ("o", &mut o), ("lse", &mut lse)],
    );
    let tensors = tensors.input("rotary_cos", cos.as_ref()).input("rotary_sin", sin.as_ref());
    let tensors = tensors.input("qv", qv.as_ref()).input("sink", sink.as_ref());
    let tensors = tensors.input("k_descale", k_descale.as_ref()).input("v_descale", v_descale.as_ref());
    forward.run(&stream, lists.beside(tensors), &mut workspace)?;
    let (o, lse) = OutputBuffers { o, lse }.download(&stream, attention)?;
    let (k, v): (Vec<C>, Vec<C>) = (k.download(&stream)?, v.download(&stream)?);
    for (to, from) in [(&mut cache.k, k), (&mut cache.v, v)] {
        let from = Array4::from_shape_vec(to.dim(), from).expect("one element each");
        to.assign(&from);
    }
    Ok(Output::new(o, lse))
}

/// The scales of K and of V, on the device.
fn scales<T: Scalar>(
    device: &Device,
    stream: &Stream,
    call: &CachedAttention<'_, T>,
) -> Result<[Option<DeviceBuffer>; 2], HostError> {
    let [k, v] = call.scales().map(|scales| scales.map(|x| upload(device, stream, x)).transpose());
    Ok([k?, v?])
}

/// Integer lists of a call, on the device.
struct Lists(Vec<(&'static str, DeviceBuffer)>);

impl Lists {
    /// Lengths and pages of a cache, and the packed sequences of Q.
    fn of_call<T: Scalar, C: Scalar>(
        device: &Device,
        stream: &Stream,
        call: &CachedAttention<'_, T>,
        cache: &CacheView<'_, C>,
    ) -> Result<Lists, HostError> {
        let mut lists = Lists(Vec::new());
        let ((table, index), [ends, used]) = (cache.lists().table(), call.lists());
        lists.add(device, stream, "seqused_k", Some(ArrayView1::from(cache.cache_seqlens)))?;
        lists.add(device, stream, "page_table", table)?;
        lists.add(device, stream, "cache_batch_idx", index.map(ArrayView1::from))?;
        lists.add(device, stream, "leftpad_k", cache.cache_leftpad.map(ArrayView1::from))?;
        lists.add(device, stream, "cu_seqlens_q", ends.map(ArrayView1::from))?;
        lists.add(device, stream, "seqused_q", used.map(ArrayView1::from))?;
        Ok(lists)
    }

    /// Adds a list, if any.
    fn add<D: Dimension>(
        &mut self,
        device: &Device,
        stream: &Stream,
        name: &'static str,
        numbers: Option<ArrayView<'_, i32, D>>,
    ) -> Result<(), HostError> {
        if let Some(numbers) = numbers {
            self.0.push((name, upload(device, stream, numbers)?));
        }
        Ok(())
    }

    /// Adds these lists to the tensors of a call.
    fn beside<'a>(&'a self, tensors: Tensors<'a>) -> Tensors<'a> {
        self.0.iter().fold(tensors, |tensors, (name, list)| tensors.input(name, list))
    }
}
