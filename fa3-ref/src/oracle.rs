//! Attention in f64 straight from the equations, one row at a time, visible keys only.
//!
//! A masked key takes no part at all, so values of its K and V, NaN included, cannot reach the result. A row with no
//! visible key, or with only scores of -inf, gives O = 0, LSE = -inf and gradients 0. NaN in a visible score makes O
//! and LSE of its row NaN.

mod backward;
mod forward;

pub use backward::{BackwardSums, backward, backward_sums};
pub use forward::{forward, forward_squares, score_error};

use fa3_types::{Dual, HostReal, KnownProblem, ScoreRow};

use crate::inputs::Head;

/// Σ a_i b_i. Eight partial sums let the compiler use vector instructions.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let (a_chunks, a_rest) = a.as_chunks::<8>();
    let (b_chunks, b_rest) = b.as_chunks::<8>();
    let mut sums = [0.0; 8];
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        for i in 0..8 {
            sums[i] += a[i] * b[i];
        }
    }
    sums.iter().sum::<f64>() + a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum::<f64>()
}

/// y += factor · x
fn add_scaled(y: &mut [f64], factor: f64, x: &[f64]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += factor * x;
    }
}

/// One head of one sequence, with the scores as a function.
struct Scores<'a> {
    problem: &'a KnownProblem,
    head: Head,
}

impl Scores<'_> {
    fn allows(&self, i: usize, j: usize) -> bool {
        let [sequence, head] = self.head.of;
        self.problem.allows([sequence, head, i], j)
    }

    /// The keys that query row `i` sees.
    fn visible_keys(&self, i: usize) -> impl Iterator<Item = usize> {
        (0..self.head.len.k).filter(move |&j| self.allows(i, j))
    }

    /// The function of scores in row `i`, if there is one.
    fn function<R: HostReal>(&self, i: usize) -> Option<ScoreRow<'_, R>> {
        let [sequence, head] = self.head.of;
        self.problem.score_row([sequence, head, i])
    }

    /// The score S_ij and its derivatives. `function` is the row's function of scores.
    fn slope(&self, [i, j]: [usize; 2], function: &mut Option<ScoreRow<'_, Dual<f64>>>) -> Slope {
        let (capped, of_cap) = self.capped(i, j);
        let of_capped = function.as_mut().map(|function| function.with_slope(capped, 1.0, j));
        let (score, of_function) = of_capped.unwrap_or((capped, 1.0));
        Slope { score, of_cap, of_function }
    }

    /// The score before the function of scores, and its derivative by the scaled score.
    fn capped(&self, i: usize, j: usize) -> (f64, f64) {
        let scaled = self.problem.softmax_scale().natural() * dot(self.q(i), self.k(j));
        self.problem.softcap().map_or((scaled, 1.0), |cap| {
            let capped = cap.apply(scaled);
            (capped, cap.derivative(capped))
        })
    }

    fn q(&self, i: usize) -> &[f64] {
        row(&self.head.q, i)
    }

    fn k(&self, j: usize) -> &[f64] {
        row(&self.head.k, j)
    }

    fn v(&self, j: usize) -> &[f64] {
        row(&self.head.v, j)
    }
}

/// A score, and its derivative by the scaled score, in two factors.
struct Slope {
    /// The score: scaled, capped, and replaced by the function of scores.
    score: f64,
    /// The derivative of the soft cap.
    of_cap: f64,
    /// The derivative of the function of scores.
    of_function: f64,
}

impl Slope {
    /// The derivative of the score.
    fn of_score(&self) -> f64 {
        self.of_cap * self.of_function
    }

    /// The absolute value of the derivative, with both terms of a soft cap's derivative, 1 − (capped / c)², added: near
    /// the bound they cancel, and in f32 the rounding of both is left.
    fn magnitude(&self) -> f64 {
        (2.0 - self.of_cap) * self.of_function.abs()
    }
}

/// Row `i` of a contiguous matrix.
fn row(matrix: &ndarray::Array2<f64>, i: usize) -> &[f64] {
    let width = matrix.ncols();
    let elements = matrix.as_slice().expect("the crate's own matrices are in row-major order");
    &elements[i * width..][..width]
}
