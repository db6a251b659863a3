//! The arrays that a forward pass reads.

use ndarray::{ArrayView1, ArrayView4, Axis};

/// Q, K and V, and what some calls have beside them. The views have the problem's shapes: all come from one
/// [`crate::Attention`] or [`crate::CachedAttention`].
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a, T> {
    /// Queries, keys and values.
    pub(crate) qkv: [ArrayView4<'a, T>; 3],
    /// The part of the queries that is multiplied by values, if there is one.
    pub(crate) qv: Option<ArrayView4<'a, T>>,
    /// The sinks of query heads, if they have some.
    pub(crate) sink: Option<ArrayView1<'a, f32>>,
}

impl<T> Inputs<'_, T> {
    /// The same arrays, borrowed for a shorter time.
    pub(super) fn view(&self) -> Inputs<'_, T> {
        Inputs {
            qkv: self.qkv.each_ref().map(|x| x.view()),
            qv: self.qv.as_ref().map(|qv| qv.view()),
            sink: self.sink.as_ref().map(|sink| sink.view()),
        }
    }

    /// Columns of a query whose products are scores: those of `qv`, and those of Q behind them. A key has as many,
    /// those of V before those of K.
    pub(super) fn score_columns(&self) -> usize {
        self.latent_columns() + self.qkv[0].len_of(Axis(3))
    }

    /// Columns of `qv`; 0 without one.
    pub(super) fn latent_columns(&self) -> usize {
        self.qv.map_or(0, |qv| qv.len_of(Axis(3)))
    }

    /// The sink of a query head; -inf if it has none.
    pub(super) fn sink(&self, head: usize) -> f32 {
        self.sink.map_or(f32::NEG_INFINITY, |sink| sink[head])
    }
}
