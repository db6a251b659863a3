//! Sums, softmax, transposes and matrix products in f64, each element with the allowed error of a GPU's arithmetic.
//!
//! ```text
//! |given − value| ≤ error, element by element
//! ```

use rayon::prelude::*;

/// The exact value of an element, and the allowed error of a result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Expected {
    /// The exact value.
    pub value: f64,
    /// The largest error.
    pub error: f64,
}

/// An element outside of its allowed error.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("element {index} is {given}, not {} +- {}", expected.value, expected.error)]
pub struct Mismatch {
    /// The index of the element.
    pub index: usize,
    /// The element's value.
    pub given: f64,
    /// The expected value.
    pub expected: Expected,
}

/// The addition of a tensor core: each addend of a sum of `depth` + 1 addends is truncated at `unit` of the largest
/// addend.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TensorCore {
    /// Products that are added at once.
    pub depth: usize,
    /// Largest truncation error of an addend, relative to the largest addend.
    pub unit: f64,
}

impl TensorCore {
    /// Hopper's tensor core for f16 and bf16.
    pub const HALF: TensorCore = TensorCore { depth: 16, unit: 1.0 / (1u64 << 25) as f64 };
    /// Hopper's tensor core for e4m3.
    pub const E4M3: TensorCore = TensorCore { depth: 32, unit: 1.0 / (1u64 << 13) as f64 };
}

impl Expected {
    /// This value without an error.
    pub fn exactly(value: f64) -> Expected {
        Expected { value, error: 0.0 }
    }
}

/// Compares element by element. Returns the largest quotient of an element's error and its allowed error.
///
/// # Errors
/// The first element outside of its allowed error.
///
/// # Panics
/// If the numbers of elements differ.
pub fn check(given: &[f64], expected: &[Expected]) -> Result<f64, Mismatch> {
    assert_eq!(given.len(), expected.len(), "as many elements as are expected");
    let mut ratio: f64 = 0.0;
    for (index, (&given, &expected)) in given.iter().zip(expected).enumerate() {
        let error = (given - expected.value).abs();
        if error.is_nan() || error > expected.error {
            return Err(Mismatch { index, given, expected });
        }
        if error > 0.0 {
            ratio = ratio.max(error / expected.error);
        }
    }
    Ok(ratio)
}

/// x + y, rounded once to binary32.
pub fn sum(x: &[f64], y: &[f64]) -> Vec<Expected> {
    x.iter().zip(y).map(|(x, y)| Expected::exactly((x + y) as f32 as f64)).collect()
}

/// The softmax of rows of `cols` elements in binary32, whose sums 32 lanes share. The exponential and the reciprocal
/// are off by a few units in the last place each, the sum by one unit for each term.
pub fn softmax(x: &[f64], cols: usize) -> Vec<Expected> {
    let row = |row: &[f64]| -> Vec<Expected> {
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let powers: Vec<f64> = row.iter().map(|x| (x - max).exp()).collect();
        let sum: f64 = powers.iter().sum();
        let error = (16 + cols.div_ceil(32)) as f64 * f64::powi(2.0, -23);
        powers.iter().map(|p| Expected { value: p / sum, error: error * p / sum + 1e-30 }).collect()
    };
    x.chunks_exact(cols.max(1)).flat_map(row).collect()
}

/// A matrix of `cols` columns, transposed.
pub fn transposed(x: &[f64], cols: usize) -> Vec<Expected> {
    let rows = x.len() / cols.max(1);
    (0..cols).flat_map(|col| (0..rows).map(move |row| Expected::exactly(x[row * cols + col]))).collect()
}

/// A Bᵀ, where A and B have rows of `k` elements. A result is rounded by up to `rounding` of itself. Each step of
/// `core.depth` products adds a truncation error of `core.unit` times the largest addend, which is at most the sum of
/// all magnitudes.
pub fn product(a: &[f64], b: &[f64], k: usize, core: TensorCore, rounding: f64) -> Vec<Expected> {
    let k = k.max(1);
    // Every addend of a step is truncated, but few are as large as the largest: nine more errors cover these.
    let steps = (k.div_ceil(core.depth) + 9) as f64;
    let element = |x: &[f64], y: &[f64]| {
        let (mut value, mut size) = (0.0, 0.0);
        for (x, y) in x.iter().zip(y) {
            value += x * y;
            size += (x * y).abs();
        }
        Expected { value, error: core.unit * size * steps + rounding * value.abs() + 1e-30 }
    };
    a.par_chunks_exact(k).flat_map_iter(|x| b.chunks_exact(k).map(move |y| element(x, y))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(expected: &[Expected]) -> Vec<f64> {
        expected.iter().map(|expected| expected.value).collect()
    }

    #[test]
    fn small_matrices_by_hand() {
        let (a, b) = ([1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0, -1.0, 0.0]);
        let product = product(&a, &b, 2, TensorCore::HALF, 0.0);
        assert_eq!(values(&product), [17.0, 23.0, -1.0, 39.0, 53.0, -3.0]);
        assert!(product.iter().all(|x| (0.0..1e-4).contains(&x.error)));
        assert_eq!(values(&transposed(&b, 2)), [5.0, 7.0, -1.0, 6.0, 8.0, 0.0]);
        assert_eq!(values(&softmax(&[3.0, 3.0, -7.0, -7.0], 2)), [0.5; 4]);
        assert_eq!(values(&sum(&[1.0], &[1e-9])), [1.0]);
    }

    #[test]
    fn what_is_off_is_found_and_so_is_nan() {
        let expected = [Expected { value: 1.0, error: 0.5 }, Expected::exactly(2.0)];
        assert_eq!(check(&[1.25, 2.0], &expected), Ok(0.5));
        let wrong = |given, index, expected| Err(Mismatch { index, given, expected });
        assert_eq!(check(&[1.25, 2.5], &expected), wrong(2.5, 1, expected[1]));
        assert!(check(&[f64::NAN, 2.0], &expected).is_err());
        assert_eq!(wrong(2.5, 1, expected[1]).unwrap_err().to_string(), "element 1 is 2.5, not 2 +- 0");
    }
}
