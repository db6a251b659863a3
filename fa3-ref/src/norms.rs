//! Distances between arrays.

use std::fmt;

use ndarray::{ArrayBase, Data, Dimension, IntoDimension};

/// Norms of the error x − expected over all elements.
///
/// Equal infinities, and NaN against NaN, count as no error; NaN or an infinity against anything else counts as an
/// infinite error.
#[derive(Clone, Debug, PartialEq)]
pub struct ErrorNorms {
    /// Number of elements.
    pub count: usize,
    /// max |x − expected|.
    pub max: f64,
    /// √(mean (x − expected)²).
    pub rmse: f64,
    /// Signed mean of x − expected, the bias: rounding to nearest has almost no bias.
    pub mean: f64,
    /// max |expected|, for scale.
    pub max_expected: f64,
    /// Index of the largest error; `None` without elements.
    pub worst: Option<Worst>,
}

/// One element of a comparison.
#[derive(Clone, Debug, PartialEq)]
pub struct Worst {
    /// Index of the element, one entry for each dimension.
    pub index: Vec<usize>,
    /// The value judged.
    pub given: f64,
    /// The value expected.
    pub expected: f64,
}

impl fmt::Display for Worst {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {:e}, expected {:e}", self.index, self.given, self.expected)
    }
}

/// x − expected with the conventions of [`ErrorNorms`].
pub(crate) fn error(x: f64, expected: f64) -> f64 {
    let both_nan = x.is_nan() && expected.is_nan();
    if both_nan || x == expected {
        return 0.0;
    }
    let error = x - expected;
    if error.is_nan() { f64::INFINITY } else { error }
}

impl ErrorNorms {
    /// Compares `x` with `expected`, element by element.
    ///
    /// # Panics
    /// If the shapes differ: the arrays come from the same problem.
    pub fn of<A, B, S, R, D>(x: &ArrayBase<S, D>, expected: &ArrayBase<R, D>) -> ErrorNorms
    where
        A: Copy + Into<f64>,
        B: Copy + Into<f64>,
        S: Data<Elem = A>,
        R: Data<Elem = B>,
        D: Dimension,
    {
        assert_eq!(x.shape(), expected.shape(), "two results of one problem have one shape");
        let mut norms =
            ErrorNorms { count: x.len(), max: 0.0, rmse: 0.0, mean: 0.0, max_expected: 0.0, worst: None };
        let (mut sum, mut squares) = (0.0, 0.0);
        for ((index, &x), &expected) in x.indexed_iter().zip(expected) {
            let (x, expected) = (x.into(), expected.into());
            let error = error(x, expected);
            sum += error;
            squares += error * error;
            norms.max_expected = norms.max_expected.max(expected.abs());
            if error.abs() > norms.max || norms.worst.is_none() {
                norms.max = error.abs();
                let index = index.into_dimension().slice().to_vec();
                norms.worst = Some(Worst { index, given: x, expected });
            }
        }
        let count = x.len().max(1) as f64;
        norms.mean = sum / count;
        norms.rmse = (squares / count).sqrt();
        norms
    }
}

impl fmt::Display for ErrorNorms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "max {:.2e} rmse {:.2e} mean {:+.1e}", self.max, self.rmse, self.mean)?;
        match &self.worst {
            Some(worst) if self.max > 0.0 => write!(f, " (worst at {:?})", worst.index),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::array;

    #[test]
    fn norms_by_hand() {
        let norms = ErrorNorms::of(&array![[1.0f32, 2.0], [3.0, 0.0]], &array![[1.0f64, 5.0], [2.0, 0.0]]);
        assert_eq!((norms.count, norms.max, norms.mean, norms.max_expected), (4, 3.0, -0.5, 5.0));
        assert_eq!(norms.rmse, (10.0f64 / 4.0).sqrt());
        assert_eq!(norms.worst, Some(Worst { index: vec![0, 1], given: 2.0, expected: 5.0 }));
    }

    #[test]
    fn special_values() {
        let (nan, inf) = (f64::NAN, f64::INFINITY);
        assert_eq!(ErrorNorms::of(&array![nan, inf, -inf], &array![nan, inf, -inf]).max, 0.0);
        for (x, expected) in [(nan, 1.0), (1.0, nan), (inf, -inf), (0.0, -inf), (nan, inf)] {
            assert_eq!(ErrorNorms::of(&array![x], &array![expected]).max, inf, "{x} against {expected}");
        }
    }

    #[test]
    fn nothing_has_no_error() {
        let none = ndarray::Array2::<f64>::zeros((1, 0));
        let norms = ErrorNorms::of(&none, &none);
        assert_eq!((norms.count, norms.max, norms.rmse, norms.worst), (0, 0.0, 0.0, None));
    }
}
