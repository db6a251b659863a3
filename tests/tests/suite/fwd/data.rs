//! Scores as trained models have them, and others that references must follow, in the tile table's tiles.

use fa3_sim::{Mode, Policy};
use fa3_tests::fwd::{decode, dense, encode, judged};
use fa3_tests::{Case, Values};
use fa3_types::{Dtype, Mask, Problem};
use ndarray::Axis;
use rayon::prelude::*;

use super::launch;

const ROWS: usize = 130;
const KEYS: usize = 1500;

/// What scores are like, in natural units.
#[derive(Clone, Copy, Debug)]
enum Scores {
    /// N(0, σ²).
    Normal(f32),
    /// N(0, 1), and one key in a hundred has so much more.
    Spikes(f32),
    /// N(0, 1), and keys have more the earlier they are: so much for each hundred.
    Rising(f32),
    /// N(0, 1), and keys have a sum of steps that go up as often as down.
    Walk(f32),
}

const SCORES: [Scores; 9] = [
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

fn problem(dtype: Dtype, head_dim: usize, mask: Mask) -> Problem {
    dense(dtype, 1, (ROWS, KEYS), (1, 1), head_dim).mask(mask).validate().unwrap()
}

impl Scores {
    /// The same V; Q and K have such scores. The last column of Q is 1, so that the last one of K is added to them.
    fn values(self, values: Values, problem: &Problem) -> Values {
        let Values { mut q, mut k, .. } = values.clone();
        let exact = |x: f32| decode(problem.dtype(), encode(problem.dtype(), x));
        let last = q.len_of(Axis(3)) - 1;
        let unit = ((last + 1) as f32).sqrt();
        if let Scores::Normal(sigma) = self {
            q.mapv_inplace(|x| exact(x * sigma));
        } else {
            q.index_axis_mut(Axis(3), last).fill(1.0);
        }
        let (mut walk, mut bits) = (0.0, 1u32);
        for (key, mut row) in k.axis_iter_mut(Axis(1)).enumerate() {
            let more = match self {
                Scores::Normal(_) => continue,
                Scores::Spikes(height) => height * f32::from(u8::from(key % 100 == 50)),
                Scores::Rising(slope) => slope * (KEYS - key) as f32 / 100.0,
                Scores::Walk(step) => {
                    bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    walk += if bits >> 31 == 0 { step } else { -step };
                    walk
                }
            };
            row.index_axis_mut(Axis(2), last).fill(exact(more * unit));
        }
        Values { q, k, ..values }
    }
}

#[test]
fn results_obey_the_law_whatever_scores_are_like() {
    let cases: Vec<_> = SCORES
        .into_iter()
        .flat_map(|scores| [64, 128, 256].map(|head_dim| (scores, head_dim)))
        .flat_map(|case| [Mask::None, Mask::Causal].map(|mask| (case, mask)))
        .flat_map(|case| [Dtype::F16, Dtype::Bf16].map(|dtype| (case, dtype)))
        .collect();
    cases.into_par_iter().for_each(|(((scores, head_dim), mask), dtype)| {
        let case = Case::normal("data", problem(dtype, head_dim, mask), 5);
        let values = scores.values(case.values(), &case.problem);
        let launch = launch(&case.problem, &Default::default()).unwrap();
        let answer = launch.simulate(&values, Policy::Eager, Mode::Exact).unwrap();
        let verdict = judged(&case, &values, &answer);
        assert!(verdict.is_ok(), "{scores:?}: {verdict:?}\n{}", launch.plan);
    });
}
