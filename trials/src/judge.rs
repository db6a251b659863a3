//! The error law of the forward pass, for every [`Arithmetic`].
//!
//! ```text
//! max |o − oracle| ≤ 2 · max |baseline − oracle| + atol + noise
//! rms (o − oracle) ≤ 2 · max(rms (baseline − oracle), roundings) + 2⁻⁹ · max |oracle|
//!                                                       FP8 only, and 2⁻²⁵ more in f16, 2⁻¹¹⁰ in bf16
//! roundings = 2⁻⁴ · √ (mean Σⱼ (Pᵢⱼ Vⱼ)² / 3)
//! |lse − oracle|ᵢ  ≤ maxⱼ δᵢⱼ + 1e-5 · max(1, |oracle|ᵢ)        j over the keys that row i sees
//! ```
//!
//! This is [`fa3_ref::law`] with the second line and the term δ added. δᵢⱼ bounds the error that the arithmetic may add
//! to the score of row i and key j. LSE moves by no more than the score that moves most. The oracle takes the inputs as
//! rounded to the case's dtype. If row sums add the rounded P, [`rounded_row_sum_loss`] is added to the bound on LSE.
//!
//! For results exact to f32, δ = 0. For FP8 the baseline of O is the paper's (§4.3, Table 3). If there are block
//! scales, which the paper's baseline lacks, it is the emulator of this library's algorithm. If row sums add the
//! rounded P, the largest error of O may instead be twice the emulator's error with such sums: where a few keys have
//! half of a row's weight and all other scores are equal, the equal scores are rounded in the same way, and their
//! errors add up. The bound on the root mean square has no such exception. δ of FP8 covers the tensor core, which keeps
//! 13 bits below the largest of the 32 products and the accumulator that it adds at once (MMA-Sim, arXiv 2511.10909):
//! each of the 33 addends and their sum may lose 2⁻¹³ of the largest. If δ exceeds
//! [`LOST`], other keys may get the weight, and O may be off by 2 · max |V|.

use std::borrow::Cow;

use fa3_quant::{Accumulation, Fp8Attention, Output, QuantError, StandardFp8, rounded_row_sum_loss};
use fa3_ref::law::{ForwardLaw, ROUNDOFF_OF_E4M3, Satisfied, Violation, largest_v};
use fa3_ref::norms::{ErrorNorms, Worst};
use fa3_ref::{Forward, Precision, oracle};
use fa3_types::{Dtype, LseForm};
use ndarray::{Array3, Array4, ArrayView1, Axis};

use crate::engine::{completed, emulated, fp8_codes};
use crate::reshape::alone;
use crate::{Arithmetic, Case, Values};

/// This library's algorithm for FP8.
const EMULATOR: Fp8Attention = Fp8Attention::new(Accumulation::TwoLevel { keys: 128 }, 128);

/// The δ from which scores are lost: its 34 errors cancel for the most part, so a score moves by 1 or more.
const LOST: f64 = 10.0;

/// The verdict on a result.
pub type Verdict<const N: usize> = Result<[Satisfied; N], Box<Violation>>;

/// The judge of results of one case.
pub struct Judge<'a> {
    /// The case without `qv`, because the law applies to the joined problem.
    case: Cow<'a, Case>,
    values: Cow<'a, Values>,
    /// The form of LSE. The law applies to the default form.
    form: LseForm,
    law: ForwardLaw,
    /// The law for e4m3 cases.
    fp8: Option<Fp8Law>,
}

struct Fp8Law {
    /// The law with the FP8 baseline.
    law: ForwardLaw,
    /// The largest allowed root mean square of O's error.
    rmse: f64,
    squares: Array4<f64>,
    /// maxⱼ δᵢⱼ.
    moves: Array3<f64>,
}

