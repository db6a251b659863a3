//! Q, K and V on which attention is measured, from N(0, 1) to what is hard for it.
//!
//! How fast the forward pass is depends on its data in two ways. Its lazy softmax does more work where scores grow
//! along a row, and boards throttle by the power that the bits of a product take.

use std::fmt;

use clap::ValueEnum;
use fa3_types::Problem;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Bernoulli, Distribution, Normal, StandardNormal};
use rayon::prelude::*;
use serde::Serialize;

/// Elements that are drawn one after the other, about.
const CHUNK: usize = 1 << 16;

/// Standard deviation of scores.
const HOT_DEVIATION: f32 = 3.0;
/// How far scores fall from one block of keys to the next.
const SHRINK_STEP: f64 = 4.0;
const SHRINK_KEYS: f64 = 64.0;
/// How far a key stands out, and one key in how many.
const SPIKE_HEIGHT: f64 = 12.0;
const SPIKE_KEYS: f64 = 500.0;
/// Standard deviations of what queries and keys of a head share, and of what tells them apart.
const RECENCY_SHARED: f32 = 1.5;
const RECENCY_OWN: f32 = 0.6;
/// Base of the rotary embedding's frequencies.
const RECENCY_BASE: f64 = 1e4;

/// A distribution of Q, K and V. Scores are q · k / sqrt(head_dim), in natural units.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Data {
    /// N(0, 1), as in the paper's benchmark: scores are N(0, 1)
    Normal,
    /// N(0, 1), but Q is N(0, 9): scores have a standard deviation of 3, so that few keys count
    Hot,
    /// N(0, 1), and scores fall by 4 from each 64 keys to the next: the first keys have all the weight
    Shrink,
    /// N(0, 1), and one key in 500 has a score that is 12 higher: row maxima jump in the middle of a row
    Spike,
    /// Scores fall with the distance of query and key, as with rotary embedding
    Recency,
    /// N(0, 1) + N(0, 100) · Bernoulli(0.001), of the paper's Table 3
    Outlier,
}

/// Which tensor a number is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tensor {
    Q,
    K,
    V,
}

/// A row of a tensor, before its numbers are drawn.
struct Row<'a> {
    tensor: Tensor,
    /// Which key it is, or for a query, beside which key it stands: masks align at the bottom right.
    position: f64,
    /// What queries and keys of its head share.
    shared: &'a [f32],
    numbers: &'a mut [f32],
}

impl Data {
    /// Q, K and V of a problem with contiguous tensors, drawn in f32 and then rounded. The same seed gives the same
    /// numbers everywhere.
    pub(crate) fn draw<T: Copy + Default + Send>(
        self,
        problem: &Problem,
        seed: u64,
        round: impl Fn(f32) -> T + Sync,
    ) -> [Vec<T>; 3] {
        let shared = shared(problem, seed);
        [Tensor::Q, Tensor::K, Tensor::V].map(|tensor| self.tensor(problem, tensor, seed, &shared, &round))
    }

    fn tensor<T: Copy + Default + Send>(
        self,
        problem: &Problem,
        tensor: Tensor,
        seed: u64,
        shared: &[Vec<f32>],
        round: &(impl Fn(f32) -> T + Sync),
    ) -> Vec<T> {
        let (x, part) = match tensor {
            Tensor::Q => (problem.q(), 1),
            Tensor::K => (problem.k(), 2),
            Tensor::V => (problem.v(), 3),
        };
        let (shape, keys) = (x.shape, problem.k().shape);
        let first = match tensor {
            Tensor::Q => keys.seqlen as f64 - shape.seqlen as f64,
            Tensor::K | Tensor::V => 0.0,
        };
        let group = shape.heads / keys.heads;
        let rows_a_chunk = (CHUNK / shape.head_dim).max(1);
        let mut elements = vec![T::default(); shape.dims().iter().product()];
        elements.par_chunks_mut(rows_a_chunk * shape.head_dim).enumerate().for_each(|(chunk, elements)| {
            let mut rng = ChaCha8Rng::seed_from_u64(4 * seed + part);
            rng.set_stream(chunk as u64);
            let mut numbers = vec![0.0; shape.head_dim];
            for (row, elements) in elements.chunks_exact_mut(shape.head_dim).enumerate() {
                let index = chunk * rows_a_chunk + row;
                let position = first + (index / shape.heads % shape.seqlen) as f64;
                let shared = &shared[index % shape.heads / group];
                self.row(Row { tensor, position, shared, numbers: &mut numbers }, &mut rng);
                elements.iter_mut().zip(&numbers).for_each(|(element, &x)| *element = round(x));
            }
        });
        elements
    }

