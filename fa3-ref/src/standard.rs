//! Standard attention: scores and probabilities written out in the precision of the inputs, as a framework
//! without a fused kernel does it (paper §2.3 and the baseline of its Table 3). Matrix products accumulate in
//! f32, the softmax computes in f32, and every matrix that such a framework writes to memory is rounded: Q Kᵀ, the
//! scaled scores, the capped scores, the values of the function of scores, P, O.
//!
//! This is the baseline of the [error law](crate::law), so it is deliberately no better than necessary.

use fa3_types::KnownProblem;
use ndarray::{Array1, Array2, ArrayView2, Axis, Slice, Zip};
use rayon::prelude::*;

use crate::inputs::{Head32, Heads, OutputHeads};
use crate::output::{GroupGradients, HeadForward, backward_groups, forward_heads};
use crate::sink::{Row, exp_from, sums};
use crate::{Element, Forward, Gradients, InputError, Inputs, OutputGradients, Precision};

/// Query rows whose scores are in memory at a time.
const ROWS: usize = 256;

/// The forward pass: O rounded; LSE in f32.
pub fn forward<T: Element>(inputs: &Inputs<'_, T>, precision: Precision) -> Forward<f32> {
    forward_of_heads(inputs, precision)
}

fn forward_of_heads(inputs: &dyn Heads, precision: Precision) -> Forward<f32> {
    let problem = inputs.problem();
    forward_heads(problem, |index, head_q| {
        let head = inputs.head(index, head_q).to_f32();
        let blocks: Vec<HeadForward<f32>> = (0..head.q.nrows().div_ceil(ROWS))
            .into_par_iter()
            .map(|block| {
                let softmax = Softmax::of(problem, &head, block * ROWS, precision);
                let o = softmax.p.dot(&head.v).mapv(|x| precision.round(x));
                HeadForward { o, lse: softmax.lse }
            })
            .collect();
        stack(blocks, head.v.ncols())
    })
}

/// Row blocks of one head, stacked.
fn stack(blocks: Vec<HeadForward<f32>>, head_dim_v: usize) -> HeadForward<f32> {
    let mut all = HeadForward { o: Array2::zeros((0, head_dim_v)), lse: Array1::zeros(0) };
    for block in blocks {
        all.o.append(Axis(0), block.o.view()).expect("every block has head_dim_v columns");
        all.lse.append(Axis(0), block.lse.view()).expect("one-dimensional arrays stack");
    }
    all
}

/// The backward pass for the gradients of O and LSE. P, dP and dS are rounded, and then the gradients. D = rowsum(dO ∘
/// O) - dLSE reads the stored, rounded O.
///
/// A framework's own softmax gradient takes D = rowsum(P ∘ dP) instead. If a softmax is nearly one-hot, this is several
/// times more accurate in 16 bits than reading the stored O, as every fused kernel does.
///
/// # Errors
/// [`InputError::Shape`] or [`InputError::LseShape`] if the gradients do not have O's and LSE's shapes.
pub fn backward<'a, T: Element + 'a>(
    inputs: &Inputs<'_, T>,
    output: impl Into<OutputGradients<'a, T>>,
    precision: Precision,
) -> Result<Gradients<f32>, InputError> {
    backward_of_heads(inputs, &output.into(), precision)
}

