//! The error law: the allowed distance of a result from the oracle.
//!
//! ```text
//! max |x − oracle| ≤ 2 · max(|baseline − oracle|, roundings) + atol + noise
//! atol      = 2 · max |(o + 0.3 − 0.3) − o|                   in the precision of the output
//! noise     = 8 · 2⁻²⁴ · (1 + max |LSE|) · max magnitude     f32 rounding of scores, dP and D
//! roundings = u · max √ Σ term²                              of dQ, dK and dV; u is the precision's unit roundoff
//! |lse − oracle| ≤ 1e-5 · max(1, |oracle|)
//! ```
//!
//! The baseline is [`crate::standard`] attention in the same precision on the same inputs; atol is the error of adding
//! and subtracting 0.3 in that precision, where o is the oracle's output rounded to it. So a kernel is judged by what
//! its precision can do on this very input, not by a chosen number.
//!
//! The noise is far below the other terms in 16 bits, but it decides where they vanish. Rounding an exponent of size
//! |LSE| to f32 changes P by a relative |LSE| · 2⁻²⁴, and the baseline's errors may cancel. And if a row sees one key,
//! or its softmax is one-hot, dP − D cancels and leaves the f32 rounding of both, in proportion to
//! [`BackwardSums::magnitudes`]; so does the derivative of a soft cap near its bound, 1 − tanh². For O the magnitude
//! is max |V|.
//!
//! Gradients are sums of terms that are rounded one by one: P dO in dV, dS Q in dK and dS K in dQ. dS contains the
//! terms of D, which reads the rounded O. Each term is off by up to u, relative, independently of the others. With many
//! terms and many elements, the baseline's largest error exceeds u times the root of the sum of the terms' squares.
//! With few terms, as with one row and one key, the baseline's errors may happen to cancel. So the law takes at least u
//! times this root as the baseline's error. The error of up to four equal terms is at most twice as large, and the
//! error of more terms hardly ever exceeds this ([`BackwardSums::squares`]). The same holds for O if P is rounded to
//! e4m3, with terms P V and the unit roundoff of e4m3.
//!
//! The gradient of sinks is one number for each head, for which the baseline's error may be small by chance. Each row
//! of a head reads the rounded O, and the roundings of different rows are independent. So the bound of dsink has one
//! more term: four times the expected sum of these errors, if each is as large as an element of O allows:
//!
//! ```text
//! 4 · u · √ Σ (exp(sink − LSE) · dO ∘ O)²      over rows and columns
//! ```
//!
//! Gradients of tables have few elements, too, and the same term. All terms of a row have the error of its D:
//!
//! ```text
//! 4 · u · √ Σ (Σ P ∘ ∂f/∂t)² · Σ (dO ∘ O)²      over rows; the sums in it over the keys that read t, and over columns
//! ```
//!
//! Limits: if scores are so large that 16-bit scores lose the softmax (beyond 10³ or so), the baseline is off by as
//! much as V is large, and the law allows any error of that size. LSE has no baseline: if Q·K cancels from terms beyond
//! 10³, f32 products alone may exceed its bound.
//!
//! A function of scores is evaluated in f32, by a GPU with approximations of a few ulp. Four times the host's largest
//! error against f64 stands for a score's error ([`oracle::score_error`]). Twice this is one more relative error of P,
//! and an absolute error of LSE.
//!
//! If the oracle is NaN or infinite, the result must be equal.

use std::fmt;

use ndarray::{Array1, Array4, ArrayView, ArrayView4, Dimension, IntoDimension};

use crate::norms::{ErrorNorms, Worst, error};
use crate::oracle::BackwardSums;
use crate::{Element, Forward, Gradients, InputError, Inputs, OutputGradients, Precision, oracle, standard};

/// The largest relative error of rounding to e4m3, for numbers that are not subnormal.
pub const ROUNDOFF_OF_E4M3: f64 = 0.0625;

