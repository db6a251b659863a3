//! The right O and LSE, and the error that is allowed.

use fa3::Scalar;
use fa3_ref::law::{ForwardLaw, LseTolerance, check_lse_within};
use fa3_ref::norms::ErrorNorms;
use fa3_ref::rows::{RowsLaw, telling_rows};
use fa3_ref::{InputError, Inputs, Precision};
use fa3_types::{KnownProblem, SequenceRows, Shape, TensorDesc};
use ndarray::{Array3, Array4, ArrayView1, ArrayView4, Axis, Slice};

use super::Verdict;
use crate::{fp8, progress};

/// The FLOP of a forward pass whose oracle takes about ten seconds. For larger problems only some rows are checked, and
/// only some heads of gradients.
pub(super) const MOST_FLOPS: f64 = 2e10;

/// Rows of the tiles of the CPU engine and of the GPU kernels.
const TILE_ROWS: [usize; 3] = [64, 128, 192];

/// How a result was computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::run) enum Arithmetic {
    /// The call computes with the inputs' values, and does not round P to e4m3.
    OfInputs,
    /// The call multiplies e4m3 numbers, and rounds P to e4m3.
    Fp8,
}

/// The right result, and the errors that are allowed.
pub(super) struct Oracle {
    right: Right,
    /// The allowed error of O.
    pub(super) bound: f64,
    /// The allowed error of LSE.
    pub(super) tolerance: LseTolerance,
}

enum Right {
    /// All rows.
    Whole { o: Array4<f64>, lse: Array3<f64> },
    /// Some rows, out of `of`.
    Rows { law: RowsLaw, of: usize },
}

