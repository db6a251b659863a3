//! O = softmax(S) V and LSE = ln Σ exp(S), where a sink is one more score, of a key without a value.

use ndarray::{Array1, Array2, Array4};
use rayon::prelude::*;

use super::{Scores, add_scaled};
use crate::inputs::Heads;
use crate::output::{HeadForward, forward_heads};
use crate::sink::exp_from;
use crate::{Element, Forward, Inputs};

/// The forward pass.
pub fn forward<T: Element>(inputs: &Inputs<'_, T>) -> Forward<f64> {
    of_heads(inputs)
}

pub(super) fn of_heads(inputs: &dyn Heads) -> Forward<f64> {
    with_added(inputs, add_scaled)
}

/// Σⱼ (Pᵢⱼ Vⱼ)², in the shape of O. If each P is rounded on its own, O is off by about the root of this sum times the
/// unit roundoff.
pub fn forward_squares<T: Element>(inputs: &Inputs<'_, T>) -> Array4<f64> {
    let add_squares =
        |o: &mut [f64], p: f64, v: &[f64]| o.iter_mut().zip(v).for_each(|(o, v)| *o += (p * v).powi(2));
    with_added(inputs, add_squares).o
}

/// The forward pass, in which `add(o, p, v)` adds what a key with weight P and row V gives to a row of O.
fn with_added(inputs: &dyn Heads, add: fn(&mut [f64], f64, &[f64])) -> Forward<f64> {
    let problem = inputs.problem();
    forward_heads(problem, |index, head_q| {
        let scores = Scores { problem, head: inputs.head(index, head_q) };
        forward_head(&scores, add)
    })
}

/// The ratio of the error of a GPU's exp2, log2, sqrt and tanh, which are within a few ulp, to that of the host's.
const DEVICE_ERROR: f64 = 4.0;

/// The largest error of a score if a GPU evaluates the function of scores in f32; 0 without such a function.
pub fn score_error<T: Element>(inputs: &Inputs<'_, T>) -> f64 {
    score_error_of_heads(inputs)
}

fn score_error_of_heads(inputs: &dyn Heads) -> f64 {
    let problem = inputs.problem();
    if problem.score().is_none() {
        return 0.0;
    }
    let heads =
        (0..problem.batch()).flat_map(|index| (0..problem.heads().q()).map(move |head| (index, head)));
    let of_head = |(index, head)| {
        let scores = Scores { problem, head: inputs.head(index, head) };
        let rows = (0..scores.head.len.q).into_par_iter().map(|i| {
            let (mut rounded, mut exact) = (scores.function::<f32>(i), scores.function::<f64>(i));
            let error = |j| {
                let (capped, _) = scores.capped(i, j);
                let rounded = rounded.as_mut().map(|function| f64::from(function.at(capped as f32, j)));
                let exact = exact.as_mut().map(|function| function.at(capped, j));
                rounded.zip(exact).map_or(0.0, |(rounded, exact)| (rounded - exact).abs())
            };
            scores.visible_keys(i).map(error).filter(|error| error.is_finite()).fold(0.0, f64::max)
        });
        rows.reduce(|| 0.0, f64::max)
    };
    DEVICE_ERROR * heads.map(of_head).fold(0.0, f64::max)
}

fn forward_head(scores: &Scores<'_>, add: fn(&mut [f64], f64, &[f64])) -> HeadForward<f64> {
    let (rows, head_dim_v) = (scores.head.len.q, scores.head.v.ncols());
    let mut o = Array2::zeros((rows, head_dim_v));
    let elements = o.as_slice_mut().expect("a new array is contiguous");
    let rows = elements.par_chunks_mut(head_dim_v).enumerate();
    let lse: Vec<f64> = rows.map(|(i, o)| forward_row(scores, i, o, add)).collect();
    HeadForward { o, lse: Array1::from(lse) }
}

