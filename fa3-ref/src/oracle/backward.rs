//! dQ, dK and dV by the chain rule.
//!
//! The gradient of the scaled score before the cap is dS_ij = P_ij (dP_ij − D_i + dLSE_i) c'(S_ij), since ∂LSE_i /
//! ∂S_ij = P_ij. D_i is Σ_j P_ij dP_ij = dO_i · O_i, and c' is the slope of the soft cap and the function of
//! scores. A sink's dP is 0.

use std::collections::HashMap;

use ndarray::{Array1, Array2, Axis, Slice};
use rayon::prelude::*;

use super::forward;
use super::{Scores, Slope, add_scaled, dot, row};
use crate::inputs::{Head, Heads, OutputHeads};
use crate::output::{GroupGradients, HeadForward, add_tables, backward_groups};
use crate::sink::{Row, sums};
use crate::{Element, Forward, Gradients, InputError, Inputs, OutputGradients};

/// Keys whose factors are in memory at a time.
const KEYS: usize = 256;

/// The backward pass for the gradients of O and LSE.
///
/// # Errors
/// [`InputError::Shape`] or [`InputError::LseShape`] if the gradients do not have O's and LSE's shapes.
pub fn backward<'a, T: Element + 'a>(
    inputs: &Inputs<'_, T>,
    output: impl Into<OutputGradients<'a, T>>,
) -> Result<Gradients<f64>, InputError> {
    let (_, [gradients]) = each_head(inputs, &output.into(), [Row::gradient], |head| head.values())?;
    Ok(gradients)
}

/// Results of both passes, and sums over the terms of each gradient, which tell its rounding errors.
pub struct BackwardSums {
    /// O and LSE.
    pub forward: Forward<f64>,
    /// The gradients, as [`backward`] gives them.
    pub gradients: Gradients<f64>,
    /// The sums of the absolute values of all terms, with dP_ij, D_i and dLSE_i as separate terms, and so are both
    /// terms of a soft cap's derivative.
    ///
    /// If a row's softmax is nearly one-hot, dP_ij − D_i cancels and the gradient all but vanishes; so does the
    /// derivative of a soft cap near its bound. The remaining error of an f32 computation is then proportional to these
    /// magnitudes, not to the gradient.
    pub magnitudes: Gradients<f64>,
    /// The sums of the squares of all terms that are rounded to 16 bits on the way to a gradient. The terms are P_ij
    /// dO_i in dV, dS_ij K_j in dQ, dS_ij Q_i in dK, and in dQ and dK also the terms of D_i, which reads O. For dsink
    /// they are only the terms of D.
    ///
    /// A rounding is off by up to u, relative, for the unit roundoff u, and roundings are independent. So u times the
    /// root of such a sum estimates the total rounding error. In a table's gradient only D is rounded, and all terms of
    /// a row have the same error.
    pub squares: Gradients<f64>,
}

/// The forward pass, the backward pass, and the sums of the absolute values and of the squares of its terms.
///
/// # Errors
/// The errors of [`backward`].
pub fn backward_sums<'a, T: Element + 'a>(
    inputs: &Inputs<'_, T>,
    output: impl Into<OutputGradients<'a, T>>,
) -> Result<BackwardSums, InputError> {
    let of_sinks = [Row::gradient, Row::magnitude, Row::square];
    let (forward, sums) = each_head(inputs, &output.into(), of_sinks, |head| head.sums())?;
    let [gradients, magnitudes, squares] = sums;
    Ok(BackwardSums { forward, gradients, magnitudes, squares })
}