impl Oracle {
    pub(super) fn new<T: Scalar>(
        problem: &KnownProblem,
        inputs: [ArrayView4<'_, T>; 3],
        sink: Option<ArrayView1<'_, f32>>,
        arithmetic: Arithmetic,
    ) -> Result<Oracle, InputError> {
        match problem.forward_flops() {
            // The rows of a problem with a function of scores are no problems of their own.
            flops if flops <= MOST_FLOPS || problem.score().is_some() => {
                Oracle::whole(problem, inputs, sink, arithmetic)
            }
            _ => Oracle::rows(problem, inputs, sink, arithmetic),
        }
    }

    /// Runs the oracle for each key/value head with its query heads as a separate problem. The largest of the bounds is
    /// at most the error law's bound for the whole problem.
    fn whole<T: Scalar>(
        problem: &KnownProblem,
        inputs: [ArrayView4<'_, T>; 3],
        sink: Option<ArrayView1<'_, f32>>,
        arithmetic: Arithmetic,
    ) -> Result<Oracle, InputError> {
        let mut o = Array4::zeros(problem.o().shape.dims());
        let mut lse = Array3::from_elem(problem.lse_shape(), f64::NEG_INFINITY);
        let mut bound = 0.0f64;
        let mut tolerance = arithmetic.tolerance(problem);
        if o.is_empty() {
            return Ok(Oracle { right: Right::Whole { o, lse }, bound, tolerance });
        }
        let parts = Parts::of(problem);
        let progress = bar(parts.count);
        for index in 0..parts.count {
            let [own, shared] = parts.heads(index);
            let [q, k, v] = inputs;
            let [q, k, v] = [(q, own), (k, shared), (v, shared)]
                .map(|(x, heads)| x.slice_axis(Axis(2), heads).mapv(T::to_f32));
            let sink = sink.map(|sink| sink.slice_axis_move(Axis(0), own));
            let inputs = Inputs::with_sink(&parts.part, [q.view(), k.view(), v.view()], sink)?;
            let law = arithmetic.law(&inputs);
            o.slice_axis_mut(Axis(2), own).assign(&law.oracle().o);
            lse.slice_axis_mut(Axis(1), own).assign(&law.oracle().lse);
            bound = bound.max(law.bound());
            tolerance.absolute += law.lse_tolerance().absolute;
            progress.inc(1);
        }
        progress.finish_and_clear();
        Ok(Oracle { right: Right::Whole { o, lse }, bound, tolerance })
    }

    /// Runs the oracle for the rows where errors are most likely to show.
    fn rows<T: Scalar>(
        problem: &KnownProblem,
        inputs: [ArrayView4<'_, T>; 3],
        sink: Option<ArrayView1<'_, f32>>,
        arithmetic: Arithmetic,
    ) -> Result<Oracle, InputError> {
        let progress = bar(1);
        let [q, k, v] = inputs.map(|x| x.mapv(T::to_f32));
        let inputs = Inputs::with_sink(problem, [q.view(), k.view(), v.view()], sink)?;
        let (rows, tolerance) = (telling_rows(problem, &TILE_ROWS), arithmetic.tolerance(problem));
        let law = RowsLaw::with(&inputs, &rows, tolerance, |inputs| arithmetic.law(inputs));
        progress.finish_and_clear();
        let rows: usize = (0..problem.batch()).map(|sequence| problem.lengths(sequence).q).sum();
        let (bound, of) = (law.bound(), rows * problem.heads().q());
        Ok(Oracle { right: Right::Rows { law, of }, bound, tolerance })
    }

    pub(super) fn verdicts(&self, o: &Array4<f32>, lse: &Array3<f32>) -> Vec<Verdict> {
        match &self.right {
            Right::Whole { o: expected, lse: expected_lse } => {
                let lse = verdict_of_lse(lse, expected_lse, self.tolerance);
                vec![verdict_of_o(o, expected, self.bound), lse]
            }
            Right::Rows { law, of } => {
                vec![Verdict::Rows { of: *of, outcome: law.check(o.view(), lse.view()) }]
            }
        }
    }
}

fn verdict_of_o(o: &Array4<f32>, expected: &Array4<f64>, bound: f64) -> Verdict {
    let norms = ErrorNorms::of(o, expected);
    let holds = norms.max <= bound;
    Verdict::Tensor { what: "o", norms, bound, unit: "", holds, heads: None }
}

fn verdict_of_lse(lse: &Array3<f32>, expected: &Array3<f64>, tolerance: LseTolerance) -> Verdict {
    let (norms, bound, holds) = match check_lse_within(tolerance, lse.view(), expected.view(), "") {
        Ok(satisfied) => (satisfied.norms, satisfied.bound, true),
        Err(violation) => (violation.norms, violation.bound, false),
    };
    let is_relative = tolerance.absolute == 0.0;
    let unit = if is_relative { " max(1, |lse|)" } else { " where |lse| is up to 1" };
    Verdict::Tensor { what: "lse", norms, bound, unit, holds, heads: None }
}

impl Arithmetic {
    fn tolerance(self, problem: &KnownProblem) -> LseTolerance {
        match self {
            Arithmetic::OfInputs => LseTolerance::F32,
            Arithmetic::Fp8 => fp8::lse_tolerance(problem),
        }
    }

    fn law(self, inputs: &Inputs<'_, f32>) -> ForwardLaw {
        let law = ForwardLaw::new(inputs, Precision::of_output(inputs.problem().dtype()));
        match self {
            Arithmetic::OfInputs => law,
            Arithmetic::Fp8 => fp8::law(&law, inputs, [inputs.q(), inputs.k(), inputs.v()], None),
        }
    }
}

/// A progress bar for a check.
pub(super) fn bar(steps: usize) -> indicatif::ProgressBar {
    progress::late_bar(steps as u64).with_message("checks against the oracle; --no-check leaves that out")
}

/// The parts of a problem that are checked one by one: each key/value head with its query heads. A function of scores
/// may depend on the head, so there is one part with such a function.
pub(super) struct Parts {
    /// A part as a problem.
    pub(super) part: KnownProblem,
    /// The number of parts.
    pub(super) count: usize,
}

impl Parts {
    pub(super) fn of(problem: &KnownProblem) -> Parts {
        if problem.score().is_some() {
            return Parts { part: problem.clone(), count: 1 };
        }
        let (mut spec, group) = (problem.spec(), problem.heads().group_size());
        for (x, heads) in [(&mut spec.q, group), (&mut spec.o, group), (&mut spec.k, 1), (&mut spec.v, 1)] {
            *x = TensorDesc::contiguous(x.dtype, Shape { heads, ..x.shape });
        }
        let [rows_q, rows_k] = [problem.rows_q(), problem.rows_k()].map(SequenceRows::clone);
        let part = spec.with_rows(rows_q, rows_k).expect("some heads of a valid problem are one");
        Parts { part, count: problem.heads().kv() }
    }

    /// The query heads and the key/value heads of part `index`.
    pub(super) fn heads(&self, index: usize) -> [Slice; 2] {
        let heads = self.part.heads();
        [heads.q(), heads.kv()].map(|heads| Slice::from(index * heads..(index + 1) * heads))
    }
}

#[cfg(test)]
mod tests {
    use fa3::{Attention, Device};
    use fa3_quant::E4m3;
    use half::bf16;

    use super::super::tests::qkv;
    use super::*;

    #[test]
    fn the_oracle_is_that_of_all_heads() {
        let qkv = qkv();
        let [q, k, v] = qkv.each_ref().map(|x| x.view());
        let attention = Attention::new(q, k, v).window(Some(5), Some(1)).softcap(3.0).softmax_scale(0.7);
        let problem = attention.seqused_k(&[17]).problem().unwrap();
        let oracle = Oracle::new(&problem, [q, k, v], None, Arithmetic::OfInputs).unwrap();
        let Oracle { right: Right::Whole { o, lse }, bound, .. } = oracle else {
            panic!("the problem is small")
        };
        let law = ForwardLaw::new(&Inputs::new(&problem, q, k, v).unwrap(), Precision::F32);
        assert_eq!((o, lse), (law.oracle().o.clone(), law.oracle().lse.clone()));
        assert!(bound > 0.0 && bound <= law.bound());
    }

    /// In every arithmetic, results that are right in all rows are right in a selection, and an error in a selected row
    /// is found.
    #[test]
    fn some_rows_are_judged_as_all_are() {
        let qkv = qkv().map(|x| x.mapv(E4m3::from_f32));
        let [q, k, v] = qkv.each_ref().map(|x| x.view());
        let attention = Attention::new(q, k, v).causal();
        let problem = attention.problem().unwrap();
        let output = attention.forward(&Device::Cpu).unwrap();
        let (mut o, lse) = (output.o.mapv(bf16::to_f32), output.lse);
        for arithmetic in [Arithmetic::OfInputs, Arithmetic::Fp8] {
            let oracle = Oracle::rows(&problem, [q, k, v], None, arithmetic).unwrap();
            assert!(oracle.verdicts(&o, &lse).iter().all(Verdict::holds));
            o[[0, 19, 3, 7]] += 1.0;
            let [verdict] = oracle.verdicts(&o, &lse).try_into().unwrap();
            assert!(!verdict.holds());
            assert!(
                verdict.to_string().starts_with("rows    BREAK THE ERROR LAW: o at [0, 19, 3, 7]"),
                "{verdict}"
            );
            o[[0, 19, 3, 7]] -= 1.0;
        }
    }
}
