//! Random Q, K and V of one head.

use fa3_quant::{Preparation, QuantError, Quantized};
use fa3_ref::{Forward, Inputs, oracle};
use fa3_types::{Dtype, Problem, ProblemError, ProblemSpec, Shape};
use ndarray::Array4;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Bernoulli, Distribution, Normal};

/// Q, K and V in f64, and attention of just these numbers in f64.
pub(super) struct Sample {
    pub(super) problem: Problem,
    pub(super) q: Array4<f64>,
    pub(super) k: Array4<f64>,
    pub(super) v: Array4<f64>,
    pub(super) exact: Forward<f64>,
}

impl Sample {
    /// One head of `queries` by `keys`, its tensors drawn from three distributions.
    pub(super) fn draw(
        seed: u64,
        (queries, keys, head_dim): (usize, usize, usize),
        mut distribution: impl FnMut(&mut ChaCha8Rng, Tensor) -> f64,
    ) -> Result<Sample, ProblemError> {
        let q_shape = Shape { batch: 1, seqlen: queries, heads: 1, head_dim };
        let kv_shape = Shape { seqlen: keys, ..q_shape };
        let problem = ProblemSpec::dense(Dtype::F16, q_shape, kv_shape).validate()?;
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut tensor = |shape: Shape, which| {
            Array4::from_shape_simple_fn(shape.dims(), || distribution(&mut rng, which))
        };
        let (q, k, v) =
            (tensor(q_shape, Tensor::Q), tensor(kv_shape, Tensor::K), tensor(kv_shape, Tensor::V));
        let inputs =
            Inputs::new(&problem, q.view(), k.view(), v.view()).expect("the arrays have these shapes");
        let exact = oracle::forward(&inputs);
        Ok(Sample { problem, q, k, v, exact })
    }

    /// Q, K and V in FP8, Q and K prepared alike.
    pub(super) fn quantize(
        &self,
        qk: &Preparation<'_>,
        v: &Preparation<'_>,
    ) -> Result<[Quantized; 3], QuantError> {
        let [seqs_q, seqs_k] = [self.problem.seqs_q(), self.problem.seqs_k()];
        let quantize = |by: &Preparation<'_>, x: &Array4<f64>, sequences| {
            by.quantize(x.mapv(|x| x as f32).view(), sequences)
        };
        Ok([quantize(qk, &self.q, seqs_q)?, quantize(qk, &self.k, seqs_k)?, quantize(v, &self.v, seqs_k)?])
    }
}

/// Which tensor a number is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Tensor {
    Q,
    K,
    V,
}

/// N(0, 1) + N(0, 100) · Bernoulli(0.001), of the paper's §4.3: an outlier with standard deviation 10 in one entry
/// of a thousand.
pub(super) fn with_outliers() -> impl FnMut(&mut ChaCha8Rng, Tensor) -> f64 {
    let normal = normal(0.0, 1.0);
    let outlier = self::normal(0.0, 10.0);
    let rarely = Bernoulli::new(0.001).expect("0.001 is a probability");
    move |rng, _| normal.sample(rng) + if rarely.sample(rng) { outlier.sample(rng) } else { 0.0 }
}

pub(super) fn normal(mean: f64, deviation: f64) -> Normal<f64> {
    Normal::new(mean, deviation).expect("the deviation is positive and finite")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outliers_have_the_papers_moments() {
        let mut draw = with_outliers();
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let x: Vec<f64> = (0..1_000_000).map(|_| draw(&mut rng, Tensor::Q)).collect();
        let mean = x.iter().sum::<f64>() / x.len() as f64;
        let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / x.len() as f64;
        assert!(mean.abs() < 5e-3 && (variance - 1.1).abs() < 0.02, "{mean} {variance}");
        // Beyond 6 lie the outliers with |N(0, 101)| > 6, about 55 % of them, and of the others 2e-9.
        let beyond = x.iter().filter(|x| x.abs() > 6.0).count();
        assert!((450..650).contains(&beyond), "{beyond}");
    }
}