/// The tolerance of LSE: relative · max(1, |oracle|) + absolute.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LseTolerance {
    /// Tolerance relative to max(1, |oracle|).
    pub relative: f64,
    /// Tolerance added to the relative one.
    pub absolute: f64,
}

impl LseTolerance {
    /// Tolerance of LSE where scores are exact to f32.
    pub const F32: LseTolerance = LseTolerance { relative: 1e-5, absolute: 0.0 };

    /// The tolerance at an expected value.
    pub fn at(self, expected: f64) -> f64 {
        self.relative * expected.abs().max(1.0) + self.absolute
    }
}

/// A result that satisfied the law.
#[derive(Clone, Debug)]
pub struct Satisfied {
    /// The result's errors against the oracle.
    pub norms: ErrorNorms,
    /// The largest error that the law allowed. For LSE, this is the bound where |oracle| is at most 1.
    pub bound: f64,
    /// The largest quotient of an element's error and its allowed error.
    pub ratio: f64,
}

/// A result that broke the law.
#[derive(Clone, Debug, thiserror::Error)]
pub struct Violation {
    /// Name of the judged tensor: o, lse, dq, dk, dv, dsink or dtable.
    pub what: &'static str,
    /// The result's errors against the oracle.
    pub norms: ErrorNorms,
    /// The largest error that the law allowed. For LSE, this is the bound where |oracle| is at most 1.
    pub bound: f64,
    /// The first element, in index order, past the bound.
    pub first: Worst,
    /// The command that runs this comparison again.
    pub replay: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Violation { what, norms, bound, first, replay } = self;
        writeln!(f, "{what} is {:e} from the oracle where the error law allows {bound:e}", norms.max)?;
        writeln!(f, "  first at {first}")?;
        if let Some(worst) = &norms.worst {
            writeln!(f, "  worst at {worst}")?;
        }
        writeln!(f, "  {norms} over {} elements", norms.count)?;
        write!(f, "  replay: {replay}")
    }
}

/// The error law for one forward pass: the expected result and the allowed errors. Checks take `replay`, the command
/// that runs the comparison again; a violation prints it.
#[derive(Clone, Debug)]
pub struct ForwardLaw {
    oracle: Forward<f64>,
    bound: f64,
    lse: LseTolerance,
}

impl ForwardLaw {
    /// Runs the oracle, and standard attention in `precision` as the baseline.
    pub fn new<T: Element>(inputs: &Inputs<'_, T>, precision: Precision) -> ForwardLaw {
        let baseline = standard::forward(inputs, precision);
        let score_error = oracle::score_error(inputs);
        let given = (oracle::forward(inputs), largest_v(inputs), score_error);
        ForwardLaw::of(given, baseline.o.view(), precision, 0.0)
    }

    /// The law with O of another baseline on the same inputs, in which P is rounded to e4m3. `squares` are
    /// [`oracle::forward_squares`] of these inputs.
    #[must_use]
    pub fn with_baseline<T: Element>(
        &self,
        inputs: &Inputs<'_, T>,
        baseline: ArrayView4<'_, f32>,
        precision: Precision,
        squares: &Array4<f64>,
    ) -> ForwardLaw {
        let score_error = oracle::score_error(inputs);
        let roundings = ROUNDOFF_OF_E4M3 * largest(squares.iter().map(|square| square.sqrt()));
        ForwardLaw::of((self.oracle.clone(), largest_v(inputs), score_error), baseline, precision, roundings)
    }

    fn of(
        (oracle, largest_v, score_error): (Forward<f64>, f64, f64),
        baseline: ArrayView4<'_, f32>,
        precision: Precision,
        roundings: f64,
    ) -> ForwardLaw {
        let noise = noise(&oracle, score_error, largest_v);
        let bound = bound(oracle.o.view(), baseline, precision, roundings, noise);
        let lse = LseTolerance { absolute: 2.0 * score_error, ..LseTolerance::F32 };
        ForwardLaw { oracle, bound, lse }
    }

    /// The law that allows O at least this error.
    #[must_use]
    pub fn allowing(self, error: f64) -> ForwardLaw {
        ForwardLaw { bound: self.bound.max(error), ..self }
    }

