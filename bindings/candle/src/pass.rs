//! A forward pass, which its operations share, and a backward pass.

use std::collections::HashMap;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread::{self, ThreadId};

use candle_core::op::BackpropOp;
use candle_core::{DType, Layout, Result, Storage, Tensor};

use crate::Attention;
use crate::call::Call;
use crate::rows::Rows;

/// One forward pass.
pub(crate) struct Pass {
    pub(crate) attention: Attention,
    pub(crate) rows: Rows,
    /// The sinks, f32 (heads_q), contiguous.
    pub(crate) sink: Option<Tensor>,
    /// LSE, once it is computed.
    pub(crate) lse: OnceLock<Tensor>,
    /// The gradient of LSE, until `op::Output` takes it.
    pub(crate) dlse: Left,
    /// The gradient of the sinks, until `op::Sinks` takes it.
    pub(crate) dsink: Left,
}

impl Pass {
    /// LSE, contiguous.
    pub(crate) fn lse(&self) -> &Tensor {
        self.lse.get().expect("O is computed, and LSE with it")
    }

    /// The lists and the sinks, by the kernels' names.
    #[cfg(feature = "cuda")]
    pub(crate) fn tensors(&self) -> impl Iterator<Item = (&'static str, &Tensor)> {
        let lists = self.rows.lists().map(|(name, list)| (name, &list.numbers));
        lists.chain(self.sink.iter().map(|sink| ("sink", sink)))
    }

    pub(crate) fn call(&self, inputs: [(DType, &Layout); 3]) -> Result<Call> {
        Ok(Call::new(&self.attention, inputs, &self.rows, self.sink.as_ref())?)
    }

    /// Keeps LSE, which was computed with O. A pass runs only once.
    pub(crate) fn keep(&self, lse: Storage, call: &Call) {
        let lse = Tensor::from_storage(lse, call.lse_shape(), BackpropOp::none(), false);
        self.lse.get_or_init(|| lse);
    }
}

/// A gradient that one operation leaves for another operation, separately for each thread that runs `backward`.
#[derive(Default)]
pub(crate) struct Left(Mutex<HashMap<ThreadId, Tensor>>);

impl Left {
    pub(crate) fn put(&self, gradient: Option<Tensor>) {
        // If another thread panicked, the map still has all gradients that were inserted.
        let mut map = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        map.extend(gradient.map(|gradient| (thread::current().id(), gradient)));
    }

    pub(crate) fn take(&self) -> Option<Tensor> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&thread::current().id())
    }
}

/// A backward pass: its forward pass and the gradients that it starts from.
pub(crate) struct Gradients<'a> {
    pub(crate) pass: &'a Pass,
    pub(crate) call: Call,
    /// Q, K and V.
    pub(crate) inputs: [&'a Tensor; 3],
    pub(crate) o: &'a Tensor,
    pub(crate) dout: Tensor,
    /// The gradient of LSE, contiguous.
    pub(crate) dlse: Option<Tensor>,
}
