//! Distributions of scores: like a trained model's, and others that make the running row maximum change.

use fa3_types::Problem;
use ndarray::Axis;

use super::rounded;
use crate::Values;

/// Distribution of the scores, in natural units.
#[derive(Clone, Copy, Debug)]
pub(super) enum Scores {
    /// N(0, σ²).
    Normal(f32),
    /// N(0, 1), with this amount added to one key in a hundred.
    Spikes(f32),
    /// N(0, 1) plus an offset that grows towards the first key, by this amount per hundred keys.
    Rising(f32),
    /// N(0, 1) plus a random walk along the keys.
    Walk(f32),
}

impl Scores {
    pub(super) const ALL: [Scores; 9] = [
        Scores::Normal(3.0),
        Scores::Normal(8.0),
        Scores::Spikes(6.0),
        Scores::Spikes(12.0),
        Scores::Spikes(30.0),
        Scores::Rising(0.5),
        Scores::Rising(1.5),
        Scores::Rising(6.0),
        Scores::Walk(0.5),
    ];

    /// Q and K with scores of this distribution, and V unchanged. The last column of Q is 1, so that the last column of
    /// K is added to the scores.
    pub(super) fn values(self, values: Values, problem: &Problem) -> Values {
        let Values { mut q, mut k, .. } = values.clone();
        let exact = |x: f32| rounded(problem.dtype(), x);
        let (head_dim, keys) = (q.len_of(Axis(3)), k.len_of(Axis(1)));
        if let Scores::Normal(sigma) = self {
            q.mapv_inplace(|x| exact(x * sigma));
            return Values { q, ..values };
        }
        q.index_axis_mut(Axis(3), head_dim - 1).fill(1.0);
        let (mut walk, mut bits) = (0.0, 1u32);
        for (key, mut row) in k.axis_iter_mut(Axis(1)).enumerate() {
            let more = match self {
                Scores::Normal(_) => 0.0,
                Scores::Spikes(height) if key % 100 == 50 => height,
                Scores::Spikes(_) => 0.0,
                Scores::Rising(slope) => slope * (keys - key) as f32 / 100.0,
                Scores::Walk(step) => {
                    bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    walk += if bits >> 31 == 0 { step } else { -step };
                    walk
                }
            };
            row.index_axis_mut(Axis(2), head_dim - 1).fill(exact(more * (head_dim as f32).sqrt()));
        }
        Values { q, k, ..values }
    }
}
