//! The size of a result, and its numbers that are not finite.

use std::fmt;

use fa3::Scalar;
use ndarray::{Array, Dimension};
use serde_json::{Value, json};

use super::compare::Number;

/// The root mean square of a tensor, and its counts of NaN and infinities.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Summary {
    what: &'static str,
    /// The root mean square of the finite numbers. It is also present if the tensor is empty.
    rms: Option<f64>,
    nan: usize,
    infinite: usize,
}

impl Summary {
    pub(super) fn new<T: Scalar, D: Dimension>(what: &'static str, x: &Array<T, D>) -> Summary {
        let mut summary = Summary { what, rms: None, nan: 0, infinite: 0 };
        let (mut squares, mut finite) = (0.0, 0usize);
        for x in x {
            match f64::from(x.to_f32()) {
                x if x.is_nan() => summary.nan += 1,
                x if x.is_infinite() => summary.infinite += 1,
                x => (squares, finite) = (squares + x * x, finite + 1),
            }
        }
        summary.rms = (finite > 0 || x.is_empty()).then(|| (squares / finite.max(1) as f64).sqrt());
        summary
    }

    pub(super) fn json(&self) -> Value {
        let Summary { what, rms, nan, infinite } = self;
        json!({ "what": what, "rms": rms, "nan": nan, "inf": infinite })
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let &Summary { what, rms, nan, infinite } = self;
        let rms = rms.map_or_else(|| "of nothing finite".to_owned(), |rms| Number(rms).to_string());
        write!(f, "{what:<8}rms {rms}, {nan} NaN, {infinite} inf")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_are_none_are_counted_and_left_out() {
        let x = [3.0, f32::NAN, -4.0, f32::INFINITY, f32::NEG_INFINITY, 0.0].to_vec();
        let x = Array::from_shape_vec((1, 1, 1, 6), x).unwrap();
        assert_eq!(Summary::new("o", &x).to_string(), "o       rms 2.89, 1 NaN, 2 inf");
        let nan = Array::from_elem([2], f32::NAN);
        assert_eq!(Summary::new("o", &nan).to_string(), "o       rms of nothing finite, 2 NaN, 0 inf");
        assert_eq!(
            Summary::new("o", &Array::<f32, _>::zeros([0; 4])).to_string(),
            "o       rms 0, 0 NaN, 0 inf"
        );
    }
}