/// The forward pass, and `N` sums for each gradient: over the rows of `of_sinks`, and `of_head`.
fn each_head<const N: usize>(
    inputs: &dyn Heads,
    output: &dyn OutputHeads,
    of_sinks: [fn(&Row) -> f64; N],
    of_head: impl Fn(&Gradient<'_>) -> [HeadGradients; N] + Sync,
) -> Result<(Forward<f64>, [Gradients<f64>; N]), InputError> {
    let problem = inputs.problem();
    output.check(problem)?;
    let forward = forward::of_heads(inputs);
    let of_sinks = of_sinks.map(|of_row| sums(inputs, output, || forward.clone(), |row| of_row(&row)));
    let gradients = backward_groups(problem, of_sinks, |index, head_kv| {
        let group = problem.heads().group_size();
        let heads = (head_kv * group..(head_kv + 1) * group).map(|head_q| {
            let scores = Scores { problem, head: inputs.head(index, head_q) };
            let of_output = output.head(problem, index, head_q);
            of_head(&Gradient::new(scores, forward.head(problem, index, head_q), of_output))
        });
        sum_group(heads)
    });
    Ok((forward, gradients))
}

/// The gradients of the heads that share K and V: dQ of each head; dK and dV summed over the heads.
fn sum_group<const N: usize>(
    mut heads: impl Iterator<Item = [HeadGradients; N]>,
) -> [GroupGradients<f64>; N] {
    let first = heads.next().expect("a group has at least one head");
    let mut sums =
        first.map(|HeadGradients { dq, dk, dv, dtables }| GroupGradients { dq: vec![dq], dk, dv, dtables });
    for (sum, of_head) in heads.flat_map(|head| head.into_iter().enumerate()) {
        sums[sum].dq.push(of_head.dq);
        sums[sum].dk += &of_head.dk;
        sums[sum].dv += &of_head.dv;
        add_tables(&mut sums[sum].dtables, &of_head.dtables);
    }
    sums
}

/// The gradients of one query head.
struct HeadGradients {
    dq: Array2<f64>,
    dk: Array2<f64>,
    dv: Array2<f64>,
    dtables: Vec<Vec<f64>>,
}

struct Gradient<'a> {
    scores: Scores<'a>,
    /// dO (seqlen_q, head_dim_v).
    dout: Array2<f64>,
    /// dLSE (seqlen_q).
    dlse: Array1<f64>,
    o: Array2<f64>,
    lse: Array1<f64>,
    /// D_i − dLSE_i (seqlen_q).
    delta: Vec<f64>,
}