    /// The expected result.
    pub fn oracle(&self) -> &Forward<f64> {
        &self.oracle
    }

    /// Upper bound of max |o − oracle|.
    pub fn bound(&self) -> f64 {
        self.bound
    }

    /// The tolerance of LSE.
    pub fn lse_tolerance(&self) -> LseTolerance {
        self.lse
    }

    /// Judges O and LSE, in this order.
    ///
    /// # Errors
    /// [`Violation`], boxed because it carries the whole report.
    ///
    /// # Panics
    /// If the shapes differ: the arrays come from the same problem.
    pub fn check(&self, x: &Forward<f32>, replay: &str) -> Result<[Satisfied; 2], Box<Violation>> {
        let lse = check_lse_within(self.lse, x.lse.view(), self.oracle.lse.view(), replay);
        Ok([self.check_o(x.o.view(), replay)?, lse?])
    }

    /// Judges O alone.
    ///
    /// # Errors
    /// [`Violation`], boxed because it carries the whole report.
    ///
    /// # Panics
    /// If the shapes differ: the arrays come from the same problem.
    pub fn check_o(&self, o: ArrayView4<'_, f32>, replay: &str) -> Result<Satisfied, Box<Violation>> {
        check_array("o", o, self.oracle.o.view(), self.bound, replay)
    }
}

/// The error law for one backward pass: the expected gradients and the allowed errors.
#[derive(Clone, Debug)]
pub struct BackwardLaw {
    oracle: Gradients<f64>,
    bounds: [f64; 3],
    /// The bound of dsink; 0 without sinks.
    sink_bound: f64,
    /// The bound of each table's gradient.
    table_bounds: Vec<f64>,
}

impl BackwardLaw {
    /// Runs the oracle, and standard attention in `precision` as the baseline, for the gradients of O and LSE.
    ///
    /// # Errors
    /// [`InputError::Shape`] or [`InputError::LseShape`] if the gradients do not have O's and LSE's shapes.
    pub fn new<'a, T: Element + 'a>(
        inputs: &Inputs<'_, T>,
        output: impl Into<OutputGradients<'a, T>>,
        precision: Precision,
    ) -> Result<BackwardLaw, InputError> {
        let output = output.into();
        let sums = oracle::backward_sums(inputs, output)?;
        let baseline = standard::backward(inputs, output, precision)?;
        Ok(BackwardLaw::of(sums, oracle::score_error(inputs), &baseline, precision))
    }

    fn of(
        BackwardSums { forward, gradients: oracle, magnitudes, squares }: BackwardSums,
        score_error: f64,
        baseline: &Gradients<f32>,
        precision: Precision,
    ) -> BackwardLaw {
        let roundoff = precision.unit_roundoff();
        let bound_of = |of: fn(&Gradients<f64>) -> &Array4<f64>, baseline: &Array4<f32>| {
            let noise = noise(&forward, score_error, largest(of(&magnitudes).iter().copied()));
            let roundings = roundoff * largest(of(&squares).iter().map(|square| square.sqrt()));
            bound(of(&oracle).view(), baseline.view(), precision, roundings, noise)
        };
        let bounds = [
            bound_of(|of| &of.dq, &baseline.dq),
            bound_of(|of| &of.dk, &baseline.dk),
            bound_of(|of| &of.dv, &baseline.dv),
        ];
        let of_sink = |oracle: &Array1<f64>, baseline: &Array1<f32>, magnitude: &Array1<f64>| {
            let noise = noise(&forward, score_error, largest(magnitude.iter().copied()));
            let squares = squares.dsink.iter().flatten().map(|square| square.sqrt());
            let noise = noise + 4.0 * roundoff * largest(squares);
            bound(oracle.view(), baseline.view(), precision, 0.0, noise)
        };
        let sink_bound = match (&oracle.dsink, &baseline.dsink, &magnitudes.dsink) {
            (Some(oracle), Some(baseline), Some(magnitude)) => of_sink(oracle, baseline, magnitude),
            _ => 0.0,
        };
        let of_tables = oracle.dtables.iter().zip(&baseline.dtables).zip(&magnitudes.dtables);
        let of_tables = of_tables.zip(&squares.dtables).map(|(((oracle, baseline), magnitudes), squares)| {
            let noise = noise(&forward, score_error, largest(magnitudes.iter().copied()))
                + 4.0 * roundoff * largest(squares.iter().map(|square| square.sqrt()));
            bound(ArrayView::from(oracle), ArrayView::from(baseline), precision, 0.0, noise)
        });
        let table_bounds = of_tables.collect();
        BackwardLaw { oracle, bounds, sink_bound, table_bounds }
    }