impl<'a> Judge<'a> {
    /// Runs the oracle and the baselines on `values`: the values of the case, or other values of the same shapes.
    ///
    /// # Panics
    /// If the shapes of the values differ from the problem's.
    pub fn new(case: &'a Case, values: &'a Values) -> Judge<'a> {
        let form = case.problem.lse_form();
        let (case, values) = case.joined(values);
        let inputs = values.inputs(&case.problem);
        let precision = Precision::of_output(case.problem.o().dtype);
        let law = ForwardLaw::new(&inputs, precision);
        let fp8 = (case.problem.dtype() == Dtype::E4m3).then(|| {
            // The paper's baseline has per-tensor scales only.
            let baseline = match case.problem.has_block_scales() {
                true => emulated(&case, &values, EMULATOR),
                false => {
                    let [q, k, v] = fp8_codes(&case, &values);
                    let standard = StandardFp8.forward(&case.problem, &q, &k, &v);
                    standard.and_then(|output| completed(&case, &values, output))
                }
            };
            let baseline = baseline_o(&case, baseline);
            let norms = ErrorNorms::of(&baseline, &law.oracle().o);
            let largest =
                law.oracle().o.iter().filter(|o| o.is_finite()).fold(0.0, |max: f64, o| max.max(o.abs()));
            // 2^-9: the result is rounded to bf16, but the baseline to f16. 2^-25: f16 numbers are multiples of 2^-24.
            // 2^-110: in bf16, products with a factor that is subnormal in f32 are flushed to 0.
            let least = f64::powi(2.0, if precision == Precision::F16 { -25 } else { -110 });
            let squares = oracle::forward_squares(&inputs);
            let mean = squares.iter().filter(|x| x.is_finite()).sum::<f64>() / squares.len().max(1) as f64;
            let rmse = norms.rmse.max(ROUNDOFF_OF_E4M3 * (mean / 3.0).sqrt());
            let rmse = 2.0 * rmse + f64::powi(2.0, -9) * largest + least;
            let law = law.with_baseline(&inputs, baseline.view(), precision, &squares);
            let moves = largest_moves(&case, &values, tensor_core_loss);
            if moves.iter().any(|&moved| moved > LOST) {
                let error = 2.0 * largest_v(&inputs);
                return Fp8Law { law: law.allowing(error), rmse: error, squares, moves };
            }
            Fp8Law { law, rmse, squares, moves }
        });
        Judge { case, values, form, law, fp8 }
    }

    /// The oracle's result.
    pub fn oracle(&self) -> &Forward<f64> {
        self.law.oracle()
    }

    /// Judges O and LSE, in this order. `replay` is the command that a violation prints.
    ///
    /// # Errors
    /// The violation.
    ///
    /// # Panics
    /// If 8-bit arithmetic is judged on a case that is not e4m3.
    pub fn forward(&self, arithmetic: Arithmetic, x: &Forward<f32>, replay: &str) -> Verdict<2> {
        let x = &self.in_default_form(x);
        match arithmetic {
            Arithmetic::OfInputs => self.law.check(x, replay),
            Arithmetic::RoundedScores => {
                let half_ulp = match Precision::of_output(self.case.problem.dtype()) {
                    Precision::F32 => f64::powi(2.0, -24),
                    Precision::F16 => f64::powi(2.0, -11),
                    Precision::Bf16 => f64::powi(2.0, -8),
                };
                // The score is rounded three times: as a product, after the scaling, and after the softcap.
                let loss = |q: ArrayView1<'_, f32>, k: ArrayView1<'_, f32>| {
                    3.0 * half_ulp * products(q, k).sum::<f64>().abs()
                };
                with_moved_scores(&self.law, x, &largest_moves(&self.case, &self.values, loss), 0.0, replay)
            }
            Arithmetic::Fp8 | Arithmetic::Fp8RoundedSums => {
                let is_of_rounded = arithmetic == Arithmetic::Fp8RoundedSums;
                let keys = self.case.problem.rows_k().max_len();
                let of_sums = if is_of_rounded { rounded_row_sum_loss(keys) } else { 0.0 };
                let fp8 = self.fp8.as_ref().expect("8-bit arithmetic takes 8-bit cases");
                let allows_o = fp8.law.check_o(x.o.view(), replay).is_ok() || !is_of_rounded;
                let law = if allows_o { &fp8.law } else { &self.of_rounded_sums(&fp8.squares) };
                let [o, lse] = with_moved_scores(law, x, &fp8.moves, of_sums, replay)?;
                if o.norms.rmse > fp8.rmse {
                    let (norms, bound, replay) = (o.norms, fp8.rmse, replay.to_owned());
                    let first = norms.worst.clone().expect("an array with errors has a worst one");
                    return Err(Box::new(Violation { what: "o (rmse)", norms, bound, first, replay }));
                }
                Ok([o, lse])
            }
        }
    }

    /// The results with LSE in the default form. Where +inf was asked for, -inf becomes NaN.
    fn in_default_form(&self, x: &Forward<f32>) -> Forward<f32> {
        let LseForm { without_sink, empty_is_infinite, .. } = self.form;
        let mut lse = x.lse.mapv(|lse| match (empty_is_infinite, lse) {
            (true, f32::INFINITY) => f32::NEG_INFINITY,
            (true, f32::NEG_INFINITY) => f32::NAN,
            _ => lse / self.form.unit() as f32,
        });
        let sinks = self.values.sink.iter().flatten().filter(|_| without_sink);
        for (head, &sink) in sinks.enumerate() {
            for index in 0..self.case.problem.batch() {
                let (batch, first) = self.case.problem.rows_q().start(index);
                let rows = first..first + self.case.problem.lengths(index).q;
                let mut of_head = lse.index_axis_mut(Axis(0), batch).index_axis_move(Axis(0), head);
                of_head.slice_axis_mut(Axis(0), rows.into()).mapv_inplace(|lse| {
                    let largest = lse.max(sink);
                    let sum = |x: f32| if x == largest { 1.0 } else { (x - largest).exp() };
                    largest + if largest.is_finite() { (sum(lse) + sum(sink)).ln() } else { 0.0 }
                });
            }
        }
        Forward { o: x.o.clone(), lse }
    }

    /// The law whose baseline of O is the emulator with row sums that add the rounded P.
    fn of_rounded_sums(&self, squares: &Array4<f64>) -> ForwardLaw {
        let baseline = emulated(&self.case, &self.values, EMULATOR.with_rounded_row_sums());
        let baseline = baseline_o(&self.case, baseline);
        let precision = Precision::of_output(self.case.problem.o().dtype);
        self.law.with_baseline(&self.values.inputs(&self.case.problem), baseline.view(), precision, squares)
    }
}

