//! Checks of results. The oracle decides; expected results in the file are a second opinion.

mod gradients;
mod oracle;

use std::collections::BTreeSet;
use std::fmt;
use std::time::{Duration, Instant};

use fa3::{Output, Scalar};
use fa3_ref::InputError;
use fa3_ref::law::{LseTolerance, check_lse_within};
use fa3_ref::norms::{ErrorNorms, Worst};
use fa3_ref::rows::{RowViolation, SatisfiedRows};
use fa3_types::KnownProblem;
use ndarray::{Array3, Array4, ArrayView1, ArrayView4, IntoDimension};
use serde_json::{Value, json};

use super::error::Error;
use super::tensor::Tensor;
pub(super) use gradients::check as check_gradients;
pub(super) use oracle::Arithmetic;
use oracle::Oracle;

/// Expected results from the file.
pub(super) struct Expected {
    o: Option<Array4<f64>>,
    lse: Option<Array3<f64>>,
}

/// Which results are checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Judged {
    /// All results, even without expected ones.
    All,
    /// Only results for which the file has expected ones.
    Expected,
    /// No results.
    None,
}

/// The outcome of a check.
#[derive(Debug)]
pub(super) enum Check {
    /// The user does not want a check.
    Unwanted,
    /// There is no expected result.
    NothingExpected,
    /// The distance to the oracle, and to the expected results.
    Done { time: Duration, verdicts: Vec<Verdict>, opinions: Vec<Opinion> },
}

/// A result compared with the oracle, by the error law.
#[derive(Debug)]
pub(super) enum Verdict {
    /// A whole tensor, or some of its heads.
    Tensor {
        what: &'static str,
        norms: ErrorNorms,
        bound: f64,
        /// Text after the bound: a factor on the bound, or where the bound applies.
        unit: &'static str,
        holds: bool,
        heads: Option<Heads>,
    },
    /// The rows of O and LSE where errors are most likely to show, out of `of` rows.
    Rows { of: usize, outcome: Result<SatisfiedRows, RowViolation> },
}

/// The number of heads of K and V that were checked, out of `of`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Heads {
    judged: usize,
    of: usize,
}

/// O or LSE compared with the expected result.
#[derive(Debug)]
pub(super) struct Opinion {
    what: &'static str,
    norms: ErrorNorms,
    /// A likely mistake in the expected result, if the error law does not allow the difference.
    hint: Option<&'static str>,
}

const OTHER_SCORES: &str = "is it of another mask, scale or soft cap? the oracle decides";
const OTHER_ORDER: &str = "read as (batch, seqlen, heads), the file's lse would agree: is its shape right?";

impl Expected {
    /// The expected results, which must have the shapes of the problem's results.
    pub(super) fn new(
        problem: &KnownProblem,
        o: Option<Tensor>,
        lse: Option<Tensor>,
    ) -> Result<Expected, Error> {
        let o = o.map(|o| o.expected(problem.o().shape.dims().into_dimension()));
        let lse = lse.map(|lse| lse.expected(problem.lse_shape().into_dimension()));
        Ok(Expected { o: o.transpose()?, lse: lse.transpose()? })
    }

    pub(super) fn check<T: Scalar, O: Scalar>(
        self,
        judged: Judged,
        problem: &KnownProblem,
        inputs: [ArrayView4<'_, T>; 3],
        sink: Option<ArrayView1<'_, f32>>,
        arithmetic: Arithmetic,
        output: &Output<O>,
    ) -> Result<Check, InputError> {
        match judged {
            Judged::None => return Ok(Check::Unwanted),
            Judged::Expected if self.o.is_none() && self.lse.is_none() => return Ok(Check::NothingExpected),
            Judged::Expected | Judged::All => {}
        }
        let start = Instant::now();
        let oracle = Oracle::new(problem, inputs, sink, arithmetic)?;
        let o = output.o.mapv(Scalar::to_f32);
        let verdicts = oracle.verdicts(&o, &output.lse);
        let opinion_o = self.o.map(|expected| opinion_o(&o, &expected, oracle.bound));
        let opinion_lse = self.lse.map(|expected| opinion_lse(&output.lse, expected, oracle.tolerance));
        let opinions = opinion_o.into_iter().chain(opinion_lse).collect();
        Ok(Check::Done { time: start.elapsed(), verdicts, opinions })
    }
}

fn opinion_o(o: &Array4<f32>, expected: &Array4<f64>, bound: f64) -> Opinion {
    let norms = ErrorNorms::of(o, expected);
    let hint = (norms.max > bound).then_some(OTHER_SCORES);
    Opinion { what: "o", norms, hint }
}

fn opinion_lse(lse: &Array3<f32>, expected: Array3<f64>, tolerance: LseTolerance) -> Opinion {
    let norms = ErrorNorms::of(lse, &expected);
    let hint = match check_lse_within(tolerance, lse.view(), expected.view(), "") {
        Ok(_) => None,
        Err(_) if agrees_transposed(lse, expected, tolerance) => Some(OTHER_ORDER),
        Err(_) => Some(OTHER_SCORES),
    };
    Opinion { what: "lse", norms, hint }
}

/// Whether `expected`, read in (batch, seqlen, heads) order, agrees with LSE.
fn agrees_transposed(lse: &Array3<f32>, expected: Array3<f64>, tolerance: LseTolerance) -> bool {
    let (batch, heads, seqlen) = lse.dim();
    let Ok(expected) = expected.into_shape_with_order((batch, seqlen, heads)) else {
        return false;
    };
    check_lse_within(tolerance, lse.view(), expected.view().permuted_axes([0, 2, 1]), "").is_ok()
}

impl Check {
    /// Whether everything that was checked satisfies the error law.
    pub(super) fn holds(&self) -> bool {
        match self {
            Check::Unwanted | Check::NothingExpected => true,
            Check::Done { verdicts, .. } => verdicts.iter().all(Verdict::holds),
        }
    }