    /// The law with its allowed errors multiplied by `factor`. Among thousands of random problems, some have a baseline
    /// whose error is small by chance.
    #[must_use]
    pub fn loosened(mut self, factor: f64) -> BackwardLaw {
        self.bounds = self.bounds.map(|bound| factor * bound);
        self.sink_bound *= factor;
        self.table_bounds.iter_mut().for_each(|bound| *bound *= factor);
        self
    }

    /// The expected gradients.
    pub fn oracle(&self) -> &Gradients<f64> {
        &self.oracle
    }

    /// The largest allowed |x − oracle| of dQ, dK and dV.
    pub fn bounds(&self) -> [f64; 3] {
        self.bounds
    }

    /// The largest allowed |x − oracle| of dsink; 0 without sinks.
    pub fn sink_bound(&self) -> f64 {
        self.sink_bound
    }

    /// Judges dQ, dK and dV, dsink if the problem has sinks, and the gradients of tables, in this order.
    ///
    /// # Errors
    /// [`Violation`], boxed because it carries the whole report.
    ///
    /// # Panics
    /// If the shapes differ, or only one of the two has dsink: the arrays come from the same problem.
    pub fn check(&self, x: &Gradients<f32>, replay: &str) -> Result<Vec<Satisfied>, Box<Violation>> {
        let [dq, dk, dv] = self.bounds;
        let mut satisfied = vec![
            check_array("dq", x.dq.view(), self.oracle.dq.view(), dq, replay)?,
            check_array("dk", x.dk.view(), self.oracle.dk.view(), dk, replay)?,
            check_array("dv", x.dv.view(), self.oracle.dv.view(), dv, replay)?,
        ];
        match (&x.dsink, &self.oracle.dsink) {
            (None, None) => {}
            (Some(x), Some(oracle)) => {
                satisfied.push(check_array("dsink", x.view(), oracle.view(), self.sink_bound, replay)?);
            }
            (x, _) => panic!("dsink {} given", if x.is_some() { "was" } else { "was not" }),
        }
        assert_eq!(x.dtables.len(), self.oracle.dtables.len(), "a table's gradient");
        for ((x, oracle), &bound) in x.dtables.iter().zip(&self.oracle.dtables).zip(&self.table_bounds) {
            if !oracle.is_empty() {
                let (x, oracle) = (ArrayView::from(x), ArrayView::from(oracle));
                satisfied.push(check_array("dtable", x, oracle, bound, replay)?);
            }
        }
        Ok(satisfied)
    }
}

/// The largest finite absolute value of V.
/// The largest finite |V|.
pub fn largest_v<T: Element>(inputs: &Inputs<'_, T>) -> f64 {
    largest(inputs.v().iter().map(|&v| v.into()))
}

/// The largest finite absolute value.
fn largest(values: impl Iterator<Item = f64>) -> f64 {
    values.map(f64::abs).filter(|x| x.is_finite()).fold(0.0, f64::max)
}

/// The error of rounding exponents to f32, and of a function of scores in f32, each twice what one P has: its score and
/// its LSE.
fn noise(forward: &Forward<f64>, score_error: f64, magnitude: f64) -> f64 {
    let f32_rounding = f64::from(f32::EPSILON) / 2.0;
    (8.0 * f32_rounding * (1.0 + largest(forward.lse.iter().copied())) + 2.0 * score_error) * magnitude
}