/// The law if the scores of a row may move by `moves`, and the logarithm of each row sum by `of_sums`.
fn with_moved_scores(
    law: &ForwardLaw,
    x: &Forward<f32>,
    moves: &Array3<f64>,
    of_sums: f64,
    replay: &str,
) -> Verdict<2> {
    let oracle = law.oracle();
    let o = law.check_o(x.o.view(), replay)?;
    let noise = |&lse: &f64| 1e-5 * lse.abs().max(1.0) + of_sums;
    let bounds = moves + oracle.lse.map(noise);
    let norms = ErrorNorms::of(&x.lse, &oracle.lse);
    let bound = bounds.iter().copied().filter(|bound| bound.is_finite()).fold(0.0, f64::max);
    let mut ratio: f64 = 0.0;
    for ((index, &given), (&expected, &bound)) in x.lse.indexed_iter().zip(oracle.lse.iter().zip(&bounds)) {
        let given = f64::from(given);
        if given == expected || (given.is_nan() && expected.is_nan()) {
            continue;
        }
        let error = (given - expected).abs();
        if !expected.is_finite() || error.is_nan() || error > bound {
            let first = Worst { index: vec![index.0, index.1, index.2], given, expected };
            let replay = replay.to_owned();
            return Err(Box::new(Violation { what: "lse", norms, bound, first, replay }));
        }
        ratio = ratio.max(error / bound);
    }
    Ok([o, Satisfied { norms, bound, ratio }])
}

/// maxⱼ δᵢⱼ for each query row, in the shape of LSE, if each product q · k may be off by `loss(q, k)`.
fn largest_moves(
    case: &Case,
    values: &Values,
    loss: impl Fn(ArrayView1<'_, f32>, ArrayView1<'_, f32>) -> f64,
) -> Array3<f64> {
    let problem = &case.problem;
    let scale = problem.softmax_scale().natural();
    let mut moves = Array3::zeros(problem.lse_shape());
    let heads = problem.heads().q();
    for (index, head_q) in (0..problem.batch()).flat_map(|index| (0..heads).map(move |head| (index, head))) {
        let (alone, values) = alone(problem, values, index, head_q);
        let (len, (batch, first)) = (alone.lengths(0), problem.rows_q().start(index));
        let matrix = |x: Array4<f32>| x.index_axis_move(Axis(0), 0).index_axis_move(Axis(1), 0);
        let (q, k) = (matrix(values.q), matrix(values.k));
        for (row, q) in q.rows().into_iter().enumerate() {
            let visible = (0..len.k).filter(|&key| problem.mask().allows(row, key, len));
            let largest = visible.map(|key| loss(q, k.row(key))).fold(0.0, f64::max);
            moves[[batch, head_q, first + row]] = scale * largest;
        }
    }
    moves
}

/// O of a baseline. If there are sinks, O is multiplied by an exact factor for each row, and rounded once more.
fn baseline_o(case: &Case, baseline: Result<Output, QuantError>) -> Array4<f32> {
    let Output { o, .. } = baseline.unwrap_or_else(|e| panic!("{}: {e}", case.name));
    let precision = Precision::of_output(case.problem.o().dtype);
    if case.problem.has_sink() { o.mapv(|o| precision.round(o)) } else { o }
}

fn products(q: ArrayView1<'_, f32>, k: ArrayView1<'_, f32>) -> impl Iterator<Item = f64> {
    q.into_iter().zip(k).map(|(&q, &k)| f64::from(q) * f64::from(k))
}

/// Largest error of the tensor core's 8-bit q · k.
fn tensor_core_loss(q: ArrayView1<'_, f32>, k: ArrayView1<'_, f32>) -> f64 {
    let products: Vec<f64> = products(q, k).collect();
    let (mut sum, mut loss) = (0.0f64, 0.0);
    for step in products.chunks(Accumulation::DEPTH) {
        let largest = step.iter().fold(sum.abs(), |largest, product| largest.max(product.abs()));
        sum += step.iter().sum::<f64>();
        loss += 34.0 * f64::powi(2.0, -13) * largest.max(sum.abs());
    }
    loss
}
