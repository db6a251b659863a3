//! Inputs and references of this crate's tests.

use fa3_types::{KnownProblem, SequenceRows, Shape};
use ndarray::{Array3, Array4, Axis};

/// Normal deviates, determined by the seed.
pub(crate) fn normal(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x2545_F491_4F6C_DD1D) | 1;
    let mut uniform = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    };
    // The first numbers still correlate with the seed.
    for _ in 0..8 {
        uniform();
    }
    let mut deviate = || (-2.0 * uniform().ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos();
    (0..count).map(|_| deviate() as f32).collect()
}

/// A tensor of normal deviates.
pub(crate) fn tensor(shape: Shape, seed: u64) -> Array4<f32> {
    let [b, s, h, d] = shape.dims();
    Array4::from_shape_vec([b, s, h, d], normal(b * s * h * d, seed)).unwrap()
}

/// Attention by its definition, in f64.
pub(crate) struct Reference {
    pub(crate) o: Array4<f64>,
    pub(crate) lse: Array3<f64>,
    /// Σ_k P_k |V_k|, the scale of rounding errors in O.
    pub(crate) size: Array4<f64>,
}

pub(crate) fn reference(
    problem: &KnownProblem,
    q: &Array4<f32>,
    k: &Array4<f32>,
    v: &Array4<f32>,
) -> Reference {
    let mut o = Array4::zeros(problem.o().shape.dims());
    let mut size = o.clone();
    let mut lse = Array3::from_elem(problem.lse_shape(), f64::NEG_INFINITY);
    for (sequence, head) in (0..problem.batch()).flat_map(|i| (0..problem.heads().q()).map(move |h| (i, h))) {
        let (len, head_kv) = (problem.lengths(sequence), problem.heads().kv_head(head));
        let q_rows = rows(q, problem.rows_q(), sequence, head);
        let k_rows = rows(k, problem.rows_k(), sequence, head_kv);
        let v_rows = rows(v, problem.rows_k(), sequence, head_kv);
        let (batch, first) = problem.rows_q().start(sequence);
        for (row, q) in q_rows.iter().enumerate() {
            let score = |key: usize| {
                let product: f64 = q.iter().zip(&k_rows[key]).map(|(q, k)| q * k).sum();
                let scaled = product * problem.softmax_scale().natural();
                problem.softcap().map_or(scaled, |cap| cap.apply(scaled))
            };
            let visible = (0..len.k).filter(|&key| problem.mask().allows(row, key, len));
            let scores: Vec<(usize, f64)> = visible.map(|key| (key, score(key))).collect();
            if scores.is_empty() {
                continue;
            }
            let max = scores.iter().map(|score| score.1).fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().map(|score| (score.1 - max).exp()).sum();
            lse[[batch, head, first + row]] = max + sum.ln();
            let (mut o_row, mut size_row) =
                (vec![0.0; problem.head_dim_v()], vec![0.0; problem.head_dim_v()]);
            for (key, score) in scores {
                let p = (score - max).exp() / sum;
                for ((o, size), v) in o_row.iter_mut().zip(&mut size_row).zip(&v_rows[key]) {
                    *o += p * v;
                    *size += p * v.abs();
                }
            }
            for (d, (o_entry, size_entry)) in o_row.into_iter().zip(size_row).enumerate() {
                let at = [batch, first + row, head, d];
                (o[at], size[at]) = (o_entry, size_entry);
            }
        }
    }
    Reference { o, lse, size }
}

/// The rows in use of one head of a sequence.
fn rows(x: &Array4<f32>, sequences: &SequenceRows, sequence: usize, head_index: usize) -> Vec<Vec<f64>> {
    let (batch, first) = sequences.start(sequence);
    let head = x.index_axis(Axis(0), batch);
    let head = head.index_axis(Axis(1), head_index);
    (0..sequences.len(sequence))
        .map(|row| head.row(first + row).iter().map(|&x| x.into()).collect())
        .collect()
}