/// Adds row i of O to `o`, which is 0, and returns its LSE.
fn forward_row(scores: &Scores<'_>, i: usize, o: &mut [f64], add: fn(&mut [f64], f64, &[f64])) -> f64 {
    let mut function = scores.function(i);
    let score = |j| {
        let (capped, _) = scores.capped(i, j);
        (j, function.as_mut().map_or(capped, |function| function.at(capped, j)))
    };
    let row: Vec<(usize, f64)> = scores.visible_keys(i).map(score).collect();
    let sink = f64::from(scores.head.sink);
    let max = row.iter().map(|&(_, s)| s).fold(sink, f64::max); // f64::max drops NaN
    if sink == f64::NEG_INFINITY && row.iter().all(|&(_, s)| s == f64::NEG_INFINITY) {
        return f64::NEG_INFINITY;
    }
    let sum: f64 = exp_from(sink, max) + row.iter().map(|&(_, s)| (s - max).exp()).sum::<f64>();
    for (j, s) in row {
        add(o, (s - max).exp() / sum, scores.v(j));
    }
    max + sum.ln()
}

#[cfg(test)]
mod tests {
    use super::*;
    use fa3_types::{Dtype, ProblemSpec, Shape};
    use ndarray::{Array4, ArrayView1};

    const SHAPE: Shape = Shape { batch: 1, seqlen: 2, heads: 1, head_dim: 4 };

    fn rows(rows: [[f32; 4]; 2]) -> Array4<f32> {
        Array4::from_shape_fn((1, 2, 1, 4), |(_, s, _, d)| rows[s][d])
    }

    fn run(spec: ProblemSpec, q: &Array4<f32>, k: &Array4<f32>, v: &Array4<f32>) -> Forward<f64> {
        let problem = spec.known().unwrap();
        forward(&Inputs::new(&problem, q.view(), k.view(), v.view()).unwrap())
    }

    fn run_with_sink(spec: ProblemSpec, qkv: [&Array4<f32>; 3], sink: f32) -> Forward<f64> {
        let (problem, sink) = (spec.sink().known().unwrap(), Array1::from_elem(1, sink));
        forward(&Inputs::with_sink(&problem, qkv.map(|x| x.view()), Some(sink.view())).unwrap())
    }

    fn spec() -> ProblemSpec {
        ProblemSpec::dense(Dtype::F32, SHAPE, SHAPE)
    }

