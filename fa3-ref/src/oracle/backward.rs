//! dQ, dK and dV by the chain rule.
//!
//! The gradient of the scaled score before the cap is dS_ij = P_ij (dP_ij − D_i + dLSE_i) c'(S_ij), since ∂LSE_i /
//! ∂S_ij = P_ij. D_i is Σ_j P_ij dP_ij = dO_i · O_i, and c' is the slope of the soft cap and the function of
//! scores. A sink's dP is 0.

use ndarray::{Array1, Array2};
use rayon::prelude::*;

use super::forward::{self, forward_head};
use super::{Scores, add_scaled, dot, row};
use crate::inputs::{Heads, OutputHeads};
use crate::output::{GroupGradients, HeadForward, backward_groups};
use crate::sink::{Row, sums};
use crate::{Element, Gradients, InputError, Inputs, OutputGradients};

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
    each_head(inputs, &output.into(), Sum::Values)
}

/// The sums of the absolute values of all terms of [`backward`], with dP_ij, D_i and dLSE_i as separate terms, and so
/// are both terms of a soft cap's derivative.
///
/// If a row's softmax is nearly one-hot, dP_ij − D_i cancels and the gradient all but vanishes; so does the derivative
/// of a soft cap near its bound. The remaining error of an f32 computation is then proportional to these magnitudes,
/// not to the gradient.
///
/// # Errors
/// The errors of [`backward`].
pub fn backward_magnitudes<'a, T: Element + 'a>(
    inputs: &Inputs<'_, T>,
    output: impl Into<OutputGradients<'a, T>>,
) -> Result<Gradients<f64>, InputError> {
    each_head(inputs, &output.into(), Sum::Magnitudes)
}

/// The sums of the squares of all terms that are rounded to 16 bits on the way to a gradient. The terms are P_ij dO_i
/// in dV, dS_ij K_j in dQ, dS_ij Q_i in dK, and in dQ and dK also the terms of D_i, which reads O. For dsink they are
/// only the terms of D.
///
/// A rounding is off by up to u, relative, for the unit roundoff u, and roundings are independent. So u times the root
/// of such a sum estimates the total rounding error.
///
/// # Errors
/// The errors of [`backward`].
pub fn backward_squares<'a, T: Element + 'a>(
    inputs: &Inputs<'_, T>,
    output: impl Into<OutputGradients<'a, T>>,
) -> Result<Gradients<f64>, InputError> {
    each_head(inputs, &output.into(), Sum::Squares)
}

/// The terms of a sum.
#[derive(Clone, Copy)]
enum Sum {
    /// The terms themselves.
    Values,
    /// The absolute values of the terms.
    Magnitudes,
    /// The squares of the rounded terms.
    Squares,
}

fn each_head(inputs: &dyn Heads, output: &dyn OutputHeads, sum: Sum) -> Result<Gradients<f64>, InputError> {
    let problem = inputs.problem();
    output.check(problem)?;
    let dsink = sums(
        inputs,
        output,
        || forward::of_heads(inputs),
        |row: Row| match sum {
            Sum::Values => row.gradient(),
            Sum::Magnitudes => row.magnitude(),
            Sum::Squares => row.square(),
        },
    );
    Ok(backward_groups(problem, dsink, |index, head_kv| {
        let group = problem.heads().group_size();
        let heads = (head_kv * group..(head_kv + 1) * group).map(|head_q| {
            let scores = Scores { problem, head: inputs.head(index, head_q) };
            let gradient = Gradient::new(scores, output.head(problem, index, head_q));
            match sum {
                Sum::Values => gradient.values(),
                Sum::Magnitudes => gradient.magnitudes(),
                Sum::Squares => gradient.squares(),
            }
        });
        sum_group(heads)
    }))
}

/// dQ of each head; dK and dV summed over the heads that share K and V.
fn sum_group(mut heads: impl Iterator<Item = HeadGradients>) -> GroupGradients<f64> {
    let first = heads.next().expect("a group has at least one head");
    let mut sum = GroupGradients { dq: vec![first.dq], dk: first.dk, dv: first.dv };
    for head in heads {
        sum.dq.push(head.dq);
        sum.dk += &head.dk;
        sum.dv += &head.dv;
    }
    sum
}