    fn row(self, mut row: Row<'_>, rng: &mut ChaCha8Rng) {
        match self {
            Data::Outlier => row.numbers.fill_with(|| outlier(rng) as f32),
            Data::Normal | Data::Hot | Data::Shrink | Data::Spike | Data::Recency => {
                row.numbers.fill_with(|| StandardNormal.sample(rng));
            }
        }
        match self {
            Data::Normal | Data::Outlier => {}
            Data::Hot => row.heat(),
            Data::Shrink => row.bias(-SHRINK_STEP * (row.position / SHRINK_KEYS).floor()),
            Data::Spike => {
                let stands_out = row.position % SPIKE_KEYS == SPIKE_KEYS / 2.0;
                row.bias(if stands_out { SPIKE_HEIGHT } else { 0.0 });
            }
            Data::Recency => row.rotate(),
        }
    }

    /// What tells settings of other data than N(0, 1) apart, in a text that goes on with it.
    pub(crate) fn suffix(self) -> String {
        if self == Data::Normal { String::new() } else { format!(", data {self}") }
    }
}

impl Row<'_> {
    /// Scores get as wide as Q.
    fn heat(&mut self) {
        if self.tensor == Tensor::Q {
            self.numbers.iter_mut().for_each(|x| *x *= HOT_DEVIATION);
        }
    }

    /// Adds `bias` to all scores of a key, by the last column of Q and K, which it takes.
    fn bias(&mut self, bias: f64) {
        let scale = (self.numbers.len() as f64).sqrt();
        let Some(last) = self.numbers.last_mut() else { return };
        match self.tensor {
            Tensor::Q => *last = 1.0,
            Tensor::K => *last = (bias * scale) as f32,
            Tensor::V => {}
        }
    }

    /// Makes it what all rows of the head share, and a little of its own, and rotates that by its position. At
    /// distance 0 the mean score is 2.25 · sqrt(head_dim).
    fn rotate(&mut self) {
        if self.tensor == Tensor::V {
            return;
        }
        for (x, shared) in self.numbers.iter_mut().zip(self.shared) {
            *x = RECENCY_OWN * *x + RECENCY_SHARED * shared;
        }
        let pairs = self.numbers.len() / 2;
        let (first, second) = self.numbers.split_at_mut(pairs);
        for (pair, (x, y)) in first.iter_mut().zip(second).enumerate() {
            let angle = self.position * RECENCY_BASE.powf(-(pair as f64) / pairs as f64);
            let (sin, cos) = angle.sin_cos();
            let (sin, cos) = (sin as f32, cos as f32);
            (*x, *y) = (*x * cos - *y * sin, *x * sin + *y * cos);
        }
    }
}

/// Of each key/value head, N(0, 1).
fn shared(problem: &Problem, seed: u64) -> Vec<Vec<f32>> {
    let shape = problem.k().shape;
    let of_head = |head| {
        let mut rng = ChaCha8Rng::seed_from_u64(4 * seed);
        rng.set_stream(head);
        StandardNormal.sample_iter(&mut rng).take(shape.head_dim).collect()
    };
    (0..shape.heads as u64).map(of_head).collect()
}

/// N(0, 1) + N(0, 100) · Bernoulli(0.001), of the paper's §4.3: an outlier with standard deviation 10 in one entry
/// of a thousand.
pub(crate) fn outlier(rng: &mut ChaCha8Rng) -> f64 {
    let rarely = Bernoulli::new(0.001).expect("0.001 is a probability");
    normal(0.0, 1.0).sample(rng) + if rarely.sample(rng) { normal(0.0, 10.0).sample(rng) } else { 0.0 }
}

/// A normal distribution.
pub(crate) fn normal(mean: f64, deviation: f64) -> Normal<f64> {
    Normal::new(mean, deviation).expect("the deviation is positive and finite")
}

impl fmt::Display for Data {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.to_possible_value().expect("none is skipped").get_name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fa3_types::{Dtype, ProblemSpec, Shape};
    use ndarray::{Array2, ArrayView4, Axis};

    const SHAPE: Shape = Shape { batch: 1, seqlen: 1100, heads: 2, head_dim: 64 };

    fn problem(q: Shape, kv: Shape) -> Problem {
        ProblemSpec::dense(Dtype::Bf16, q, kv).validate().unwrap()
    }

    /// Scores of each query head, a row for each query.
    fn scores(data: Data, q_shape: Shape, kv_shape: Shape) -> Vec<Array2<f64>> {
        let [q, k, _] = data.draw(&problem(q_shape, kv_shape), 1, f64::from);
        let q = ArrayView4::from_shape(q_shape.dims(), &q).unwrap();
        let k = ArrayView4::from_shape(kv_shape.dims(), &k).unwrap();
        let group = q_shape.heads / kv_shape.heads;
        let of_head = |head| {
            let q = q.index_axis_move(Axis(0), 0).index_axis_move(Axis(1), head);
            let k = k.index_axis_move(Axis(0), 0).index_axis_move(Axis(1), head / group);
            q.dot(&k.t()) / (q_shape.head_dim as f64).sqrt()
        };
        (0..q_shape.heads).map(of_head).collect()
    }

