//! Attention as operations of candle, with gradients.
//!
//! An operation of candle has one result, and its `bwd` receives nothing else that the forward pass computed. So both
//! results are operations over the same [`Pass`]: [`Output`], of Q, K and V, computes it and leaves LSE there, and
//! [`LogSumExp`], of O, takes LSE from there. Candle differentiates LSE before O, as it is of O. Its gradient is left
//! in the pass, where that of O finds it: both take one backward pass.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, ThreadId};

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::BackendStorage;
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CustomOp1, CustomOp3, DType, Device, Layout, Result, Shape, Storage, Tensor};

use crate::attention::readable;
use crate::call::Call;
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::error::Error;
use crate::{Attention, Packed, cpu};

/// One forward pass.
struct Pass {
    attention: Attention,
    packed: Option<Packed>,
    /// LSE, once it is computed.
    lse: OnceLock<Tensor>,
    /// The gradient of LSE, until that of O is asked for, in each thread that differentiates.
    dlse: Mutex<HashMap<ThreadId, Tensor>>,
}

/// The results of a forward pass.
pub(crate) struct Computed {
    pass: Arc<Pass>,
    pub(crate) o: Tensor,
}

/// Computes O and LSE of tensors that lie as kernels read them.
///
/// # Errors
/// The call makes no sense, or the driver says no.
pub(crate) fn run(
    attention: &Attention,
    [q, k, v]: [Tensor; 3],
    packed: Option<&Packed>,
) -> Result<Computed> {
    let (attention, packed) = (attention.clone(), packed.cloned());
    let pass = Arc::new(Pass { attention, packed, lse: OnceLock::new(), dlse: Mutex::default() });
    let o = q.apply_op3(&k, &v, Output(Arc::clone(&pass)))?;
    Ok(Computed { pass, o })
}

impl Computed {
    /// O and LSE.
    ///
    /// # Errors
    /// The driver's.
    pub(crate) fn with_lse(self) -> Result<(Tensor, Tensor)> {
        let Computed { pass, o } = self;
        let lse = if o.track_op() { o.apply_op1(LogSumExp(pass))? } else { pass.lse().clone() };
        Ok((o, lse))
    }
}

impl Pass {
    fn lse(&self) -> &Tensor {
        self.lse.get().expect("O is computed, and LSE with it")
    }

    fn call(&self, inputs: [(DType, &Layout); 3]) -> Result<Call> {
        Ok(Call::new(&self.attention, inputs, self.packed.as_ref())?)
    }

    /// Keeps LSE, which was computed with O. A pass is run once.
    fn keep(&self, lse: Storage, call: &Call) {
        let lse = Tensor::from_storage(lse, call.lse_shape(), BackpropOp::none(), false);
        self.lse.get_or_init(|| lse);
    }

    /// Gradients of LSE that threads have left.
    fn dlse(&self) -> MutexGuard<'_, HashMap<ThreadId, Tensor>> {
        // What a panic left behind is a map of what was put there before.
        self.dlse.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// dQ, dK and dV, of the gradient of O and of that of LSE that this thread has left.
    fn gradients(
        &self,
        inputs: [&Tensor; 3],
        o: &Tensor,
        dout: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let dlse = self.dlse().remove(&thread::current().id());
        let call = self.call(inputs.map(|x| (x.dtype(), x.layout())))?;
        let dout = readable(&dout.detach())?;
        let given = Gradients {
            call,
            packed: self.packed.as_ref(),
            inputs,
            o,
            lse: self.lse(),
            dout: &dout,
            dlse: dlse.as_ref(),
        };
        let [dq, dk, dv] = match o.device() {
            Device::Cpu => cpu::backward(&given)?,
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => cuda::backward(&given, device, self.attention.deterministic)?,
            #[cfg(not(feature = "cuda"))]
            Device::Cuda(_) => return Err(Error::Device { given: o.device().location() }.into()),
            Device::Metal(_) => return Err(Error::Device { given: o.device().location() }.into()),
        };
        Ok((Some(dq), Some(dk), Some(dv)))
    }
}

/// A backward pass: its forward pass and the gradients that it starts from.
pub(crate) struct Gradients<'a> {
    pub(crate) call: Call,
    pub(crate) packed: Option<&'a Packed>,
    /// Q, K and V.
    pub(crate) inputs: [&'a Tensor; 3],
    pub(crate) o: &'a Tensor,
    /// LSE, contiguous.
    pub(crate) lse: &'a Tensor,
    pub(crate) dout: &'a Tensor,
    /// The gradient of LSE, contiguous.
    pub(crate) dlse: Option<&'a Tensor>,
}

/// The operation of O.
struct Output(Arc<Pass>);

impl CustomOp3 for Output {
    fn name(&self) -> &'static str {
        "fa3-attention"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let inputs = [(q, q_layout), (k, k_layout), (v, v_layout)];
        let call = self.0.call(inputs.map(|(x, layout)| (x.dtype(), layout)))?;
        let (o, lse) = cpu::forward(&call, self.0.packed.as_ref(), inputs)?;
        self.0.keep(Storage::Cpu(lse), &call);
        Ok((o, call.o_shape()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        q: &CudaStorage,
        q_layout: &Layout,
        k: &CudaStorage,
        k_layout: &Layout,
        v: &CudaStorage,
        v_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let inputs = [(q, q_layout), (k, k_layout), (v, v_layout)];
        let call = self.0.call(inputs.map(|(x, layout)| (x.dtype(), layout)))?;
        let (o, lse) = cuda::forward(&call, self.0.packed.as_ref(), inputs)?;
        self.0.keep(Storage::Cuda(lse), &call);
        Ok((o, call.o_shape()))
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        o: &Tensor,
        dout: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        self.0.gradients([q, k, v], o, dout)
    }
}

/// The operation of LSE, after that of O, of which it is one.
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
        let lse = self.0.lse();
        let (storage, layout) = lse.storage_and_layout();
        let Storage::Cuda(storage) = &*storage else {
            return Err(Error::Device { given: lse.device().location() }.into());
        };
        Ok((storage.try_clone(layout)?, layout.shape().clone()))
    }

    /// Leaves the gradient for that of O, to which it adds nothing.
    fn bwd(&self, o: &Tensor, _: &Tensor, dlse: &Tensor) -> Result<Option<Tensor>> {
        self.0.dlse().insert(thread::current().id(), dlse.detach().contiguous()?);
        Ok(Some(o.zeros_like()?))
    }
}
