//! Distributions of the entries of Q, K and V.

use rand_distr::{Bernoulli, Distribution, Normal};
use rand_xoshiro::Xoshiro256PlusPlus;

/// N(0, 1) + N(0, 100) · Bernoulli(0.001), of the paper's §4.3: an outlier with standard deviation 10 in one entry
/// of a thousand.
pub(super) fn outlier(rng: &mut Xoshiro256PlusPlus) -> f64 {
    let rarely = Bernoulli::new(0.001).expect("0.001 is a probability");
    normal(0.0, 1.0).sample(rng) + if rarely.sample(rng) { normal(0.0, 10.0).sample(rng) } else { 0.0 }
}

pub(super) fn normal(mean: f64, deviation: f64) -> Normal<f64> {
    Normal::new(mean, deviation).expect("the deviation is positive and finite")
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    #[test]
    fn outliers_have_the_papers_moments() {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(1);
        let x: Vec<f64> = (0..1_000_000).map(|_| outlier(&mut rng)).collect();
        let mean = x.iter().sum::<f64>() / x.len() as f64;
        let square = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        assert!(mean.abs() < 5e-3 && (square - 1.1).abs() < 0.02, "{mean} {square}");
        // Numbers beyond 6 are about 55 % of the outliers, which are N(0, 101), and 2e-9 of the other numbers.
        let beyond = x.iter().filter(|x| x.abs() > 6.0).count();
        assert!((450..650).contains(&beyond), "{beyond}");
    }
}