impl Gradient<'_> {
    fn new(
        scores: Scores<'_>,
        HeadForward { o, lse }: HeadForward<f64>,
        (dout, dlse): (Array2<f64>, Array1<f64>),
    ) -> Gradient<'_> {
        let delta = (0..o.nrows()).map(|i| dot(row(&dout, i), row(&o, i)) - dlse[i]).collect();
        Gradient { scores, dout, dlse, o, lse, delta }
    }

    fn values(&self) -> [HeadGradients; 1] {
        let head = &self.scores.head;
        let [values] = self.sum([[&head.q, &head.k, &self.dout]], |i, j, slope| {
            let (p, weight) = self.weights(i, &slope);
            [(p, weight * slope.of_score() * self.difference(i, j))]
        });
        let [dtables, ..] = self.tables(|_, _| 0.0, &[]);
        [HeadGradients { dtables, ..values }]
    }

    /// The values, their magnitudes, and the squares of rounded terms.
    fn sums(&self) -> [HeadGradients; 3] {
        let head = &self.scores.head;
        let tensors = [&head.q, &head.k, &head.v, &self.o, &self.dout];
        let absolute = tensors.map(|x| x.mapv(f64::abs));
        let squares = tensors.map(|x| x.mapv(|x| x * x));
        let d_of = |[.., o, dout]: &[Array2<f64>; 5]| -> Vec<f64> {
            (0..o.nrows()).map(|i| dot(row(dout, i), row(o, i))).collect()
        };
        let [absolute_d, square_d] = [&absolute, &squares].map(d_of);
        let [q, k, v, _, dout] = &absolute;
        let [square_q, square_k, .., square_dout] = &squares;
        let of_terms = [[&head.q, &head.k, &self.dout], [q, k, dout], [square_q, square_k, square_dout]];
        let magnitude = |i, j| dot(row(dout, i), row(v, j)) + absolute_d[i] + self.dlse[i].abs();
        let mut dtables = self.tables(magnitude, &square_d).into_iter();
        let sums = self.sum(of_terms, |i, j, slope| {
            let ((p, weight), difference) = (self.weights(i, &slope), self.difference(i, j));
            let magnitude = magnitude(i, j);
            let of_score = weight * slope.of_score();
            [
                (p, of_score * difference),
                (p, weight * slope.magnitude() * magnitude),
                (p * p, of_score * of_score * (difference.powi(2) + square_d[i])),
            ]
        });
        sums.map(|sum| HeadGradients { dtables: dtables.next().unwrap_or_default(), ..sum })
    }

    /// The gradients of tables, their magnitudes, and the squares of rounded terms, given the magnitude of each dP_ij −
    /// D_i and the squares of each D_i.
    fn tables(&self, magnitude: impl Fn(usize, usize) -> f64, square_d: &[f64]) -> [Vec<Vec<f64>>; 3] {
        let Scores { problem, head: Head { of: [sequence, head], len, .. }, .. } = self.scores;
        let mut sums = [(); 3].map(|()| problem.score_zeros());
        if sums[0].is_empty() {
            return sums;
        }
        for i in 0..len.q {
            let (mut function, mut of_row) = (self.scores.function::<f64>(i), HashMap::new());
            for mut read in problem.score_reads::<f64>([sequence, head, i]) {
                for j in (0..len.k).filter(|&j| self.counts(i, j)) {
                    let (capped, _) = self.scores.capped(i, j);
                    let score = function.as_mut().map_or(capped, |function| function.at(capped, j));
                    let (table, place, slope) = read.at(capped, j);
                    let weight = (score - self.lse[i]).exp() * slope;
                    sums[0][table][place] += weight * self.difference(i, j);
                    sums[1][table][place] += weight.abs() * magnitude(i, j);
                    *of_row.entry((table, place)).or_insert(0.0) += weight;
                }
            }
            for ((table, place), weight) in of_row {
                sums[2][table][place] += f64::powi(weight, 2) * square_d.get(i).unwrap_or(&0.0);
            }
        }
        sums
    }

    /// dP_ij − D_i + dLSE_i.
    fn difference(&self, i: usize, j: usize) -> f64 {
        dot(row(&self.dout, i), self.scores.v(j)) - self.delta[i]
    }

    /// Whether row `i` sees key `j`, and some score of the row is above -inf.
    fn counts(&self, i: usize, j: usize) -> bool {
        self.scores.allows(i, j) && self.lse[i] != f64::NEG_INFINITY
    }

    /// P_ij, and softmax_scale · P_ij.
    fn weights(&self, i: usize, slope: &Slope) -> (f64, f64) {
        let p = (slope.score - self.lse[i]).exp();
        (p, self.scores.problem.softmax_scale().natural() * p)
    }

    /// dQ, dK and dV as sums over visible pairs, by blocks of keys. There are `N` sums of each, of terms with their own
    /// Q, K and dO. `factors(i, j, slope)` gives P_ij and dS_ij of each.
    fn sum<const N: usize>(
        &self,
        of_terms: [[&Array2<f64>; 3]; N],
        factors: impl Fn(usize, usize, Slope) -> [(f64, f64); N] + Sync,
    ) -> [HeadGradients; N] {
        let head = &self.scores.head;
        // The sums lie side by side in the columns.
        let zeros = |of: &Array2<f64>| Array2::zeros((of.nrows(), N * of.ncols()));
        let [mut dq, mut dk, mut dv] = [&head.q, &head.k, &head.v].map(zeros);
        for first in (0..head.k.nrows()).step_by(KEYS) {
            let keys = first..head.k.nrows().min(first + KEYS);
            // P_ij and dS_ij where a row sees a key.
            let of_row = |(i, dq): (usize, &mut [f64])| -> Vec<Option<[(f64, f64); N]>> {
                let mut function = self.scores.function(i);
                let pair = |j| {
                    let pairs =
                        self.counts(i, j).then(|| factors(i, j, self.scores.slope([i, j], &mut function)));
                    for ((dq, [_, k, _]), (_, ds)) in
                        parts(dq, N).zip(of_terms).zip(pairs.into_iter().flatten())
                    {
                        add_scaled(dq, ds, row(k, j));
                    }
                    pairs
                };
                keys.clone().map(pair).collect()
            };
            let pairs: Vec<_> = rows_mut(&mut dq).enumerate().map(of_row).collect();
            let of_keys = rows_mut(&mut dk).zip(rows_mut(&mut dv)).enumerate().skip(first).take(keys.len());
            of_keys.for_each(|(j, (dk, dv))| {
                for (i, pairs) in pairs.iter().enumerate() {
                    let sums = parts(dk, N).zip(parts(dv, N)).zip(of_terms);
                    for (((dk, dv), [q, _, dout]), (p, ds)) in
                        sums.zip(pairs[j - first].into_iter().flatten())
                    {
                        add_scaled(dk, ds, row(q, i));
                        add_scaled(dv, p, row(dout, i));
                    }
                }
            });
        }
        std::array::from_fn(|index| {
            let part = |all: &Array2<f64>| {
                let columns = all.ncols() / N;
                all.slice_axis(Axis(1), Slice::from(index * columns..(index + 1) * columns)).to_owned()
            };
            HeadGradients { dq: part(&dq), dk: part(&dk), dv: part(&dv), dtables: vec![] }
        })
    }
}