/// dQ, dK and dV of one query head.
struct HeadGradients {
    dq: Array2<f64>,
    dk: Array2<f64>,
    dv: Array2<f64>,
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
    fn new(scores: Scores<'_>, (dout, dlse): (Array2<f64>, Array1<f64>)) -> Gradient<'_> {
        let HeadForward { o, lse } = forward_head(&scores);
        let delta = (0..o.nrows()).map(|i| dot(row(&dout, i), row(&o, i)) - dlse[i]).collect();
        Gradient { scores, dout, dlse, o, lse, delta }
    }

    fn values(&self) -> HeadGradients {
        let head = &self.scores.head;
        self.sum(&head.q, &head.k, &self.dout, |i, j| {
            let (p, weight) = self.weights(i, self.scores.score_and_slope(i, j));
            (p, weight * self.difference(i, j))
        })
    }

    fn magnitudes(&self) -> HeadGradients {
        let head = &self.scores.head;
        let [q, k, v, o, dout] = [&head.q, &head.k, &head.v, &self.o, &self.dout].map(|x| x.mapv(f64::abs));
        let of_o: Vec<f64> = (0..o.nrows()).map(|i| dot(row(&dout, i), row(&o, i))).collect();
        self.sum(&q, &k, &dout, |i, j| {
            let (p, weight) = self.weights(i, self.scores.score_and_magnitude(i, j));
            let dp = dot(row(&dout, i), row(&v, j));
            (p, weight * (dp + of_o[i] + self.dlse[i].abs()))
        })
    }

    fn squares(&self) -> HeadGradients {
        let head = &self.scores.head;
        let [q, k, o, dout] = [&head.q, &head.k, &self.o, &self.dout].map(|x| x.mapv(|x| x * x));
        let of_o: Vec<f64> = (0..o.nrows()).map(|i| dot(row(&dout, i), row(&o, i))).collect();
        self.sum(&q, &k, &dout, |i, j| {
            let (p, weight) = self.weights(i, self.scores.score_and_slope(i, j));
            (p * p, weight * weight * (self.difference(i, j).powi(2) + of_o[i]))
        })
    }

    /// dP_ij − D_i + dLSE_i.
    fn difference(&self, i: usize, j: usize) -> f64 {
        dot(row(&self.dout, i), self.scores.v(j)) - self.delta[i]
    }

    /// Whether row `i` sees key `j`, and some score of the row is above -inf.
    fn counts(&self, i: usize, j: usize) -> bool {
        self.scores.allows(i, j) && self.lse[i] != f64::NEG_INFINITY
    }

    /// P_ij, and the factor of dP_ij − D_i + dLSE_i in dS_ij, softmax_scale · P_ij c'(S_ij), of a score and its slope.
    fn weights(&self, i: usize, (score, slope): (f64, f64)) -> (f64, f64) {
        let p = (score - self.lse[i]).exp();
        (p, self.scores.problem.softmax_scale().natural() * p * slope)
    }

    /// dQ, dK and dV as sums over visible pairs, by blocks of keys. `factors(i, j)` gives P_ij and dS_ij.
    fn sum(
        &self,
        q: &Array2<f64>,
        k: &Array2<f64>,
        dout: &Array2<f64>,
        factors: impl Fn(usize, usize) -> (f64, f64) + Sync,
    ) -> HeadGradients {
        let mut dq = Array2::zeros(q.dim());
        let mut dk = Array2::zeros(k.dim());
        let mut dv = Array2::zeros(self.scores.head.v.dim());
        for first in (0..k.nrows()).step_by(KEYS) {
            let keys = first..k.nrows().min(first + KEYS);
            // P_ij and dS_ij where a row sees a key.
            let of_row = |(i, dq): (usize, &mut [f64])| -> Vec<Option<(f64, f64)>> {
                let pair = |j| {
                    let pair = self.counts(i, j).then(|| factors(i, j));
                    pair.into_iter().for_each(|(_, ds)| add_scaled(dq, ds, row(k, j)));
                    pair
                };
                keys.clone().map(pair).collect()
            };
            let pairs: Vec<_> = rows_mut(&mut dq).enumerate().map(of_row).collect();
            let of_keys = rows_mut(&mut dk).zip(rows_mut(&mut dv)).enumerate().skip(first).take(keys.len());
            of_keys.for_each(|(j, (dk, dv))| {
                for (i, pairs) in pairs.iter().enumerate() {
                    if let Some((p, ds)) = pairs[j - first] {
                        add_scaled(dk, ds, row(q, i));
                        add_scaled(dv, p, row(dout, i));
                    }
                }
            });
        }
        HeadGradients { dq, dk, dv }
    }
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
        let Gradients { dq, dk, dv, dsink } = backward(&inputs(&problem, &x, sink.as_ref()), output).unwrap();
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
        let (gradient, magnitude) =
            (backward(&inputs, x.view()).unwrap(), backward_magnitudes(&inputs, x.view()).unwrap());
        // With one key P = 1 and O = V, so that dP − D cancels and only the rounding of its two terms is left.
        assert!(gradient.dq.iter().zip(&magnitude.dq).all(|(g, m)| g.abs() <= 1e-15 * m && *m > 1e-3));
        assert!(gradient.dv.iter().zip(&magnitude.dv).all(|(g, m)| g.abs() <= *m));

        // Scores far beyond the cap: its derivative 1 − tanh² cancels.
        let kv = Shape { seqlen: 2, ..kv };
        let problem = ProblemSpec::dense(Dtype::F32, q, kv).softcap(1e-3).known().unwrap();
        let [k, v] = [values(kv, 0.6), values(kv, 0.7)];
        let inputs = Inputs::new(&problem, x.view(), k.view(), v.view()).unwrap();
        let (gradient, magnitude) =
            (backward(&inputs, x.view()).unwrap(), backward_magnitudes(&inputs, x.view()).unwrap());
        assert!(gradient.dq.iter().zip(&magnitude.dq).all(|(g, m)| g.abs() <= 1e-9 * m && *m > 1e-3));
    }

    #[test]
    fn squares_are_of_what_is_rounded() {
        let q = Shape { batch: 1, seqlen: 1, heads: 2, head_dim: 4 };
        let kv = Shape { heads: 1, seqlen: 2, ..q };
        let problem = ProblemSpec::dense(Dtype::F32, q, kv).softmax_scale(0.8).known().unwrap();
        let [q, k, v, dout] = [(q, 0.1), (kv, 0.2), (kv, 0.3), (q, 0.4)].map(|(shape, at)| values(shape, at));
        let inputs = Inputs::new(&problem, q.view(), k.view(), v.view()).unwrap();
        let (o, squares) = (forward(&inputs).o, backward_squares(&inputs, dout.view()).unwrap());
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
        let dq = backward(&inputs, dout.view()).unwrap().dq;
        assert!(dq.iter().zip(&squares.dq).all(|(x, square)| x * x <= 2.0 * square && *square < 10.0));
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
