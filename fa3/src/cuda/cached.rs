//! Attention over a cache: copied to the device, and back where rows were appended.

use fa3_types::{CachedProblem, Problem};
use ndarray::{Array4, ArrayView, ArrayView1, Dimension};

use super::rows::{pad, unpad};
use super::{
    CachedForward, Device, DeviceBuffer, Forward, ForwardOptions, HostError, OperationError, OutputBuffers,
    SplitKeys, Stream, Tensors, Workspace, tables, upload,
};
use crate::{CachedAttention, KvCache, NewRows, Output, RopeTable, Scalar};

/// Attention over a cache as it is. The problem is that of the call.
pub(crate) fn forward<T: Scalar, O: Scalar>(
    device: &Device,
    problem: &Problem,
    call: &CachedAttention<'_, T>,
    cache: &KvCache<T>,
) -> Result<Output<O>, OperationError> {
    let padded = problem.padded();
    // Keys are shared where rows of Q are few.
    let options = ForwardOptions::default().split_keys(SplitKeys::Equally);
    let forward = Forward::with(device, &padded, &options)?;
    let stream = device.stream()?;
    let [q, k, v] =
        [call.q(), cache.k.view(), cache.v.view()].map(|x| upload(device, &stream, pad(x).view()));
    let (q, k, v) = (q?, k?, v?);
    let lists = Lists::of_call(device, &stream, call, cache)?;
    let sink = call.sinks().map(|sink| upload(device, &stream, sink)).transpose()?;
    let qv = call.qv_view().map(|qv| upload(device, &stream, pad(qv).view())).transpose()?;
    let OutputBuffers { mut o, mut lse } = OutputBuffers::new(device, &padded)?;
    let mut workspace = Workspace::new(device, &stream, forward.workspace_bytes())?;
    let tensors = Tensors::new([("q", &q), ("k", &k), ("v", &v)], [("o", &mut o), ("lse", &mut lse)]);
    let tensors = tensors.input("qv", qv.as_ref()).input("sink", sink.as_ref());
    forward.run(&stream, lists.beside(tensors), &mut workspace)?;
    let (o, lse) = OutputBuffers { o, lse }.download(&stream, &padded)?;
    Ok(Output::new(unpad(o, problem.head_dim_v()), lse))
}

/// Attention over a cache that gets rows before, whose K and V are written if there is no error. The table is that of
/// the new rows.
pub(crate) fn append_forward<T: Scalar, O: Scalar>(
    device: &Device,
    problem: &CachedProblem,
    call: &CachedAttention<'_, T>,
    cache: &mut KvCache<T>,
    new: &NewRows<'_, T>,
    table: Option<&RopeTable>,
) -> Result<Output<O>, OperationError> {
    let (forward, attention) = (CachedForward::new(device, problem)?, problem.attention());
    let stream = device.stream()?;
    let [k_new, v_new] = new.tensors();
    let [q, k_new, v_new] = [call.q(), k_new, v_new].map(|x| upload(device, &stream, x));
    let [k, v] = [&cache.k, &cache.v].map(|x| upload(device, &stream, x.view()));
    let (q, k_new, v_new, mut k, mut v) = (q?, k_new?, v_new?, k?, v?);
    let (cos, sin) = tables(device, &stream, table)?;
    let mut lists = Lists::of_call(device, &stream, call, cache)?;
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
    forward.run(&stream, lists.beside(tensors), &mut workspace)?;
    let (o, lse) = OutputBuffers { o, lse }.download(&stream, attention)?;
    let (k, v): (Vec<T>, Vec<T>) = (k.download(&stream)?, v.download(&stream)?);
    for (to, from) in [(&mut cache.k, k), (&mut cache.v, v)] {
        let from = Array4::from_shape_vec(to.dim(), from).expect("one element each");
        to.assign(&from);
    }
    Ok(Output::new(o, lse))
}

/// Lists of numbers of a call, on the device.
struct Lists(Vec<(&'static str, DeviceBuffer)>);

impl Lists {
    /// Lengths and pages of a cache, and the packed sequences of Q.
    fn of_call<T: Scalar>(
        device: &Device,
        stream: &Stream,
        call: &CachedAttention<'_, T>,
        cache: &KvCache<T>,
    ) -> Result<Lists, HostError> {
        let mut lists = Lists(Vec::new());
        lists.add(device, stream, "seqused_k", Some(ArrayView1::from(&cache.cache_seqlens)))?;
        lists.add(device, stream, "page_table", cache.table())?;
        lists.add(device, stream, "leftpad_k", cache.cache_leftpad.as_ref().map(ArrayView1::from))?;
        lists.add(device, stream, "cu_seqlens_q", call.packed().map(ArrayView1::from))?;
        Ok(lists)
    }

    /// Adds a list, if there is one.
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