fn backward_of_heads(
    inputs: &dyn Heads,
    output: &dyn OutputHeads,
    precision: Precision,
) -> Result<Gradients<f32>, InputError> {
    let problem = inputs.problem();
    output.check(problem)?;
    let round = |matrix: Array2<f32>| matrix.mapv(|x| precision.round(x));
    // P, rounded to the precision of the inputs as a framework stores it.
    let rounded = |row: Row| Row { p: f64::from(precision.round(row.p as f32)), ..row };
    let dsink = sums(inputs, output, || forward_of_heads(inputs, precision), |row| rounded(row).gradient());
    let dsink = dsink.map(|dsink| dsink.mapv(|x| x as f32));
    let [gradients] = backward_groups(problem, [dsink], |index, head_kv| {
        let group_size = problem.heads().group_size();
        let scale = problem.softmax_scale().natural() as f32;
        let mut dq = Vec::new();
        let mut dk = Array2::zeros((problem.rows_k().len(index), problem.head_dim()));
        let mut dv = Array2::zeros((problem.rows_k().len(index), problem.head_dim_v()));
        let mut dtables = problem.score_zeros();
        for head_q in head_kv * group_size..(head_kv + 1) * group_size {
            let head = inputs.head(index, head_q).to_f32();
            let (dout, dlse) = output.head(problem, index, head_q);
            let Softmax { p, slope, lse, capped } =
                Softmax::of_rows(problem, &head, head.q.view(), 0, precision);
            // LSE of a row that sees no key depends on nothing, so its gradient does not count.
            let dlse = Zip::from(&dlse)
                .and(&lse)
                .map_collect(|&x, &lse| if lse == f32::NEG_INFINITY { 0.0 } else { x as f32 });
            let dout = dout.mapv(|x| x as f32);
            let dp = round(dout.dot(&head.v.t()));
            let o = round(p.dot(&head.v));
            let delta = ((&dout * &o).sum_axis(Axis(1)) - dlse).insert_axis(Axis(1));
            let of_score = &p * &(&dp - &delta);
            add_of_tables(problem, [index, head_q], &of_score, &capped, &mut dtables);
            let ds = round(of_score * slope * scale);
            dq.push(round(ds.dot(&head.k)));
            dk += &round(ds.t().dot(&head.q));
            dv += &round(p.t().dot(&dout));
        }
        let dtables = dtables.into_iter().map(|sums| sums.into_iter().map(|sum| sum as f32).collect());
        [GroupGradients { dq, dk: round(dk), dv: round(dv), dtables: dtables.collect() }]
    });
    Ok(gradients)
}

/// Adds the terms of one head to the gradients of tables. `of_score` are the gradients of the scores (rows, seqlen_k),
/// and `capped` are the scores before the function.
fn add_of_tables(
    problem: &KnownProblem,
    [index, head]: [usize; 2],
    of_score: &Array2<f32>,
    capped: &Array2<f32>,
    dtables: &mut [Vec<f64>],
) {
    for (row, of_score) in of_score.rows().into_iter().enumerate() {
        for mut read in problem.score_reads::<f32>([index, head, row]) {
            for (key, &of_score) in of_score.iter().enumerate().filter(|(_, x)| **x != 0.0) {
                let (table, place, slope) = read.at(capped[[row, key]], key);
                dtables[table][place] += f64::from(of_score * slope);
            }
        }
    }
}

/// The softmax of some rows.
struct Softmax {
    /// P (rows, seqlen_k), rounded.
    p: Array2<f32>,
    /// The derivative of the score, capped and of the function of scores, by the scaled score (rows, seqlen_k).
    slope: Array2<f32>,
    /// LSE (rows).
    lse: Array1<f32>,
    /// The scores before the function of scores (rows, seqlen_k).
    capped: Array2<f32>,
}

impl Softmax {
    /// The softmax of up to [`ROWS`] rows from `first` on.
    fn of(problem: &KnownProblem, head: &Head32, first: usize, precision: Precision) -> Softmax {
        let end = head.q.nrows().min(first + ROWS);
        let q = head.q.slice_axis(Axis(0), Slice::from(first..end));
        Softmax::of_rows(problem, head, q, first, precision)
    }