/// `count` equal parts of a row.
fn parts(row: &mut [f64], count: usize) -> impl Iterator<Item = &mut [f64]> {
    row.chunks_exact_mut(row.len() / count)
}

fn rows_mut(matrix: &mut Array2<f64>) -> impl IndexedParallelIterator<Item = &mut [f64]> {
    let width = matrix.ncols();
    matrix.as_slice_mut().expect("a new array is contiguous").par_chunks_mut(width)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oracle::forward;
    use fa3_types::{Dtype, KnownProblem, Mask, ProblemSpec, Shape};
    use ndarray::{Array3, Array4, Axis};

    /// Fixed numbers around 0 without repetition.
    fn values(shape: Shape, seed: f64) -> Array4<f64> {
        let mut x = seed;
        Array4::from_shape_simple_fn(shape.dims(), || {
            x = (x * 997.0 + 0.123).fract();
            2.0 * x - 1.0
        })
    }

    /// φ = Σ dO ∘ O + Σ dLSE ∘ LSE: its gradient is what `backward` computes.
    fn phi(
        problem: &KnownProblem,
        x: &[Array4<f64>; 3],
        sink: Option<&Array1<f32>>,
        dout: &Array4<f64>,
        dlse: &Array3<f32>,
    ) -> f64 {
        let inputs = inputs(problem, x, sink);
        let forward = forward(&inputs);
        (&forward.o * dout).sum() + (&forward.lse * &dlse.mapv(f64::from)).sum()
    }

    fn inputs<'a>(
        problem: &'a KnownProblem,
        x: &'a [Array4<f64>; 3],
        sink: Option<&'a Array1<f32>>,
    ) -> Inputs<'a, f64> {
        Inputs::with_sink(problem, x.each_ref().map(|x| x.view()), sink.map(|sink| sink.view())).unwrap()
    }

    fn check_against_differences(spec: ProblemSpec) {
        let problem = spec.known().unwrap();
        let mut x =
            [values(problem.q().shape, 0.1), values(problem.k().shape, 0.2), values(problem.v().shape, 0.3)];
        let dout = values(problem.o().shape, 0.4);
        let sink = problem.has_sink().then(|| Array1::from_vec(vec![0.5, -1.5]));
        let dlse =
            Array3::from_shape_fn(problem.lse_shape(), |(b, h, i)| ((7 * b + 5 * h + 3 * i) as f32).sin());
        let output = OutputGradients { dout: dout.view(), dlse: Some(dlse.view()) };
        let Gradients { dq, dk, dv, dsink, dtables } =
            backward(&inputs(&problem, &x, sink.as_ref()), output).unwrap();
        assert!(dtables.is_empty());
        let h = 1e-5;
        for (which, gradient) in [dq, dk, dv].into_iter().enumerate() {
            for (at, &g) in gradient.indexed_iter() {
                let mut phi_at = |step: f64| {
                    x[which][at] += step;
                    let phi = phi(&problem, &x, sink.as_ref(), &dout, &dlse);
                    x[which][at] -= step;
                    phi
                };
                let difference = (phi_at(h) - phi_at(-h)) / (2.0 * h);
                assert!(
                    (g - difference).abs() < 1e-8,
                    "{problem}: input {which} at {at:?}: {g} and {difference}"
                );
            }
        }
        for (head, g) in dsink.into_iter().flatten().enumerate() {
            let phi_at = |step: f32| {
                let mut moved = sink.clone().unwrap();
                moved[head] += step;
                let at = moved[head];
                (phi(&problem, &x, Some(&moved), &dout, &dlse), f64::from(at))
            };
            let ((above, at_above), (below, at_below)) = (phi_at(1e-3), phi_at(-1e-3));
            let difference = (above - below) / (at_above - at_below);
            assert!((g - difference).abs() < 1e-5, "{problem}: sink {head}: {g} and {difference}");
        }
    }

    #[test]
    fn gradients_are_finite_differences() {
        let q = Shape { batch: 2, seqlen: 3, heads: 2, head_dim: 4 };
        let kv = Shape { batch: 2, seqlen: 4, heads: 1, head_dim: 4 };
        let spec = || ProblemSpec::dense(Dtype::F32, q, kv);
        check_against_differences(spec());
        check_against_differences(spec().causal().head_dim_v(8));
        check_against_differences(spec().softcap(0.7).softmax_scale(1.3));
        check_against_differences(spec().mask(Mask::Window { left: Some(0), right: Some(1) }));
        check_against_differences(spec().sink().softcap(0.7));
        // The first two rows see no key.
        let longer = ProblemSpec::dense(Dtype::F32, Shape { seqlen: 6, ..q }, kv);
        check_against_differences(longer.sink().causal());
    }

    #[test]
    fn magnitudes_bound_the_gradients_and_do_not_cancel() {
        let q = Shape { batch: 1, seqlen: 3, heads: 2, head_dim: 4 };
        let kv = Shape { seqlen: 1, heads: 1, ..q };
        let problem = ProblemSpec::dense(Dtype::F32, q, kv).known().unwrap();
        let [x, k, v] = [values(q, 0.5), values(kv, 0.6), values(kv, 0.7)];
        let inputs = Inputs::new(&problem, x.view(), k.view(), v.view()).unwrap();
        let BackwardSums { gradients: gradient, magnitudes: magnitude, .. } =
            backward_sums(&inputs, x.view()).unwrap();
        // With one key P = 1 and O = V, so that dP − D cancels and only the rounding of its two terms is left.
        assert!(gradient.dq.iter().zip(&magnitude.dq).all(|(g, m)| g.abs() <= 1e-15 * m && *m > 1e-3));
        assert!(gradient.dv.iter().zip(&magnitude.dv).all(|(g, m)| g.abs() <= *m));

        // Scores far beyond the cap: its derivative 1 − tanh² cancels.
        let kv = Shape { seqlen: 2, ..kv };
        let problem = ProblemSpec::dense(Dtype::F32, q, kv).softcap(1e-3).known().unwrap();
        let [k, v] = [values(kv, 0.6), values(kv, 0.7)];
        let inputs = Inputs::new(&problem, x.view(), k.view(), v.view()).unwrap();
        let BackwardSums { gradients: gradient, magnitudes: magnitude, .. } =
            backward_sums(&inputs, x.view()).unwrap();
        assert!(gradient.dq.iter().zip(&magnitude.dq).all(|(g, m)| g.abs() <= 1e-9 * m && *m > 1e-3));
    }

    #[test]
    fn squares_are_of_what_is_rounded() {
        let q = Shape { batch: 1, seqlen: 1, heads: 2, head_dim: 4 };
        let kv = Shape { heads: 1, seqlen: 2, ..q };
        let problem = ProblemSpec::dense(Dtype::F32, q, kv).softmax_scale(0.8).known().unwrap();
        let [q, k, v, dout] = [(q, 0.1), (kv, 0.2), (kv, 0.3), (q, 0.4)].map(|(shape, at)| values(shape, at));
        let inputs = Inputs::new(&problem, q.view(), k.view(), v.view()).unwrap();
        let BackwardSums { forward, gradients, squares, .. } = backward_sums(&inputs, dout.view()).unwrap();
        let o = forward.o;
        let row = |x: &Array4<f64>, row, head| {
            let x = x.index_axis(Axis(0), 0);
            x.index_axis(Axis(0), row).index_axis(Axis(0), head).to_owned()
        };
        let expected_at = |key: usize, column: usize| {
            let of_head = |head| {
                let [q, dout, o] = [&q, &dout, &o].map(|x| row(x, 0, head));
                let exp = |key: usize| (0.8 * q.dot(&row(&k, key, 0))).exp();
                let p = exp(key) / (exp(0) + exp(1));
                let ds = 0.8 * p * (dout.dot(&row(&v, key, 0)) - dout.dot(&o));
                let of_o = (0.8 * p).powi(2) * (&dout * &o).mapv(|x| x * x).sum();
                [(ds * ds + of_o) * q[column].powi(2), (p * dout[column]).powi(2)]
            };
            let [a, b] = [0, 1].map(of_head);
            [a[0] + b[0], a[1] + b[1]]
        };
        for ((_, key, _, column), &dk) in squares.dk.indexed_iter() {
            let [of_dk, of_dv] = expected_at(key, column);
            assert!((dk / of_dk - 1.0).abs() < 1e-12, "{dk} {of_dk}");
            assert!((squares.dv[[0, key, 0, column]] / of_dv - 1.0).abs() < 1e-12, "{of_dv}");
        }
        // dQ is the sum of two terms: its square is at most twice the sum of their squares.
        assert!(
            gradients.dq.iter().zip(&squares.dq).all(|(x, square)| x * x <= 2.0 * square && *square < 10.0)
        );
    }

    #[test]
    fn rows_whose_scores_are_all_minus_infinity_have_no_gradient() {
        let shape = Shape { batch: 1, seqlen: 2, heads: 1, head_dim: 4 };
        let problem = ProblemSpec::dense(Dtype::F32, shape, shape).known().unwrap();
        let (q, k) =
            (Array4::from_elem(shape.dims(), 1.0), Array4::from_elem(shape.dims(), f64::NEG_INFINITY));
        let gradients =
            backward(&Inputs::new(&problem, q.view(), k.view(), q.view()).unwrap(), q.view()).unwrap();
        assert!([gradients.dq, gradients.dk, gradients.dv].iter().flatten().all(|&g| g == 0.0));
    }

    #[test]
    fn rows_without_keys_have_no_gradient() {
        let q = Shape { batch: 1, seqlen: 3, heads: 1, head_dim: 4 };
        let kv = Shape { seqlen: 1, ..q };
        let problem = ProblemSpec::dense(Dtype::F32, q, kv).causal().known().unwrap();
        let [x, k] = [values(q, 0.5), values(kv, 0.6)];
        let inputs = Inputs::new(&problem, x.view(), k.view(), k.view()).unwrap();
        let gradients = backward(&inputs, x.view()).unwrap();
        assert!(gradients.dq.iter().all(|&g| g == 0.0), "one key: P is 1 whatever Q is");
        // Only the last row sees the key, with P = 1: dV equals that row of dO.
        assert_eq!(gradients.dv.as_slice().unwrap(), &x.as_slice().unwrap()[8..]);
    }
}
