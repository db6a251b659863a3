//! Attention sinks: logits of query heads in the softmax's denominator.

use fa3_types::KnownProblem;
use ndarray::ArrayView1;

use crate::{Output, QuantError};

/// Adds the sinks (heads_q) of a problem to O and LSE that were computed without sinks:
///
/// ```text
/// LSE' = ln (exp(sink) + exp(LSE))        O' = exp(LSE - LSE') · O
/// ```
///
/// A row of a sequence that has seen no key keeps O = 0, and its LSE is the sink.
///
/// # Errors
/// [`QuantError::Sinks`] if the number of sinks is wrong.
pub fn add_sinks(
    problem: &KnownProblem,
    sinks: ArrayView1<'_, f32>,
    output: &mut Output,
) -> Result<(), QuantError> {
    let expected = if problem.has_sink() { problem.heads().q() } else { 0 };
    if sinks.len() != expected {
        return Err(QuantError::Sinks { given: sinks.len(), expected });
    }
    for (sequence, (head, &sink)) in
        (0..problem.batch()).flat_map(|sequence| sinks.iter().enumerate().map(move |of| (sequence, of)))
    {
        let (batch, first) = problem.rows_q().start(sequence);
        for row in first..first + problem.lengths(sequence).q {
            let lse = &mut output.lse[[batch, head, row]];
            let largest = lse.max(sink);
            if largest == f32::NEG_INFINITY {
                continue;
            }
            let keys = (*lse - largest).exp();
            let of_sink = if sink == largest { 1.0 } else { (sink - largest).exp() };
            let sum = keys + of_sink;
            *lse = largest + sum.ln();
            (0..problem.head_dim_v()).for_each(|column| output.o[[batch, row, head, column]] *= keys / sum);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use fa3_types::{Dtype, ProblemSpec, SequenceRows, Shape};
    use ndarray::{Array3, Array4, array};

    use super::*;

    /// Two of three rows are valid. LSE without sinks is ln 3, or 0.
    #[test]
    fn a_sink_takes_its_part() {
        let shape = Shape { batch: 1, seqlen: 3, heads: 2, head_dim: 16 };
        let spec = ProblemSpec::dense(Dtype::E4m3, shape, shape).sink();
        let rows_q = SequenceRows::dense(1, 3).with_used(&[2]).unwrap();
        let problem = spec.with_rows(rows_q, SequenceRows::dense(1, 3)).unwrap();
        let none = f32::NEG_INFINITY;
        let (o, lse) = (Array4::ones(shape.dims()), array![[[3f32.ln(), none, none], [0.0, 0.0, none]]]);
        let mut output = Output { o, lse };
        add_sinks(&problem, array![0.0, none].view(), &mut output).unwrap();
        let expected: Array3<f32> = array![[[4f32.ln(), 0.0, none], [0.0, 0.0, none]]];
        assert!(
            output.lse.iter().zip(&expected).all(|(x, y)| x == y || (x - y).abs() < 1e-6),
            "{}",
            output.lse
        );
        let first = |row, head| output.o[[0, row, head, 0]];
        assert!((first(0, 0) - 0.75).abs() < 1e-6);
        assert_eq!([first(1, 0), first(2, 0), first(0, 1), first(2, 1)], [0.0, 1.0, 1.0, 1.0]);
        // The sinks are far above all scores.
        for sink in [1e30, f32::INFINITY] {
            add_sinks(&problem, array![sink, sink].view(), &mut output).unwrap();
            assert_eq!((output.lse[[0, 1, 1]], output.o[[0, 1, 1, 5]]), (sink, 0.0));
        }
        let error = add_sinks(&problem, array![0.0].view(), &mut output).unwrap_err();
        assert_eq!(error, QuantError::Sinks { given: 1, expected: 2 });
    }
}
