//! Whether a result is right. The oracle decides; what somebody else computed is a second opinion.

use std::collections::BTreeSet;
use std::fmt;
use std::time::{Duration, Instant};

use fa3::{Output, Scalar};
use fa3_ref::law::{ForwardLaw, LseTolerance, check_lse_within};
use fa3_ref::norms::{ErrorNorms, Worst};
use fa3_ref::{InputError, Inputs, Precision};
use fa3_types::{Problem, ProblemSpec, Shape, TensorDesc};
use ndarray::{Array3, Array4, ArrayView4, Axis, IntoDimension, Slice};

use super::error::Error;
use super::tensor::Tensor;
use crate::{fp8, progress};

/// What somebody else computed.
pub(super) struct Expected {
    o: Option<Array4<f64>>,
    lse: Option<Array3<f64>>,
}

/// What is known of a result.
#[derive(Debug)]
pub(super) enum Check {
    /// Nothing, since nobody wants to know.
    Unwanted,
    /// Nothing, since nothing is expected.
    NothingExpected,
    /// How far it is from the oracle, and from what was expected.
    Done { time: Duration, verdicts: Vec<Verdict>, opinions: Vec<Opinion> },
}

/// O or LSE against the oracle, by the error law.
#[derive(Debug)]
pub(super) struct Verdict {
    what: &'static str,
    norms: ErrorNorms,
    bound: f64,
    /// What the bound is multiplied with, or where it holds.
    unit: &'static str,
    holds: bool,
}

/// O or LSE against what was expected.
#[derive(Debug)]
pub(super) struct Opinion {
    what: &'static str,
    norms: ErrorNorms,
    /// What may be wrong with what was expected, if it is further off than the error law allows.
    hint: Option<&'static str>,
}

/// The right result, and how far O and LSE may be from it.
struct Truth {
    o: Array4<f64>,
    lse: Array3<f64>,
    bound: f64,
    /// Of LSE.
    tolerance: LseTolerance,
}

/// How a result was computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arithmetic {
    /// With the inputs as they are.
    OfInputs,
    /// In products of e4m3, which P is rounded to.
    Fp8,
}

const OTHER_SCORES: &str = "is it of another mask, scale or soft cap? the oracle decides";
const OTHER_ORDER: &str = "read as (batch, seqlen, heads), the file's lse would agree: is its shape right?";

impl Expected {
    /// Takes the tensors, whose shapes must be those of the problem's results.
    pub(super) fn new(problem: &Problem, o: Option<Tensor>, lse: Option<Tensor>) -> Result<Expected, Error> {
        let o = o.map(|o| o.expected(problem.o().shape.dims().into_dimension()));
        let lse = lse.map(|lse| lse.expected(problem.lse_shape().into_dimension()));
        Ok(Expected { o: o.transpose()?, lse: lse.transpose()? })
    }