    /// Mean and standard deviation.
    fn moments(numbers: impl Iterator<Item = f64> + Clone) -> (f64, f64) {
        let count = numbers.clone().count() as f64;
        let mean = numbers.clone().sum::<f64>() / count;
        (mean, (numbers.map(|x| (x - mean).powi(2)).sum::<f64>() / count).sqrt())
    }

    /// The mean score of each key.
    fn of_keys(data: Data) -> Vec<f64> {
        let scores = scores(data, SHAPE, SHAPE);
        let sum = |key| scores.iter().map(|head| head.column(key).sum()).sum::<f64>();
        (0..SHAPE.seqlen).map(|key| sum(key) / (SHAPE.heads * SHAPE.seqlen) as f64).collect()
    }

    #[test]
    fn scores_are_as_wide_as_they_say() {
        for (data, deviation) in [(Data::Normal, 1.0), (Data::Hot, 3.0), (Data::Outlier, 1.1)] {
            let scores = scores(data, SHAPE, SHAPE);
            let (mean, found) = moments(scores.iter().flatten().copied());
            assert!(mean.abs() < 0.02 && (found / deviation - 1.0).abs() < 0.02, "{data}: {mean} {found}");
        }
    }

    #[test]
    fn shrinking_scores_fall_by_4_every_64_keys() {
        let keys = of_keys(Data::Shrink);
        let blocks: Vec<f64> = keys.chunks_exact(64).map(|keys| keys.iter().sum::<f64>() / 64.0).collect();
        assert!(blocks.windows(2).all(|pair| (pair[0] - pair[1] - 4.0).abs() < 0.1), "{blocks:?}");
    }

    #[test]
    fn one_key_in_500_is_a_spike_of_12() {
        let keys = of_keys(Data::Spike);
        let (spikes, others): (Vec<_>, Vec<_>) =
            keys.iter().enumerate().partition(|(key, _)| [250, 750].contains(key));
        assert_eq!(spikes.len(), 2);
        assert!(spikes.iter().all(|(_, score)| (*score - 12.0).abs() < 0.1), "{spikes:?}");
        assert!(others.iter().all(|(_, score)| score.abs() < 0.2));
    }

    /// Also where there are more keys than queries, and where query heads share a key/value head.
    #[test]
    fn recent_keys_have_higher_scores() {
        let scores = scores(Data::Recency, Shape { seqlen: 1000, heads: 4, ..SHAPE }, SHAPE);
        for (head, scores) in scores.iter().enumerate() {
            let at =
                |distance: usize| moments((0..100).map(|row| scores[[900 + row, 1000 + row - distance]])).0;
            let means = [0, 16, 128].map(at);
            assert!(means.is_sorted_by(|near, far| near > far), "head {head}: {means:?}");
            assert!((10.0..30.0).contains(&means[0]), "2.25 * sqrt(64) is 18: {means:?}");
        }
    }

    #[test]
    fn outliers_have_the_papers_moments() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let x: Vec<f64> = (0..1_000_000).map(|_| outlier(&mut rng)).collect();
        let (mean, deviation) = moments(x.iter().copied());
        assert!(mean.abs() < 5e-3 && (deviation.powi(2) - 1.1).abs() < 0.02, "{mean} {deviation}");
        // Beyond 6 lie the outliers with |N(0, 101)| > 6, about 55 % of them, and of the others 2e-9.
        let beyond = x.iter().filter(|x| x.abs() > 6.0).count();
        assert!((450..650).contains(&beyond), "{beyond}");
    }

    #[test]
    fn numbers_are_of_their_seed_and_tensors_are_not_alike() {
        for &data in Data::value_variants() {
            let shape = Shape { seqlen: 200, ..SHAPE };
            let draw = |seed| data.draw(&problem(shape, shape), seed, |x| x);
            let [q, k, v] = draw(1);
            assert_eq!(draw(1), [q.clone(), k.clone(), v.clone()]);
            assert!(draw(2)[0] != q && draw(2)[1] != k && draw(2)[2] != v, "{data}");
            assert!(q != k && k != v, "{data}");
            let (mean, deviation) = moments(v.iter().map(|&x| f64::from(x)));
            assert!(mean.abs() < 0.02 && (0.97..1.1).contains(&deviation), "{data}: {mean} {deviation}");
        }
    }
}
