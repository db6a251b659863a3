//! The element types of Q, K, V and O.

use fa3_quant::E4m3;
use fa3_types::Dtype;
use half::{bf16, f16};

/// An element type of Q, K and V. Sealed: the dtypes of [`Dtype`], no others.
pub trait Scalar: Default + Send + Sync + sealed::Sealed {
    /// The type's name at run time.
    const DTYPE: Dtype;

    /// The element type of O: the same, but bf16 for e4m3.
    type Output: Scalar;

    /// The value, exactly.
    fn to_f32(self) -> f32;

    /// The nearest value, ties to even.
    fn from_f32(x: f32) -> Self;
}

mod sealed {
    /// Numbers that are the bits in a device's memory.
    pub trait Sealed: bytemuck::Pod {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
    impl Sealed for fa3_quant::E4m3 {}
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
