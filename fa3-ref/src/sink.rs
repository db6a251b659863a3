//! The gradient of sinks: dsink = Σ exp(sink - LSE) · (dLSE - D) over the rows of a head, with D = rowsum(dO ∘ O).
//!
//! A sink is the logit of a key without a value, so its dP is 0 and dS of its column is P · (0 - D + dLSE). A row that
//! sees no key has O = 0 and LSE = sink, so it contributes dLSE.

use fa3_types::Problem;
use ndarray::{Array1, ArrayView1, Axis};

use crate::inputs::{Heads, OutputHeads};
use crate::{Forward, InputError};

/// The values of one row of a query head for the gradient of the sink.
pub(crate) struct Row {
    /// The sink's P, exp(sink - LSE).
    pub(crate) p: f64,
    /// dLSE.
    pub(crate) dlse: f64,
    /// The terms of D, dO ∘ O.
    pub(crate) products: Vec<f64>,
}

impl Row {
    /// The row's part of dsink.
    pub(crate) fn gradient(&self) -> f64 {
        self.p * (self.dlse - self.products.iter().sum::<f64>())
    }

    /// The sum of the squares of the terms that contain O.
    pub(crate) fn square(&self) -> f64 {
        self.products.iter().map(|x| (self.p * x).powi(2)).sum()
    }

    /// The sum of the absolute values of the terms of [`Row::gradient`].
    pub(crate) fn magnitude(&self) -> f64 {
        self.p * (self.dlse.abs() + self.products.iter().map(|x| x.abs()).sum::<f64>())
    }
}

/// The sum of `term` over the rows of each query head (heads_q), of all sequences, given O and LSE. `None` if the
/// problem has no sinks.
pub(crate) fn sums<F: Copy + Into<f64>>(
    inputs: &dyn Heads,
    output: &dyn OutputHeads,
    forward: impl FnOnce() -> Forward<F>,
    term: impl Fn(Row) -> f64,
) -> Option<Array1<f64>> {
    let (problem, sinks) = (inputs.problem(), inputs.sinks()?);
    let Forward { o, lse } = forward();
    let of_head = |(head, &sink): (usize, &f32)| {
        let sequences = (0..problem.batch()).map(|index| {
            let (batch, first) = problem.rows_q().start(index);
            let (dout, dlse) = output.head(problem, index, head);
            let rows = dout.rows().into_iter().zip(dlse).enumerate().map(|(row, (dout, dlse))| {
                let lse: f64 = lse[[batch, head, first + row]].into();
                // The row sees no key, and its sink is -inf.
                if lse == f64::NEG_INFINITY {
                    return 0.0;
                }
                let o = o.index_axis(Axis(0), batch).index_axis_move(Axis(0), first + row);
                let products =
                    o.index_axis(Axis(0), head).iter().zip(dout).map(|(&o, dout)| o.into() * dout).collect();
                term(Row { p: exp_from(sink.into(), lse), dlse, products })
            });
            rows.sum::<f64>()
        });
        sequences.sum()
    };
    Some(sinks.iter().enumerate().map(of_head).collect())
}

/// exp(sink - reference), for a reference that is not below the sink: 1 where both are infinite.
pub(crate) fn exp_from(sink: f64, reference: f64) -> f64 {
    if sink == reference { 1.0 } else { (sink - reference).exp() }
}

/// Checks the number of sinks.
pub(crate) fn check(sink: Option<&ArrayView1<'_, f32>>, problem: &Problem) -> Result<(), InputError> {
    let expected = if problem.has_sink() { problem.heads().q() } else { 0 };
    match sink.map_or(0, ArrayView1::len) {
        given if given != expected => Err(InputError::Sinks { given, expected }),
        _ => Ok(()),
    }
}
