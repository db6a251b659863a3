//! The gradient of sinks: dsink = Σ exp(sink - LSE) · (dLSE - D) over the rows of a query head, with D = rowsum(dO ∘
//! O).

use ndarray::{Array1, ArrayView1};
use rayon::prelude::*;

use super::Call;
use crate::Scalar;
use crate::cpu::rows::Rows;

/// dsink (heads_q).
pub(super) fn gradient<T: Scalar>(call: &Call<'_, T>, sink: ArrayView1<'_, f32>) -> Array1<f32> {
    let sequences = if call.o.is_empty() { 0 } else { call.problem.batch() };
    let of_head = |head: usize| {
        let rows = (0..sequences).map(|index| of_rows(call, index, head, sink[head]));
        rows.sum::<f64>() as f32
    };
    (0..sink.len()).into_par_iter().map(of_head).collect::<Vec<f32>>().into()
}

/// The sum over the rows of one sequence.
fn of_rows<T: Scalar>(call: &Call<'_, T>, index: usize, head: usize, sink: f32) -> f64 {
    let (batch, first) = call.problem.rows_q().start(index);
    let rows = first..first + call.problem.lengths(index).q;
    let [o, dout] = [call.o, call.dout].map(|x| Rows::of(x, batch, rows.clone(), head));
    let [mut o_row, mut dout_row] = [vec![0.0; o.columns()], vec![0.0; o.columns()]];
    let of_row = |row: usize| {
        let lse = call.lse[[batch, head, row]];
        if lse == f32::NEG_INFINITY {
            // The row sees no key, and its sink is -inf.
            return 0.0;
        }
        o.read(row - first, &mut o_row);
        dout.read(row - first, &mut dout_row);
        let delta: f32 = o_row.iter().zip(&dout_row).map(|(o, dout)| o * dout).sum();
        let dlse = call.dlse.map_or(0.0, |dlse| dlse[[batch, head, row]]);
        // LSE is not below the sink, but for rounding. The difference of two infinities counts as 0.
        f64::from(sink - lse).min(0.0).exp() * f64::from(dlse - delta)
    };
    rows.map(of_row).sum()
}
