//! The element types of Q, K, V and O.

use fa3_quant::E4m3;
use fa3_types::Dtype;
use half::{bf16, f16};

/// An element type of Q, K and V. Sealed: the dtypes of [`Dtype`], no others.
pub trait Scalar: Copy + Default + Send + Sync + sealed::Sealed + 'static {
    /// The type's name at run time.
    const DTYPE: Dtype;

    /// The element type of O: the same, but bf16 for e4m3.
    type Output: Scalar;

    /// The value, exactly.
    fn to_f32(self) -> f32;

    /// The nearest value, ties to even.
    fn from_f32(x: f32) -> Self;
}

pub(crate) mod sealed {
    /// A number as the bits that a device's memory holds.
    pub trait Sealed {
        type Bits: fa3_cuda::host::Plain;
        fn to_bits(self) -> Self::Bits;
        fn from_bits(bits: Self::Bits) -> Self;
    }

    macro_rules! sealed {
        ($($number:ty: $bits:ty),+) => {$(
            impl Sealed for $number {
                type Bits = $bits;
                fn to_bits(self) -> $bits {
                    self.to_bits()
                }
                fn from_bits(bits: $bits) -> $number {
                    <$number>::from_bits(bits)
                }
            }
        )+};
    }

    sealed!(f32: u32, half::f16: u16, half::bf16: u16, fa3_quant::E4m3: u8);
}

impl Scalar for f32 {
    const DTYPE: Dtype = Dtype::F32;
    type Output = f32;

    fn to_f32(self) -> f32 {
        self
    }

    fn from_f32(x: f32) -> f32 {
        x
    }
}

impl Scalar for f16 {
    const DTYPE: Dtype = Dtype::F16;
    type Output = f16;

    fn to_f32(self) -> f32 {
        self.to_f32()
    }

    fn from_f32(x: f32) -> f16 {
        f16::from_f32(x)
    }
}

impl Scalar for bf16 {
    const DTYPE: Dtype = Dtype::Bf16;
    type Output = bf16;

    fn to_f32(self) -> f32 {
        self.to_f32()
    }

    fn from_f32(x: f32) -> bf16 {
        bf16::from_f32(x)
    }
}

impl Scalar for E4m3 {
    const DTYPE: Dtype = Dtype::E4m3;
    type Output = bf16;

    fn to_f32(self) -> f32 {
        self.to_f32()
    }

    fn from_f32(x: f32) -> E4m3 {
        E4m3::from_f32(x)
    }
}