    fn o_row(out: &Forward<f64>, row: usize) -> ArrayView1<'_, f64> {
        out.o.rows().into_iter().nth(row).unwrap()
    }

    #[test]
    fn two_keys_by_hand() {
        // scores of row 0: scale · (ln 3 / scale, 0) = (ln 3, 0), so P = (3/4, 1/4) and LSE = ln 4
        let q = rows([[2.0, 0.0, 0.0, 0.0], [0.0; 4]]);
        let k = rows([[3.0f32.ln(), 0.0, 0.0, 0.0], [0.0; 4]]);
        let v = rows([[4.0, 8.0, 0.0, 1.0], [0.0, 4.0, 4.0, 1.0]]);
        let out = run(spec(), &q, &k, &v);
        let near = |x: f64, y: f64| (x - y).abs() < 1e-6;
        assert!(
            out.o.iter().zip([3.0, 7.0, 1.0, 1.0, 2.0, 6.0, 2.0, 1.0]).all(|(&x, y)| near(x, y)),
            "{out:?}"
        );
        assert!(near(out.lse[[0, 0, 0]], 4.0f64.ln()) && near(out.lse[[0, 0, 1]], 2.0f64.ln()), "{out:?}");
    }

    #[test]
    fn scale_and_cap() {
        let q = rows([[1.0, 0.0, 0.0, 0.0], [0.0; 4]]);
        let k = rows([[6.0, 0.0, 0.0, 0.0], [0.0; 4]]);
        let scaled = run(spec().softmax_scale(0.25), &q, &k, &k);
        assert!((scaled.lse[[0, 0, 0]] - (1.5f64.exp() + 1.0).ln()).abs() < 1e-14);
        let capped = run(spec().softmax_scale(0.25).softcap(0.5), &q, &k, &k);
        let score = 0.5 * 3.0f64.tanh();
        assert!((capped.lse[[0, 0, 0]] - (score.exp() + 1.0).ln()).abs() < 1e-14);
    }

    #[test]
    fn a_masked_key_cannot_reach_the_result() {
        let q = rows([[1.0; 4], [1.0; 4]]);
        let clean = rows([[0.5; 4], [0.25; 4]]);
        let dirty = rows([[0.5; 4], [f32::NAN; 4]]);
        let causal = run(spec().causal(), &q, &dirty, &dirty);
        let expected = run(spec().causal(), &q, &clean, &clean);
        assert_eq!(o_row(&causal, 0), o_row(&expected, 0));
        assert_eq!(causal.lse[[0, 0, 0]], expected.lse[[0, 0, 0]]);
        assert!(o_row(&causal, 1).iter().all(|x| x.is_nan()) && causal.lse[[0, 0, 1]].is_nan());
    }

    #[test]
    fn a_row_without_keys_is_zero() {
        let x = rows([[1.0; 4], [1.0; 4]]);
        let k = Array4::from_elem((1, 1, 1, 4), 1.0);
        let out =
            run(ProblemSpec::dense(Dtype::F32, SHAPE, Shape { seqlen: 1, ..SHAPE }).causal(), &x, &k, &k);
        assert_eq!(out.lse.as_slice().unwrap(), [f64::NEG_INFINITY, 2.0]);
        assert_eq!(out.o.as_slice().unwrap(), [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]);
    }

    /// A sink of ln 4 beside scores (ln 3, 0) and (0, 0) makes the sums of exponentials 8 and 6.
    #[test]
    fn a_sink_is_in_the_denominator_alone() {
        let q = rows([[2.0, 0.0, 0.0, 0.0], [0.0; 4]]);
        let k = rows([[3.0f32.ln(), 0.0, 0.0, 0.0], [0.0; 4]]);
        let v = rows([[4.0, 8.0, 0.0, 1.0], [0.0, 4.0, 4.0, 1.0]]);
        let near = |x: f64, y: f64| (x - y).abs() < 1e-6;
        let out = run_with_sink(spec(), [&q, &k, &v], 4.0f32.ln());
        let expected = [12.0, 28.0, 4.0, 4.0, 4.0, 12.0, 4.0, 2.0].map(f64::from);
        let parts = [8.0, 8.0, 8.0, 8.0, 6.0, 6.0, 6.0, 6.0];
        assert!(
            out.o.iter().zip(expected).zip(parts).all(|((&o, sum), part)| near(o, sum / part)),
            "{out:?}"
        );
        assert!(near(out.lse[[0, 0, 0]], 8.0f64.ln()) && near(out.lse[[0, 0, 1]], 6.0f64.ln()), "{out:?}");
        // The sink is neither scaled nor capped.
        let capped = run_with_sink(spec().softmax_scale(1e-9).softcap(0.5), [&q, &k, &v], 4.0f32.ln());
        assert!(capped.lse.iter().all(|&lse| near(lse, 6.0f64.ln())), "{capped:?}");
        // A sink of -inf has no effect, and a large sink makes O vanish.
        assert_eq!(run_with_sink(spec(), [&q, &k, &v], f32::NEG_INFINITY), run(spec(), &q, &k, &v));
        for large in [1e30, f32::INFINITY] {
            let out = run_with_sink(spec(), [&q, &k, &v], large);
            assert!(out.o.iter().all(|&o| o == 0.0) && out.lse.iter().all(|&lse| lse == f64::from(large)));
        }
        let nan = run_with_sink(spec(), [&q, &k, &v], f32::NAN);
        assert!(nan.o.iter().chain(&nan.lse).all(|x| x.is_nan()));
        // LSE of a fully masked row is its sink.
        let one_key = ProblemSpec::dense(Dtype::F32, SHAPE, Shape { seqlen: 1, ..SHAPE }).causal();
        let k = Array4::zeros((1, 1, 1, 4));
        let out = run_with_sink(one_key, [&q, &k, &k], -3.0);
        assert_eq!(out.lse[[0, 0, 0]], -3.0);
        assert!(out.o.iter().all(|&o| o == 0.0));
    }

    #[test]
    fn scores_of_minus_infinity_make_an_empty_row() {
        let minus_inf = rows([[f32::NEG_INFINITY; 4]; 2]);
        let out = run(spec(), &rows([[1.0; 4]; 2]), &minus_inf, &rows([[1.0; 4]; 2]));
        assert!(
            out.lse.iter().all(|&x| x == f64::NEG_INFINITY) && out.o.iter().all(|&x| x == 0.0),
            "{out:?}"
        );
    }
}
