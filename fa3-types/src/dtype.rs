//! Element types.

use std::fmt;
use std::str::FromStr;

/// The element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// IEEE binary32. On the CPU only: Hopper's kernels take 16-bit and 8-bit inputs.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16: the upper half of a binary32.
    Bf16,
    /// OCP FP8 E4M3: 4 exponent bits, 3 mantissa bits, largest finite value 448, NaN but no infinity.
    E4m3,
    /// Integers from -128 to 127. Only K and V have this type, with [`TokenScales`](crate::TokenScales).
    Int8,
}

impl Dtype {
    /// Every dtype, widest first.
    pub const ALL: [Dtype; 5] = [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::E4m3, Dtype::Int8];

    /// The types that Q may have.
    pub const OF_Q: [Dtype; 4] = [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::E4m3];

    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::Bf16 => 2,
            Dtype::E4m3 | Dtype::Int8 => 1,
        }
    }

    /// Elements in 16 bytes, the unit in which TMA addresses rows. Kernels take head dimensions and strides that are
    /// multiples of this number.
    pub const fn row_multiple(self) -> usize {
        16 / self.bytes()
    }

    /// The output type of attention on inputs of this type: the input type, but bf16 for 8 bits.
    pub const fn default_output(self) -> Dtype {
        match self {
            Dtype::F32 => Dtype::F32,
            Dtype::F16 => Dtype::F16,
            Dtype::Bf16 | Dtype::E4m3 | Dtype::Int8 => Dtype::Bf16,
        }
    }

    /// Whether attention on inputs of this type may write `output`. Only 8 bits have a choice (bf16 or f16).
    pub const fn may_output(self, output: Dtype) -> bool {
        match self {
            Dtype::F32 => matches!(output, Dtype::F32),
            Dtype::F16 => matches!(output, Dtype::F16),
            Dtype::Bf16 => matches!(output, Dtype::Bf16),
            Dtype::E4m3 | Dtype::Int8 => matches!(output, Dtype::Bf16 | Dtype::F16),
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Dtype::F32 => "f32",
            Dtype::F16 => "f16",
            Dtype::Bf16 => "bf16",
            Dtype::E4m3 => "e4m3",
            Dtype::Int8 => "int8",
        })
    }
}

/// The error for a name that is no dtype.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected f32, f16, bf16, e4m3 or int8")]
pub struct UnknownDtype;

impl FromStr for Dtype {
    type Err = UnknownDtype;

    /// The dtype that [`Dtype`] displays as `name`.
    fn from_str(name: &str) -> Result<Dtype, UnknownDtype> {
        Dtype::ALL.into_iter().find(|dtype| dtype.to_string() == name).ok_or(UnknownDtype)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixteen_bytes_make_a_row_unit() {
        for dtype in Dtype::ALL {
            assert_eq!(dtype.row_multiple() * dtype.bytes(), 16, "{dtype}");
        }
    }

    #[test]
    fn names_are_read_as_they_are_printed() {
        for dtype in Dtype::ALL {
            assert_eq!(dtype.to_string().parse(), Ok(dtype));
        }
        assert_eq!("fp16".parse::<Dtype>(), Err(UnknownDtype));
    }

    #[test]
    fn the_default_output_is_allowed() {
        for dtype in Dtype::ALL {
            assert!(dtype.may_output(dtype.default_output()), "{dtype}");
        }
        assert!(!Dtype::E4m3.may_output(Dtype::E4m3));
    }
}