    fn of_rows(
        problem: &KnownProblem,
        head: &Head32,
        q: ArrayView2<'_, f32>,
        first: usize,
        precision: Precision,
    ) -> Softmax {
        let scale = problem.softmax_scale().natural() as f32;
        let [sequence, of_head] = head.of;
        let mut p = q.dot(&head.k.t()); // S, unscaled
        let (mut slope, mut capped) = (Array2::ones(p.dim()), Array2::zeros(p.dim()));
        let mut functions: Vec<_> =
            (0..q.nrows()).map(|i| problem.score_row([sequence, of_head, first + i])).collect();
        for (((i, j), s), slope) in p.indexed_iter_mut().zip(&mut slope) {
            *s = precision.round(precision.round(*s) * scale);
            if let Some(cap) = problem.softcap() {
                *s = precision.round(cap.apply(f64::from(*s)) as f32);
                *slope = cap.derivative(f64::from(*s)) as f32;
            }
            capped[[i, j]] = *s;
            if let Some(function) = &mut functions[i] {
                (*s, *slope) = function.with_slope(*s, *slope, j);
                *s = precision.round(*s);
            }
            if !problem.allows([sequence, of_head, first + i], j) {
                *s = f32::NEG_INFINITY;
            }
        }
        let mut lse = Array1::from_elem(q.nrows(), f32::NEG_INFINITY);
        for (mut row, lse) in p.rows_mut().into_iter().zip(&mut lse) {
            if head.sink == f32::NEG_INFINITY && row.iter().all(|&s| s == f32::NEG_INFINITY) {
                row.fill(0.0);
                continue;
            }
            let max = row.fold(head.sink, |max, &s| max.max(s));
            row.mapv_inplace(|s| (s - max).exp());
            let sum = row.sum() + exp_from(head.sink.into(), max.into()) as f32;
            row.mapv_inplace(|e| precision.round(e / sum));
            *lse = max + sum.ln();
        }
        Softmax { p, slope, lse, capped }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::norms::ErrorNorms;
    use crate::oracle;
    use fa3_types::{Dtype, ProblemSpec, Shape};
    use half::f16;
    use ndarray::Array4;

    fn wave(shape: Shape, step: f32) -> Array4<f16> {
        let mut x = 0.0;
        Array4::from_shape_simple_fn(shape.dims(), || {
            x += step;
            f16::from_f32(2.0 * f32::sin(x))
        })
    }

    /// A reduction of LSE by logaddexp has dLSE = NaN where LSE is -inf. If the baseline's gradients became NaN, the
    /// law's bound would be atol alone.
    #[test]
    fn the_gradient_of_lse_does_not_matter_where_a_row_sees_no_key() {
        let q = Shape { batch: 1, seqlen: 9, heads: 1, head_dim: 8 };
        let kv = Shape { seqlen: 5, ..q };
        let problem = ProblemSpec::dense(Dtype::F16, q, kv).causal().known().unwrap();
        let (q, k, v) = (wave(q, 0.7), wave(kv, 0.9), wave(kv, 1.1));
        let inputs = Inputs::new(&problem, q.view(), k.view(), v.view()).unwrap();
        let empty = oracle::forward(&inputs).lse.mapv(|lse| lse == f64::NEG_INFINITY);
        assert_eq!(empty.iter().filter(|&&empty| empty).count(), 4);
        let [zeros, nans] = [0.0, f32::NAN].map(|there| {
            let dlse = empty.mapv(|empty| if empty { there } else { 1.0 });
            let output = OutputGradients { dout: q.view(), dlse: Some(dlse.view()) };
            backward(&inputs, output, Precision::F16).unwrap()
        });
        assert_eq!([&zeros.dq, &zeros.dk, &zeros.dv], [&nans.dq, &nans.dk, &nans.dv]);
    }

    #[test]
    fn more_rounding_is_further_from_the_oracle_but_not_far() {
        let q = Shape { batch: 1, seqlen: 300, heads: 2, head_dim: 32 };
        let kv = Shape { heads: 1, seqlen: 200, ..q };
        let problem = ProblemSpec::dense(Dtype::F16, q, kv).causal().softcap(5.0).known().unwrap();
        let (q, k, v) = (wave(q, 0.7), wave(kv, 0.9), wave(kv, 1.1));
        let inputs = Inputs::new(&problem, q.view(), k.view(), v.view()).unwrap();
        let exact = oracle::forward(&inputs);
        let gradients = oracle::backward(&inputs, q.view()).unwrap();
        let mut last = [0.0; 5];
        for (precision, limit) in [(Precision::F32, 1e-4), (Precision::F16, 1e-2), (Precision::Bf16, 1e-1)] {
            let plain = forward(&inputs, precision);
            let back = backward(&inputs, q.view(), precision).unwrap();
            let relative = |norms: ErrorNorms| norms.max / norms.max_expected;
            let errors = [
                relative(ErrorNorms::of(&plain.o, &exact.o)),
                ErrorNorms::of(&plain.lse, &exact.lse).max,
                relative(ErrorNorms::of(&back.dq, &gradients.dq)),
                relative(ErrorNorms::of(&back.dk, &gradients.dk)),
                relative(ErrorNorms::of(&back.dv, &gradients.dv)),
            ];
            for (error, last) in errors.iter().zip(last) {
                assert!(*error > last && *error < limit, "{precision:?}: {errors:?}");
            }
            last = errors;
        }
        assert_eq!(
            exact.lse.iter().filter(|&&l| l == f64::NEG_INFINITY).count(),
            200,
            "100 rows of 2 heads see no key"
        );
    }
}