    /// Judges O and LSE, if anything is expected of them.
    pub(super) fn check<T: Scalar>(
        self,
        problem: &Problem,
        inputs: [ArrayView4<'_, T>; 3],
        arithmetic: Arithmetic,
        output: &Output<T::Output>,
    ) -> Result<Check, InputError> {
        if self.o.is_none() && self.lse.is_none() {
            return Ok(Check::NothingExpected);
        }
        let start = Instant::now();
        let truth = Truth::new(problem, inputs, arithmetic)?;
        let o = output.o.mapv(Scalar::to_f32);
        let verdicts = vec![truth.verdict_o(&o), truth.verdict_lse(&output.lse)];
        let opinion_o = self.o.map(|expected| opinion_o(&o, &expected, truth.bound));
        let opinion_lse = self.lse.map(|expected| opinion_lse(&output.lse, expected, truth.tolerance));
        let opinions = opinion_o.into_iter().chain(opinion_lse).collect();
        Ok(Check::Done { time: start.elapsed(), verdicts, opinions })
    }
}

impl Truth {
    /// Runs the oracle for one key/value head after the other, with the query heads that share it: each is a problem
    /// of its own. The largest of their bounds is no more than what the error law allows the whole.
    fn new<T: Scalar>(
        problem: &Problem,
        inputs: [ArrayView4<'_, T>; 3],
        arithmetic: Arithmetic,
    ) -> Result<Truth, InputError> {
        let mut o = Array4::zeros(problem.o().shape.dims());
        let mut lse = Array3::from_elem(problem.lse_shape(), f64::NEG_INFINITY);
        let mut bound = 0.0f64;
        let tolerance = match arithmetic {
            Arithmetic::OfInputs => LseTolerance::F32,
            Arithmetic::Fp8 => fp8::lse_tolerance(problem),
        };
        if o.is_empty() {
            return Ok(Truth { o, lse, bound, tolerance });
        }
        let (part, group) = (one_kv_head(problem), problem.heads().group_size());
        let progress = progress::late_bar(problem.heads().kv() as u64);
        progress.set_message("checks against the oracle; --no-check leaves that out");
        for head in 0..problem.heads().kv() {
            let (own, shared) = (Slice::from(head * group..(head + 1) * group), Slice::from(head..head + 1));
            let [q, k, v] = inputs;
            let [q, k, v] = [(q, own), (k, shared), (v, shared)]
                .map(|(x, heads)| x.slice_axis(Axis(2), heads).mapv(T::to_f32));
            let inputs = Inputs::new(&part, q.view(), k.view(), v.view())?;
            let law = ForwardLaw::new(&inputs, Precision::of_output(problem.dtype()));
            o.slice_axis_mut(Axis(2), own).assign(&law.oracle().o);
            lse.slice_axis_mut(Axis(1), own).assign(&law.oracle().lse);
            let allowed = match arithmetic {
                Arithmetic::OfInputs => law.bound(),
                Arithmetic::Fp8 => fp8::law(&law, &inputs, [q.view(), k.view(), v.view()], None).bound(),
            };
            bound = bound.max(allowed);
            progress.inc(1);
        }
        progress.finish_and_clear();
        Ok(Truth { o, lse, bound, tolerance })
    }

    fn verdict_o(&self, o: &Array4<f32>) -> Verdict {
        let norms = ErrorNorms::of(o, &self.o);
        let holds = norms.max <= self.bound;
        Verdict { what: "o", norms, bound: self.bound, unit: "", holds }
    }

    fn verdict_lse(&self, lse: &Array3<f32>) -> Verdict {
        let (norms, bound, holds) = match check_lse_within(self.tolerance, lse.view(), self.lse.view(), "") {
            Ok(satisfied) => (satisfied.norms, satisfied.bound, true),
            Err(violation) => (violation.norms, violation.bound, false),
        };
        let is_relative = self.tolerance.absolute == 0.0;
        let unit = if is_relative { " max(1, |lse|)" } else { " where |lse| is up to 1" };
        Verdict { what: "lse", norms, bound, unit, holds }
    }
}

/// One key/value head of a problem.
fn one_kv_head(problem: &Problem) -> Problem {
    let of = |x: &TensorDesc, heads| TensorDesc::contiguous(x.dtype, Shape { heads, ..x.shape });
    let group = problem.heads().group_size();
    let (q, o) = (of(problem.q(), group), of(problem.o(), group));
    let mut spec = ProblemSpec::new(q, of(problem.k(), 1), of(problem.v(), 1), o)
        .seqs_q(problem.seqs_q().clone())
        .seqs_k(problem.seqs_k().clone())
        .mask(problem.mask());
    spec.softmax_scale = Some(problem.softmax_scale().natural());
    spec.softcap = problem.softcap().map(|cap| cap.bound());
    spec.validate().expect("some heads of a valid problem are one")
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

/// Whether the elements of `expected`, in their order, are the LSE in (batch, seqlen, heads) order.
fn agrees_transposed(lse: &Array3<f32>, expected: Array3<f64>, tolerance: LseTolerance) -> bool {
    let (batch, heads, seqlen) = lse.dim();
    let Ok(expected) = expected.into_shape_with_order((batch, seqlen, heads)) else {
        return false;
    };
    check_lse_within(tolerance, lse.view(), expected.view().permuted_axes([0, 2, 1]), "").is_ok()
}

impl Check {
    /// Whether the error law holds, as far as it was asked.
    pub(super) fn holds(&self) -> bool {
        match self {
            Check::Unwanted | Check::NothingExpected => true,
            Check::Done { verdicts, .. } => verdicts.iter().all(|verdict| verdict.holds),
        }
    }
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("check   ")?;
        let (time, verdicts, opinions) = match self {
            Check::Unwanted => return f.write_str("none, because of --no-check"),
            Check::NothingExpected => {
                return f.write_str("none, there is no expected o or lse of these tensors");
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

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Verdict { what, norms, bound, unit, holds } = self;
        let [max, rmse, bound] = [norms.max, norms.rmse, *bound].map(Number);
        write!(f, "{what:<8}max error {max}, rmse {rmse}, allowed {bound}{unit}")?;
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

/// Three digits, in powers of ten only where zeros would have to be counted.
struct Number(f64);

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

    /// Four query heads on two key/value heads.
    fn qkv() -> [Array4<f32>; 3] {
        [(4, 0.3), (2, 0.5), (2, 0.7)].map(|(heads, step)| {
            Array4::from_shape_fn((1, 20, heads, 16), |(_, s, h, d)| {
                (step * (s + 7 * h + 3 * d) as f32).sin()
            })
        })
    }

    #[test]
    fn the_oracle_is_that_of_all_heads() {
        let qkv = qkv();
        let [q, k, v] = qkv.each_ref().map(|x| x.view());
        let attention = Attention::new(q, k, v).window(Some(5), Some(1)).softcap(3.0).softmax_scale(0.7);
        let problem = attention.seqused_k(&[17]).problem().unwrap();
        let truth = Truth::new(&problem, [q, k, v], Arithmetic::OfInputs).unwrap();
        let law = ForwardLaw::new(&Inputs::new(&problem, q, k, v).unwrap(), Precision::F32);
        assert_eq!((truth.o, truth.lse), (law.oracle().o.clone(), law.oracle().lse.clone()));
        assert!(truth.bound > 0.0 && truth.bound <= law.bound());
    }

    #[test]
    fn a_wrong_result_breaks_the_law_whatever_the_file_says() {
        let qkv = qkv();
        let [q, k, v] = qkv.each_ref().map(|x| x.view());
        let attention = Attention::new(q, k, v);
        let problem = attention.problem().unwrap();
        let mut output = attention.forward(&Device::Cpu).unwrap();
        let check = |output: &Output<f32>| {
            let (o, lse) = (output.o.mapv(f64::from), output.lse.mapv(f64::from));
            Expected { o: Some(o), lse: Some(lse) }
                .check(&problem, [q, k, v], Arithmetic::OfInputs, output)
                .unwrap()
        };
        assert!(check(&output).holds());
        output.lse[[0, 1, 7]] += 1.0;
        let lse = check(&output);
        assert!(!lse.holds() && lse.to_string().matches("BREAKS THE ERROR LAW").count() == 1, "{lse}");
        output.o[[0, 19, 3, 7]] = f32::NAN;
        let both = check(&output).to_string();
        assert!(both.matches("BREAKS THE ERROR LAW").count() == 2 && !both.contains("DIFFERS"), "{both}");
    }

    /// What 8-bit products give is right by their own law, and not by that of bf16.
    #[test]
    fn eight_bit_products_have_a_law_of_their_own() {
        let qkv = qkv().map(|x| x.mapv(|x| E4m3::from_f32(2.0 * x)));
        let [q, k, v] = qkv.each_ref().map(|x| x.view());
        let problem = Attention::new(q, k, v).causal().problem().unwrap();
        let codes = |x: &Array4<E4m3>, sequences| {
            Quantized::new(x.clone(), sequences, Granularity::Tensor, vec![1.0]).unwrap()
        };
        let [q8, k8, v8] = [(0, problem.seqs_q()), (1, problem.seqs_k()), (2, problem.seqs_k())]
            .map(|(at, sequences)| codes(&qkv[at], sequences));
        let fp8 = Fp8Attention::new(Accumulation::TwoLevel { keys: 128 }, 128);
        let fp8 = fp8.forward(&problem, &q8, &k8, &v8).unwrap();
        let mut output = Output { o: fp8.o.mapv(bf16::from_f32), lse: fp8.lse };
        let check = |arithmetic, output: &Output<bf16>| {
            let (o, lse) = (output.o.mapv(f64::from), output.lse.mapv(f64::from));
            Expected { o: Some(o), lse: Some(lse) }.check(&problem, [q, k, v], arithmetic, output).unwrap()
        };
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
