//! The element types of Q, K, V and O.

use fa3_quant::E4m3;
use fa3_types::{Dtype, KnownProblem, UnknownFeature};
use half::{bf16, f16};
use ndarray::{ArrayView1, ArrayView4, ArrayViewMut4};

use crate::cpu::keys::Keys;
use crate::cpu::queries::Queries;
use crate::{Gradients, Output, OutputGradients, cpu};

/// An element type of Q, K and V. The trait is sealed: its types are the dtypes of [`Dtype`].
pub trait Scalar: Default + Send + Sync + sealed::Sealed {
    /// The type's name at run time.
    const DTYPE: Dtype;

    /// The element type of O: the input type, but bf16 for 8 bits.
    type Output: Scalar;

    /// The value, exactly.
    fn to_f32(self) -> f32;

    /// The nearest value, ties to even.
    fn from_f32(x: f32) -> Self;

    /// The CPU engine's forward pass. It is not generic, so that it is compiled with this crate, which is optimised,
    /// and not with the calling crate.
    #[doc(hidden)]
    fn forward_on_cpu(
        problem: &KnownProblem,
        queries: Queries<'_, Self>,
        keys: Keys<'_>,
        o: ArrayViewMut4<'_, Self::Output>,
        of_rows: ArrayViewMut4<'_, f32>,
    ) -> Result<(), UnknownFeature>;

    /// The CPU engine's backward pass. It is not generic, for the same reason.
    #[doc(hidden)]
    fn backward_on_cpu(
        problem: &KnownProblem,
        qkv: [ArrayView4<'_, Self>; 3],
        sink: Option<ArrayView1<'_, f32>>,
        output: &Output<Self>,
        of: OutputGradients<'_, Self>,
    ) -> Result<Gradients<Self>, UnknownFeature>;
}

/// Implements [`Scalar`] for one type.
macro_rules! scalar {
    ($type:ty, $dtype:ident, $output:ty, $to_f32:expr, $from_f32:expr) => {
        impl Scalar for $type {
            const DTYPE: Dtype = Dtype::$dtype;
            type Output = $output;

            fn to_f32(self) -> f32 {
                $to_f32(self)
            }

            fn from_f32(x: f32) -> $type {
                $from_f32(x)
            }

            #[inline(never)]
            fn forward_on_cpu(
                problem: &KnownProblem,
                queries: Queries<'_, Self>,
                keys: Keys<'_>,
                o: ArrayViewMut4<'_, Self::Output>,
                of_rows: ArrayViewMut4<'_, f32>,
            ) -> Result<(), UnknownFeature> {
                cpu::forward(problem, queries, keys, o, of_rows)
            }

            #[inline(never)]
            fn backward_on_cpu(
                problem: &KnownProblem,
                qkv: [ArrayView4<'_, Self>; 3],
                sink: Option<ArrayView1<'_, f32>>,
                output: &Output<Self>,
                of: OutputGradients<'_, Self>,
            ) -> Result<Gradients<Self>, UnknownFeature> {
                cpu::backward(problem, qkv, sink, output, of)
            }
        }
    };
}

scalar!(f32, F32, f32, f32::from, f32::from);
scalar!(f16, F16, f16, f16::to_f32, f16::from_f32);
scalar!(bf16, Bf16, bf16, bf16::to_f32, bf16::from_f32);
scalar!(E4m3, E4m3, bf16, E4m3::to_f32, E4m3::from_f32);
scalar!(i8, Int8, bf16, f32::from, sealed::nearest);

mod sealed {
    use half::slice::HalfFloatSliceExt;

    /// The values of all codes of e4m3: a lookup takes a tenth of the time of a conversion.
    static VALUES: [f32; 256] = {
        let (mut values, mut code) = ([0.0; 256], 0);
        while code < values.len() {
            values[code] = fa3_quant::E4m3::from_bits(code as u8).to_f32();
            code += 1;
        }
        values
    };

    /// The integer nearest to a number, ties to even; 0 for NaN.
    pub(super) fn nearest(x: f32) -> i8 {
        x.round_ties_even() as i8
    }

    /// Numbers that have the same bytes in host memory and in a device's memory.
    pub trait Sealed: bytemuck::Pod {
        /// Converts to the exact values. Both slices have the same length.
        fn widen(from: &[Self], to: &mut [f32]);

        /// Converts to the nearest values, ties to even. Both slices have the same length.
        fn narrow(from: &[f32], to: &mut [Self]);
    }

    impl Sealed for f32 {
        fn widen(from: &[f32], to: &mut [f32]) {
            to.copy_from_slice(from);
        }

        fn narrow(from: &[f32], to: &mut [f32]) {
            to.copy_from_slice(from);
        }
    }

    macro_rules! half {
        ($type:ty) => {
            impl Sealed for $type {
                fn widen(from: &[$type], to: &mut [f32]) {
                    from.convert_to_f32_slice(to);
                }

                fn narrow(from: &[f32], to: &mut [$type]) {
                    to.convert_from_f32_slice(from);
                }
            }
        };
    }

    half!(half::f16);
    half!(half::bf16);

    impl Sealed for fa3_quant::E4m3 {
        fn widen(from: &[fa3_quant::E4m3], to: &mut [f32]) {
            to.iter_mut().zip(from).for_each(|(to, x)| *to = VALUES[usize::from(x.to_bits())]);
        }

        fn narrow(from: &[f32], to: &mut [fa3_quant::E4m3]) {
            to.iter_mut().zip(from).for_each(|(to, &x)| *to = fa3_quant::E4m3::from_f32(x));
        }
    }

    impl Sealed for i8 {
        fn widen(from: &[i8], to: &mut [f32]) {
            to.iter_mut().zip(from).for_each(|(to, &x)| *to = x.into());
        }

        fn narrow(from: &[f32], to: &mut [i8]) {
            to.iter_mut().zip(from).for_each(|(to, &x)| *to = nearest(x));
        }
    }
}