    /// The outcome as JSON; null if nothing was checked.
    pub(super) fn json(&self) -> Value {
        let Check::Done { time, verdicts, opinions } = self else { return Value::Null };
        json!({
            "seconds": time.as_secs_f64(),
            "holds": self.holds(),
            "oracle": verdicts.iter().map(Verdict::json).collect::<Vec<_>>(),
            "file": opinions.iter().map(Opinion::json).collect::<Vec<_>>(),
        })
    }
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("check   ")?;
        let (time, verdicts, opinions) = match self {
            Check::Unwanted => return f.write_str("none, because of --no-check"),
            Check::NothingExpected => {
                return f.write_str(
                    "none, nothing is expected of these tensors; --check asks the oracle all the same",
                );
            }
            Check::Done { time, verdicts, opinions } => (time, verdicts, opinions),
        };
        write!(f, "{:.2} s, against the oracle in f64", time.as_secs_f64())?;
        verdicts.iter().try_for_each(|verdict| write!(f, "\n  {verdict}"))?;
        opinions.iter().try_for_each(|opinion| write!(f, "\n  {opinion}"))?;
        let hints: BTreeSet<&str> = opinions.iter().filter_map(|opinion| opinion.hint).collect();
        hints.iter().try_for_each(|hint| write!(f, "\n          {hint}"))
    }
}

impl Verdict {
    fn holds(&self) -> bool {
        match self {
            Verdict::Tensor { holds, .. } => *holds,
            Verdict::Rows { outcome, .. } => outcome.is_ok(),
        }
    }

    fn json(&self) -> Value {
        match self {
            Verdict::Tensor { what, norms, bound, holds, heads, .. } => json!({
                "what": what, "max_error": norms.max, "rmse": norms.rmse, "allowed": bound, "holds": holds,
                "heads_kv": heads.map(|heads| heads.judged),
            }),
            Verdict::Rows { of, outcome } => json!({
                "what": "rows", "rows": outcome.as_ref().ok().map(|satisfied| satisfied.rows), "of": of,
                "error_of_allowed": outcome.as_ref().ok().map(|satisfied| satisfied.ratio),
                "holds": outcome.is_ok(), "worst": outcome.as_ref().err().map(ToString::to_string),
            }),
        }
    }
}

