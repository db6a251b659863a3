//! The queries of a forward pass.

use ndarray::{ArrayView1, ArrayView4, Axis};

/// Queries with their optional arrays.
#[derive(Clone, Copy, Debug)]
pub struct Queries<'a, T> {
    /// Queries (batch, seqlen_q, heads_q, head_dim).
    pub(crate) q: ArrayView4<'a, T>,
    /// The part of the queries that is multiplied by values, if any.
    pub(crate) qv: Option<ArrayView4<'a, T>>,
    /// The sinks of query heads, if any.
    pub(crate) sink: Option<ArrayView1<'a, f32>>,
}

impl<T> Queries<'_, T> {
    /// Reborrows the arrays.
    pub(super) fn view(&self) -> Queries<'_, T> {
        let qv = self.qv.as_ref().map(|qv| qv.view());
        Queries { q: self.q.view(), qv, sink: self.sink.as_ref().map(|sink| sink.view()) }
    }

    /// The depth of the product that gives scores. A query has the columns of `qv`, then of Q; a key has the columns of
    /// V, then of K.
    pub(super) fn score_columns(&self) -> usize {
        self.latent_columns() + self.q.len_of(Axis(3))
    }

    /// Number of columns of `qv`; 0 without it.
    pub(super) fn latent_columns(&self) -> usize {
        self.qv.map_or(0, |qv| qv.len_of(Axis(3)))
    }

    /// The sink of a query head; -inf without sinks.
    pub(super) fn sink(&self, head: usize) -> f32 {
        self.sink.map_or(f32::NEG_INFINITY, |sink| sink[head])
    }
}
