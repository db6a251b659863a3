//! Gradients: inputs and results of the backward pass.

use ndarray::{Array1, Array4, ArrayView3, ArrayView4};

/// The gradients of O and LSE, the input of [`Attention::backward`](crate::Attention::backward). An array of the
/// gradient of O, or a view of one, converts to this type.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct OutputGradients<'a, T> {
    /// dO (batch, seqlen_q, heads_q, head_dim_v).
    pub dout: ArrayView4<'a, T>,
    /// dLSE (batch, heads_q, seqlen_q). `None` counts as zeros.
    pub dlse: Option<ArrayView3<'a, f32>>,
}

impl<'a, T> OutputGradients<'a, T> {
    /// The gradient of O, without a gradient of LSE.
    pub fn new(dout: impl Into<ArrayView4<'a, T>>) -> OutputGradients<'a, T> {
        OutputGradients { dout: dout.into(), dlse: None }
    }

    /// Sets the gradient of LSE.
    #[must_use]
    pub fn dlse(self, dlse: impl Into<ArrayView3<'a, f32>>) -> OutputGradients<'a, T> {
        OutputGradients { dlse: Some(dlse.into()), ..self }
    }
}

impl<'a, T> From<ArrayView4<'a, T>> for OutputGradients<'a, T> {
    fn from(dout: ArrayView4<'a, T>) -> OutputGradients<'a, T> {
        OutputGradients::new(dout)
    }
}

impl<'a, T> From<&'a Array4<T>> for OutputGradients<'a, T> {
    fn from(dout: &'a Array4<T>) -> OutputGradients<'a, T> {
        OutputGradients::new(dout)
    }
}

/// The result of the backward pass.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Gradients<T> {
    /// dQ (batch, seqlen_q, heads_q, head_dim). It is 0 in rows that see no key or lie outside every sequence.
    pub dq: Array4<T>,
    /// dK (batch, seqlen_k, heads_kv, head_dim), summed over the query heads that share a key/value head. It is 0 in
    /// rows that no query sees or that lie outside every sequence.
    pub dk: Array4<T>,
    /// dV (batch, seqlen_k, heads_kv, head_dim_v), summed over the same query heads. It is 0 in the same rows as dK.
    pub dv: Array4<T>,
    /// dsink (heads_q), if the call has sinks.
    pub dsink: Option<Array1<f32>>,
    /// The gradients of the tables of the function of scores, in the order of
    /// [`ScoreFunction::tables`](crate::ScoreFunction::tables), each in row-major order. A table without
    /// [gradient](crate::ScoreTable::with_gradient) has no elements here, and if no table has one, there are no tables.
    pub dtables: Vec<Vec<f32>>,
}

impl<T> Gradients<T> {
    /// dQ, dK and dV of a call without sinks and tables with gradients.
    pub fn new([dq, dk, dv]: [Array4<T>; 3]) -> Gradients<T> {
        Gradients { dq, dk, dv, dsink: None, dtables: vec![] }
    }
}