impl Opinion {
    fn json(&self) -> Value {
        let Opinion { what, norms, hint } = self;
        json!({ "what": what, "max_difference": norms.max, "rmse": norms.rmse, "agrees": hint.is_none() })
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (what, norms, bound, unit, holds, heads) = match self {
            Verdict::Tensor { what, norms, bound, unit, holds, heads } => {
                (what, norms, bound, unit, holds, heads)
            }
            Verdict::Rows { of, outcome: Ok(SatisfiedRows { rows, ratio }) } => {
                let ratio = Number(*ratio);
                return write!(
                    f,
                    "rows    {rows} of {of}, o and lse off by at most {ratio} of what is allowed"
                );
            }
            Verdict::Rows { outcome: Err(violation), .. } => {
                return write!(f, "rows    BREAK THE ERROR LAW: {violation}");
            }
        };
        let [max, rmse, bound] = [norms.max, norms.rmse, *bound].map(Number);
        write!(f, "{what:<8}max error {max}, rmse {rmse}, allowed {bound}{unit}")?;
        if let Some(Heads { judged, of }) = heads {
            write!(f, ", in {judged} of {of} heads")?;
        }
        match &norms.worst {
            Some(Worst { index, given, expected }) if !holds => {
                write!(f, "\n          BREAKS THE ERROR LAW, ")?;
                write!(f, "worst at {index:?}: {given:?}, expected {expected:?}")
            }
            Some(worst) => write!(f, ", worst at {:?}", worst.index),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Opinion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Opinion { what, norms, hint } = self;
        let [max, rmse] = [norms.max, norms.rmse].map(Number);
        write!(f, "file    {what} ")?;
        match &norms.worst {
            Some(Worst { index, given, expected }) if hint.is_some() => {
                write!(f, "DIFFERS by up to {max}, rmse {rmse}, ")?;
                write!(f, "most at {index:?}: {given:?}, the file has {expected:?}")
            }
            _ => write!(f, "agrees, max difference {max}, rmse {rmse}"),
        }
    }
}

/// Formats three digits, with an exponent only for very large and very small numbers.
pub(super) struct Number(pub(super) f64);

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Number(x) = *self;
        match x.abs() {
            0.0 => f.write_str("0"),
            size if (1e-3..1e4).contains(&size) => {
                let digits_after_point = (2.0 - size.log10().floor()).max(0.0) as usize;
                write!(f, "{x:.digits_after_point$}")
            }
            _ => write!(f, "{x:.2e}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fa3::{Attention, Device};
    use fa3_quant::{Accumulation, E4m3, Fp8Attention, Granularity, Quantized};
    use half::bf16;

    /// Four query heads on two KV heads.
    pub(super) fn qkv() -> [Array4<f32>; 3] {
        [(4, 0.3), (2, 0.5), (2, 0.7)].map(|(heads, step)| {
            Array4::from_shape_fn((1, 20, heads, 16), |(_, s, h, d)| {
                (step * (s + 7 * h + 3 * d) as f32).sin()
            })
        })
    }

    /// Checks results that the file agrees with.
    fn check<T: Scalar, O: Scalar + Into<f64>>(
        problem: &KnownProblem,
        qkv: [ArrayView4<'_, T>; 3],
        arithmetic: Arithmetic,
        output: &Output<O>,
    ) -> Check {
        let (o, lse) = (output.o.mapv(Into::into), output.lse.mapv(f64::from));
        let expected = Expected { o: Some(o), lse: Some(lse) };
        expected.check(Judged::Expected, problem, qkv, None, arithmetic, output).unwrap()
    }

    #[test]
    fn a_wrong_result_breaks_the_law_whatever_the_file_says() {
        let qkv = qkv();
        let [q, k, v] = qkv.each_ref().map(|x| x.view());
        let attention = Attention::new(q, k, v);
        let problem = attention.problem().unwrap();
        let mut output = attention.forward(&Device::Cpu).unwrap();
        let check = |output: &Output<f32>| check(&problem, [q, k, v], Arithmetic::OfInputs, output);
        assert!(check(&output).holds());
        output.lse[[0, 1, 7]] += 1.0;
        let lse = check(&output);
        assert!(!lse.holds() && lse.to_string().matches("BREAKS THE ERROR LAW").count() == 1, "{lse}");
        output.o[[0, 19, 3, 7]] = f32::NAN;
        let both = check(&output).to_string();
        assert!(both.matches("BREAKS THE ERROR LAW").count() == 2 && !both.contains("DIFFERS"), "{both}");
    }

    /// FP8 results satisfy the FP8 error law, but not the law of bf16.
    #[test]
    fn eight_bit_products_have_a_law_of_their_own() {
        let qkv = qkv().map(|x| x.mapv(|x| E4m3::from_f32(2.0 * x)));
        let [q, k, v] = qkv.each_ref().map(|x| x.view());
        let problem = Attention::new(q, k, v).causal().problem().unwrap();
        let codes = |x: &Array4<E4m3>, sequences| {
            Quantized::new(x.clone(), sequences, Granularity::Tensor, vec![1.0]).unwrap()
        };
        let [q8, k8, v8] = [(0, problem.rows_q()), (1, problem.rows_k()), (2, problem.rows_k())]
            .map(|(at, sequences)| codes(&qkv[at], sequences));
        let fp8 = Fp8Attention::new(Accumulation::TwoLevel { keys: 128 }, 128);
        let fp8 = fp8.forward(&problem, &q8, &k8, &v8).unwrap();
        let mut output = Output::new(fp8.o.mapv(bf16::from_f32), fp8.lse);
        let check = |arithmetic, output: &Output<bf16>| check(&problem, [q, k, v], arithmetic, output);
        assert!(check(Arithmetic::Fp8, &output).holds());
        assert!(!check(Arithmetic::OfInputs, &output).holds());
        output.lse[[0, 1, 7]] += 0.2;
        assert!(!check(Arithmetic::Fp8, &output).holds());
        output.lse[[0, 1, 7]] -= 0.2;
        output.o[[0, 19, 3, 7]] = bf16::from_f32(2.0);
        assert!(!check(Arithmetic::Fp8, &output).holds());
    }

    #[test]
    fn numbers_are_plain_where_they_can_be() {
        let shown = |x| Number(x).to_string();
        assert_eq!(
            [0.001, 0.02346, 1.784, 9.996, 123.4, 9999.0].map(shown),
            ["0.00100", "0.0235", "1.78", "10.00", "123", "9999"]
        );
        assert_eq!(
            [0.0, 9.87e-4, 1e4, f64::INFINITY, f64::NAN].map(shown),
            ["0", "9.87e-4", "1.00e4", "inf", "NaN"]
        );
    }
}
