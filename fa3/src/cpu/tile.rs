//! One block of query rows of one head.

use std::f64::consts::LN_2;

use fa3_sched::{KvRange, Lens, Tiling};
use fa3_types::{Lengths, Problem};
use ndarray::linalg::general_mat_mul;
use ndarray::{Array1, Array2, ArrayViewMut2, Axis, Slice};

use super::exp2::exp2;
use super::unit::ScoreUnit;
use super::{TILE_M, TILE_N};

/// K (seqlen_k, head_dim) and V (seqlen_k, head_dim_v) of one head.
pub(super) struct KeyValue {
    pub(super) k: Array2<f32>,
    pub(super) v: Array2<f32>,
}

/// O (rows, head_dim_v) and LSE (rows) of tile `m_block`, whose rows of Q are `q`.
pub(super) fn attend(
    problem: &Problem,
    len: Lengths,
    m_block: usize,
    q: Array2<f32>,
    kv: &KeyValue,
) -> (Array2<f32>, Array1<f32>) {
    let range = kv_range(problem, len, m_block);
    let mut softmax = Softmax::new(problem, q.nrows());
    let mut o = Array2::zeros((q.nrows(), kv.v.ncols()));
    let mut scores = Array2::zeros((q.nrows(), TILE_N));
    for block in range.first..range.end {
        let first = block as usize * TILE_N;
        let keys = Slice::from(first..len.k.min(first + TILE_N));
        let (k, v) = (kv.k.slice_axis(Axis(0), keys), kv.v.slice_axis(Axis(0), keys));
        let mut s = scores.slice_axis_mut(Axis(1), Slice::from(..k.nrows()));
        general_mat_mul(1.0, &q, &k.t(), 0.0, &mut s); // A1:17
        softmax.unit.cap(&mut s);
        if !(range.unmasked_first..range.unmasked_end).contains(&block) {
            for ((row, key), s) in s.indexed_iter_mut() {
                if !problem.mask().allows(m_block * TILE_M + row, first + key, len) {
                    *s = f32::NEG_INFINITY;
                }
            }
        }
        softmax.step(&mut s, &mut o);
        general_mat_mul(1.0, &s, &v, 1.0, &mut o); // A1:21
    }
    let lse = softmax.finish(&mut o);
    (o, lse)
}

fn kv_range(problem: &Problem, len: Lengths, m_block: usize) -> KvRange<u32> {
    let group = problem.heads().group_size() as u32;
    let tiling = Tiling::new(TILE_M as u32, TILE_N as u32, group, problem.mask());
    // A validated problem's lengths and head counts are below 2³¹.
    tiling.kv_range(m_block as u32, Lens { q: len.q as u32, k: len.k as u32 })
}

/// Running row maxima and sums, in base 2.
struct Softmax {
    unit: ScoreUnit,
    m: Array1<f32>,
    l: Array1<f32>,
}

impl Softmax {
    fn new(problem: &Problem, rows: usize) -> Softmax {
        let m = Array1::from_elem(rows, f32::NEG_INFINITY);
        Softmax { unit: ScoreUnit::of(problem), m, l: Array1::zeros(rows) } // A1:13
    }

    /// Turns scores into P and rescales O to the new maxima.
    fn step(&mut self, scores: &mut ArrayViewMut2<'_, f32>, o: &mut Array2<f32>) {
        for (i, mut row) in scores.rows_mut().into_iter().enumerate() {
            let row = row.as_slice_mut().expect("the score buffer is row-major");
            let m_old = self.m[i];
            let m = row.iter().fold(m_old, |max, &s| if s > max { s } else { max }); // A1:18, drops NaN
            // A row that has seen no key keeps m = -inf; 0 in its place makes every exponential 0.
            let reference = if m == f32::NEG_INFINITY { 0.0 } else { m };
            for s in row.iter_mut() {
                *s = exp2((*s - reference) * self.unit.log2); // A1:19
            }
            let rescale = exp2((m_old - reference) * self.unit.log2);
            self.m[i] = m;
            self.l[i] = rescale * self.l[i] + sum(row); // A1:19
            if rescale != 1.0 {
                o.row_mut(i).mapv_inplace(|o| o * rescale); // A1:21
            }
        }
    }

    /// Divides O by the row sums and gives LSE. A row without keys: O = 0, LSE = -inf.
    fn finish(&self, o: &mut Array2<f32>) -> Array1<f32> {
        let mut lse = Array1::from_elem(self.l.len(), f32::NEG_INFINITY);
        for (i, mut row) in o.rows_mut().into_iter().enumerate() {
            if self.l[i] == 0.0 {
                row.fill(0.0);
                continue;
            }
            row /= self.l[i]; // A1:24
            let m = f64::from(self.m[i]) * f64::from(self.unit.log2) * LN_2;
            lse[i] = (m + f64::from(self.l[i]).ln()) as f32; // A1:24
        }
        lse
    }
}

/// Σ x in 16 partial sums, which the compiler keeps in vector registers.
fn sum(x: &[f32]) -> f32 {
    let (chunks, rest) = x.as_chunks::<16>();
    let mut sums = [0.0f32; 16];
    for chunk in chunks {
        for (sum, x) in sums.iter_mut().zip(chunk) {
            *sum += x;
        }
    }
    sums.iter().chain(rest).sum()
}
