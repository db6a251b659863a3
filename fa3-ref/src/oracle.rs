//! Attention in f64 straight from the equations, one row at a time, visible keys only.
//!
//! A masked key takes no part at all, so values of its K and V, NaN included, cannot reach the result. A row with no
//! visible key, or with only scores of -inf, gives O = 0, LSE = -inf and gradients 0. NaN in a visible score makes O
//! and LSE of its row NaN.

mod backward;
mod forward;

pub use backward::{backward, backward_magnitudes, backward_squares};
pub use forward::{forward, score_error};

use fa3_types::{KnownProblem, SoftCap};

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

    /// The score S_ij: scaled, capped, and replaced by the function of scores.
    fn score(&self, i: usize, j: usize) -> f64 {
        self.score_and_slope(i, j).0
    }

    /// The score, and its derivative by the scaled score.
    fn score_and_slope(&self, i: usize, j: usize) -> (f64, f64) {
        self.replaced([i, j], self.capped(i, j))
    }

    /// The score, and the absolute value of its derivative, with both terms of a soft cap's derivative, 1 − (capped /
    /// c)², added: near the bound they cancel, and in f32 the rounding of both is left.
    fn score_and_magnitude(&self, i: usize, j: usize) -> (f64, f64) {
        let (capped, slope) = self.capped(i, j);
        let (score, magnitude) = self.replaced([i, j], (capped, 2.0 - slope));
        (score, magnitude.abs())
    }

    /// A capped score and its derivative, after the function of scores.
    fn replaced(&self, [i, j]: [usize; 2], (capped, slope): (f64, f64)) -> (f64, f64) {
        let [sequence, head] = self.head.of;
        match self.problem.score_row([sequence, head, i]) {
            Some(mut row) => row.with_slope(capped, slope, j),
            None => (capped, slope),
        }
    }

    /// The score before the function of scores, and its derivative by the scaled score.
    fn capped(&self, i: usize, j: usize) -> (f64, f64) {
        let scaled = self.problem.softmax_scale().natural() * dot(self.q(i), self.k(j));
        let cap = |cap: SoftCap| (cap.apply(scaled), cap.derivative(cap.apply(scaled)));
        self.problem.softcap().map_or((scaled, 1.0), cap)
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

/// Row `i` of a contiguous matrix.
fn row(matrix: &ndarray::Array2<f64>, i: usize) -> &[f64] {
    let width = matrix.ncols();
    let elements = matrix.as_slice().expect("the crate's own matrices are in row-major order");
    &elements[i * width..][..width]
}
