//! Rounding of values to fewer bits.

use fa3_types::Dtype;
use half::{bf16, f16};

/// A floating-point format to which intermediate results are rounded. Arithmetic itself is done in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Precision {
    /// No rounding beyond f32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    Bf16,
}

impl Precision {
    /// The precision of outputs of type `dtype`. E4m3 is never an output: its attention writes bf16.
    pub fn of_output(dtype: Dtype) -> Precision {
        match dtype.default_output() {
            Dtype::F32 => Precision::F32,
            Dtype::F16 => Precision::F16,
            Dtype::Bf16 | Dtype::E4m3 | Dtype::Int8 => Precision::Bf16,
        }
    }

    /// Half the distance of 1 from the next larger number.
    pub(crate) fn unit_roundoff(self) -> f64 {
        f64::powi(2.0, -self.bits())
    }

    /// Bits of the significand, including the leading one.
    fn bits(self) -> i32 {
        match self {
            Precision::F32 => 24,
            Precision::F16 => 11,
            Precision::Bf16 => 8,
        }
    }

    /// The nearest value of this format, ties to even, overflow to infinity.
    pub fn round(self, x: f32) -> f32 {
        match self {
            Precision::F32 => x,
            Precision::F16 => f16::from_f32(x).to_f32(),
            Precision::Bf16 => bf16::from_f32(x).to_f32(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding() {
        assert_eq!(Precision::F32.round(1.0 + f32::EPSILON), 1.0 + f32::EPSILON);
        assert_eq!(Precision::F16.round(1.0 + 2.0f32.powi(-11)), 1.0); // a tie goes to the even neighbour
        assert_eq!(Precision::F16.round(1.0 + 3.0 * 2.0f32.powi(-11)), 1.0 + 2.0f32.powi(-9));
        assert_eq!(Precision::F16.round(70000.0), f32::INFINITY);
        assert_eq!(Precision::Bf16.round(1.0 + 2.0f32.powi(-8)), 1.0);
        assert_eq!(Precision::Bf16.round(70000.0), 70144.0);
    }
}