/// 2 · max(|baseline − oracle|, roundings) + atol + noise. Only finite errors of the baseline count: a baseline that
/// overflows allows nothing.
fn bound<D: Dimension>(
    oracle: ArrayView<'_, f64, D>,
    baseline: ArrayView<'_, f32, D>,
    precision: Precision,
    roundings: f64,
    noise: f64,
) -> f64 {
    let baseline_error = largest(baseline.iter().zip(&oracle).map(|(&b, &o)| f64::from(b) - o));
    2.0 * baseline_error.max(roundings) + atol(oracle, precision) + noise
}

/// 2 · max |(o + 0.3 − 0.3) − o| in `precision`.
fn atol<D: Dimension>(oracle: ArrayView<'_, f64, D>, precision: Precision) -> f64 {
    let cost = |&o: &f64| {
        let o = precision.round(o as f32);
        let there = precision.round(o + 0.3);
        f64::from(precision.round(there - 0.3) - o)
    };
    2.0 * largest(oracle.iter().map(cost))
}

/// Judges a log-sum-exp: |x − oracle| ≤ 1e-5 · max(1, |oracle|).
///
/// # Errors
/// [`Violation`], boxed because it carries the whole report.
///
/// # Panics
/// If the shapes differ: the arrays come from the same problem.
pub fn check_lse<D: Dimension>(
    x: ArrayView<'_, f32, D>,
    oracle: ArrayView<'_, f64, D>,
    replay: &str,
) -> Result<Satisfied, Box<Violation>> {
    check_lse_within(LseTolerance::F32, x, oracle, replay)
}

/// Judges a log-sum-exp with a given tolerance, for arithmetic that computes scores or their sums less exactly.
///
/// # Errors
/// [`Violation`], boxed because it carries the whole report.
///
/// # Panics
/// If the shapes differ: the arrays come from the same problem.
pub fn check_lse_within<D: Dimension>(
    tolerance: LseTolerance,
    x: ArrayView<'_, f32, D>,
    oracle: ArrayView<'_, f64, D>,
    replay: &str,
) -> Result<Satisfied, Box<Violation>> {
    let bound_at = |expected| tolerance.at(expected);
    judge("lse", x, oracle, bound_at(0.0), bound_at, replay)
}

fn check_array<D: Dimension>(
    what: &'static str,
    x: ArrayView<'_, f32, D>,
    oracle: ArrayView<'_, f64, D>,
    bound: f64,
    replay: &str,
) -> Result<Satisfied, Box<Violation>> {
    judge(what, x, oracle, bound, |_| bound, replay)
}

fn judge<D: Dimension>(
    what: &'static str,
    x: ArrayView<'_, f32, D>,
    oracle: ArrayView<'_, f64, D>,
    bound: f64,
    bound_at: impl Fn(f64) -> f64,
    replay: &str,
) -> Result<Satisfied, Box<Violation>> {
    let norms = ErrorNorms::of(&x, &oracle);
    let ratio = |x: f32, expected: f64| match error(x.into(), expected).abs() {
        0.0 => 0.0,
        error if expected.is_finite() => error / bound_at(expected),
        _ => f64::INFINITY,
    };
    let within = |x: f32, expected: f64| ratio(x, expected) <= 1.0; // false for NaN
    let first = x.indexed_iter().zip(&oracle).find(|((_, x), expected)| !within(**x, **expected));
    match first {
        None => {
            let ratio = x.iter().zip(&oracle).map(|(&x, &expected)| ratio(x, expected)).fold(0.0, f64::max);
            Ok(Satisfied { norms, bound, ratio })
        }
        Some(((index, &given), &expected)) => {
            let index = index.into_dimension().slice().to_vec();
            let first = Worst { index, given: given.into(), expected };
            Err(Box::new(Violation { what, norms, bound, first, replay: replay.to_owned() }))
        }
    }
}

#[cfg(test)]
mod tests;
