//! Attention as operations of candle, with gradients.
//!
//! An operation of candle has one result and at most three inputs, and its `bwd` does not get other results of the
//! forward pass. So three operations share a [`Pass`]:
//!
//! - [`Output`], of Q, K and V, computes O, and leaves LSE in the pass;
//! - [`LogSumExp`], of O, takes LSE from the pass;
//! - [`Sinks`], of Q and the sinks, copies Q. It is used only if the sinks have gradients.
//!
//! Candle differentiates LSE before O, and O before Q. `LogSumExp` leaves the gradient of LSE in the pass, where
//! `Output` takes it. `Output` leaves the gradient of the sinks, where `Sinks` takes it. So one backward pass computes
//! all gradients.

use std::sync::{Arc, OnceLock};

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CustomOp1, CustomOp2, CustomOp3, Device, Layout, Result, Shape, Storage, Tensor,
};

use crate::call::readable;
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::error::Error;
use crate::pass::{Gradients, Left, Pass};
use crate::rows::Rows;
use crate::{Attention, cpu};

/// The results of a forward pass.
pub(crate) struct Computed {
    pass: Arc<Pass>,
    pub(crate) o: Tensor,
}

/// Computes O and LSE of tensors that kernels can read.
///
/// # Errors
/// A tensor, a list or a number is invalid, or the driver reports an error.
pub(crate) fn run(
    attention: &Attention,
    [q, k, v]: [Tensor; 3],
    rows: Rows,
    sink: Option<Tensor>,
) -> Result<Computed> {
    let pass = Arc::new(Pass {
        attention: attention.clone(),
        rows,
        sink: sink.as_ref().map(Tensor::detach),
        lse: OnceLock::new(),
        dlse: Left::default(),
        dsink: Left::default(),
    });
    let q = match sink.filter(Tensor::track_op) {
        Some(sink) => q.apply_op2(&sink, Sinks(Arc::clone(&pass)))?,
        None => q,
    };
    let o = q.apply_op3(&k, &v, Output(Arc::clone(&pass)))?;
    Ok(Computed { pass, o })
}

impl Computed {
    /// O and LSE.
    ///
    /// # Errors
    /// The driver's errors.
    pub(crate) fn with_lse(self) -> Result<(Tensor, Tensor)> {
        let Computed { pass, o } = self;
        let lse = if o.track_op() { o.apply_op1(LogSumExp(pass))? } else { pass.lse().clone() };
        Ok((o, lse))
    }
}

/// Computes dQ, dK and dV from the gradient of O and from the gradient of LSE that this thread has left. Leaves
/// dsink for [`Sinks`].
fn gradients(pass: &Pass, inputs: [&Tensor; 3], o: &Tensor, dout: &Tensor) -> Result<[Tensor; 3]> {
    if pass.rows.is_cached() {
        return Err(Error::CachedGradients.into());
    }
    let given = Gradients {
        pass,
        call: pass.call(inputs.map(|x| (x.dtype(), x.layout())))?,
        inputs,
        o,
        dout: readable(&dout.detach())?,
        dlse: pass.dlse.take(),
    };
    let (gradients, dsink) = match o.device() {
        Device::Cpu => cpu::backward(&given)?,
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => cuda::backward(&given, device, pass.attention.deterministic)?,
        #[cfg(not(feature = "cuda"))]
        Device::Cuda(_) => return Err(Error::Device { given: o.device().location() }.into()),
        Device::Metal(_) => return Err(Error::Device { given: o.device().location() }.into()),
    };
    pass.dsink.put(dsink);
    Ok(gradients)
}

/// Defines the forward pass of [`Output`] for one kind of storage.
macro_rules! attend {
    ($name:ident, $storage:ty, $forward:path, $kept:path) => {
        fn $name(
            &self,
            q: &$storage,
            of_q: &Layout,
            k: &$storage,
            of_k: &Layout,
            v: &$storage,
            of_v: &Layout,
        ) -> Result<($storage, Shape)> {
            let inputs = [(q, of_q), (k, of_k), (v, of_v)];
            let call = self.0.call(inputs.map(|(x, layout)| (x.dtype(), layout)))?;
            let (o, lse) = $forward(&self.0, &call, inputs)?;
            self.0.keep($kept(lse), &call);
            Ok((o, call.o_shape()))
        }
    };
}

/// The operation that computes O.
struct Output(Arc<Pass>);

impl CustomOp3 for Output {
    fn name(&self) -> &'static str {
        "fa3-attention"
    }

    attend!(cpu_fwd, CpuStorage, cpu::forward, Storage::Cpu);

    #[cfg(feature = "cuda")]
    attend!(cuda_fwd, CudaStorage, cuda::forward, Storage::Cuda);

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        o: &Tensor,
        dout: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [dq, dk, dv] = gradients(&self.0, [q, k, v], o, dout)?;
        Ok((Some(dq), Some(dk), Some(dv)))
    }
}

/// The operation that returns LSE, once O is computed.
struct LogSumExp(Arc<Pass>);

impl CustomOp1 for LogSumExp {
    fn name(&self) -> &'static str {
        "fa3-attention-lse"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        let lse = self.0.lse();
        Ok((CpuStorage::F32(lse.flatten_all()?.to_vec1()?), lse.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        let (storage, layout) = self.0.lse().storage_and_layout();
        Ok((cuda::on_gpu(&storage)?.try_clone(layout)?, layout.shape().clone()))
    }

    /// Leaves the gradient for [`Output`], and returns zeros as the gradient of O.
    fn bwd(&self, o: &Tensor, _: &Tensor, dlse: &Tensor) -> Result<Option<Tensor>> {
        self.0.dlse.put(Some(dlse.detach().contiguous()?));
        Ok(Some(o.zeros_like()?))
    }
}

/// Defines the forward pass of [`Sinks`] for one kind of storage.
macro_rules! copy {
    ($name:ident, $storage:ty) => {
        fn $name(&self, q: &$storage, of_q: &Layout, _: &$storage, _: &Layout) -> Result<($storage, Shape)> {
            Ok((q.to_dtype(of_q, q.dtype())?, of_q.shape().clone()))
        }
    };
}

/// The operation that copies Q, and whose gradients are dQ and dsink.
struct Sinks(Arc<Pass>);

impl CustomOp2 for Sinks {
    fn name(&self) -> &'static str {
        "fa3-attention-sinks"
    }

    copy!(cpu_fwd, CpuStorage);

    #[cfg(feature = "cuda")]
    copy!(cuda_fwd, CudaStorage);

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        dq: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        Ok((Some(dq.clone()), self.0.dsink.take()))
    }
}
