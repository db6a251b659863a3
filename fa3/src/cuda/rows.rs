//! Padding of rows to multiples of 16 bytes, which kernels require.

use ndarray::{Array4, ArrayView4, Axis, CowArray, Ix4, Slice};

use crate::Scalar;

/// The tensor with its rows padded with zeros to a multiple of 16 bytes. It is copied only if its rows need padding.
pub(super) fn pad<T: Scalar>(x: ArrayView4<'_, T>) -> CowArray<'_, T, Ix4> {
    let (batch, seqlen, heads, head_dim) = x.dim();
    let padded = head_dim.next_multiple_of(T::DTYPE.row_multiple());
    if padded == head_dim {
        return x.into();
    }
    let mut rows = Array4::from_elem((batch, seqlen, heads, padded), T::default());
    rows.slice_axis_mut(Axis(3), Slice::from(..head_dim)).assign(&x);
    rows.into()
}

/// The first `head_dim` columns. The tensor is copied only if it has more columns.
pub(super) fn unpad<T: Scalar>(x: Array4<T>, head_dim: usize) -> Array4<T> {
    if x.len_of(Axis(3)) == head_dim {
        return x;
    }
    x.slice_axis(Axis(3), Slice::from(..head_dim)).to_owned()
}

#[cfg(test)]
mod tests {
    use fa3_quant::E4m3;
    use half::f16;

    use super::*;

    fn wave<T: Scalar>(dims: [usize; 4], step: f32) -> Array4<T> {
        Array4::from_shape_fn(dims, |(b, s, h, d)| {
            T::from_f32((step * (11 * b + 7 * s + 3 * h + 5 * d) as f32).sin())
        })
    }

    /// A tensor whose columns from 4 on are `x`, and whose other columns are NaN.
    fn with_neighbours<T: Scalar>(x: &Array4<T>) -> Array4<T> {
        let (batch, seqlen, heads, head_dim) = x.dim();
        let mut wide = Array4::from_elem((batch, seqlen, heads, head_dim + 9), T::from_f32(f32::NAN));
        wide.slice_axis_mut(Axis(3), Slice::from(4..4 + head_dim)).assign(x);
        wide
    }

    fn rows_of<T: Scalar + PartialEq + std::fmt::Debug>() {
        for head_dim in 1..=33 {
            let x = wave::<T>([2, 3, 2, head_dim], 0.7);
            let wide = with_neighbours(&x);
            let padded = pad(wide.slice_axis(Axis(3), Slice::from(4..4 + head_dim)));
            assert!((padded.len_of(Axis(3)) * size_of::<T>()).is_multiple_of(16));
            assert_eq!(padded.is_view(), (head_dim * size_of::<T>()).is_multiple_of(16));
            assert!(padded.slice_axis(Axis(3), Slice::from(head_dim..)).iter().all(|x| x.to_f32() == 0.0));
            assert_eq!(unpad(padded.into_owned(), head_dim), x);
        }
    }

    #[test]
    fn rows_are_padded_with_zeros_and_cut() {
        rows_of::<f32>();
        rows_of::<f16>();
        rows_of::<E4m3>();
    }
}
