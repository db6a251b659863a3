//! The split-KV reduction on the CPU.

use fa3::{Attention, Combine, Device, E4m3, Error, Output, Scalar};
use fa3_types::{CombineProblemError, Dim, Dtype, ProblemError, TensorName};
use half::{bf16, f16};
use ndarray::{Array3, Array4, Array5, Axis, s};

const NONE: f32 = f32::NEG_INFINITY;

fn parts<T: Scalar>(splits: usize, head_dim: usize) -> (Array5<T>, Array4<f32>) {
    let mut x = 0.0_f32;
    let mut next = || {
        x += 0.7;
        3.0 * x.sin()
    };
    let o = Array5::from_shape_simple_fn((splits, 2, 3, 2, head_dim), || T::from_f32(next()));
    // Some splits are empty, and the first row is empty in all splits.
    let lse = Array4::from_shape_fn((splits, 2, 3, 2), |(split, batch, row, head)| {
        let is_empty = (batch, row, head) == (0, 0, 0) || (split + row + head) % 3 == 0;
        if is_empty { NONE } else { next() }
    });
    (o, lse)
}

fn is_as_the_reference_s<T: Scalar + Copy, O: Scalar + Copy>(tolerance: f64) {
    for (splits, head_dim) in [(1, 8), (2, 64), (33, 128)] {
        let (mut o, lse) = parts::<T>(splits, head_dim);
        for ((split, batch, row, head, _), o) in o.indexed_iter_mut() {
            if lse[[split, batch, row, head]] == NONE {
                *o = T::from_f32(f32::NAN);
            }
        }
        // The memory layout is (num_splits, batch, heads, seqlen).
        let in_memory = lse.view().permuted_axes([0, 1, 3, 2]).as_standard_layout().into_owned();
        let given = in_memory.view().permuted_axes([0, 1, 3, 2]);
        let combined = Combine::new(&o, given).run::<O>(&Device::Cpu).unwrap();
        let expected = fa3_ref::combine::combine(o.mapv(|x| x.to_f32()).view(), lse.view());
        let close = |x: f32, y: f64| f64::from(x) == y || (f64::from(x) - y).abs() < tolerance;
        assert!(combined.o.iter().zip(&expected.o).all(|(x, &y)| close(x.to_f32(), y)));
        assert!(combined.lse.iter().zip(&expected.lse).all(|(&x, &y)| close(x, y)));
    }
}

#[test]
fn results_are_those_of_the_reference() {
    is_as_the_reference_s::<f32, f32>(1e-5);
    is_as_the_reference_s::<f32, bf16>(2e-2);
    is_as_the_reference_s::<f16, f16>(2e-3);
    is_as_the_reference_s::<bf16, f32>(1e-5);
}

#[test]
fn a_large_lse_is_no_infinity() {
    let o = Array5::from_shape_fn((2, 1, 1, 1, 4), |(split, ..)| split as f32);
    let lse = Array4::from_shape_vec((2, 1, 1, 1), vec![1e5, 1e5]).unwrap();
    let combined = Combine::new(&o, &lse).run::<f32>(&Device::Cpu).unwrap();
    assert_eq!((combined.o[[0; 4]], combined.lse[[0; 3]]), (0.5, 1e5 + 2_f32.ln()));
}

#[test]
fn without_rows_there_is_nothing() {
    let (o, lse) = (Array5::<f32>::zeros((3, 2, 0, 2, 8)), Array4::zeros((3, 2, 0, 2)));
    let combined = Combine::new(&o, &lse).run::<f16>(&Device::Cpu).unwrap();
    assert_eq!((combined.o.dim(), combined.lse.dim()), ((2, 0, 2, 8), (2, 0, 2)));
}

#[test]
fn invalid_partials_are_refused() {
    let (o, lse) = parts::<f32>(3, 8);
    let refused = |o: &Array5<f32>, lse: &Array4<f32>| {
        Combine::new(o, lse).run::<bf16>(&Device::Cpu).unwrap_err().to_string()
    };
    let no_parts = (Array5::zeros((0, 2, 3, 2, 8)), Array4::zeros((0, 2, 3, 2)));
    assert_eq!(refused(&no_parts.0, &no_parts.1), "out_partial has num_splits 0");
    assert_eq!(refused(&o, &parts::<f32>(2, 8).1), "lse_partial has num_splits 2, expected 3");
    let (narrow, _) = parts::<f32>(3, 12);
    let sentence = "o has head_dim 12, not a multiple of 8 as bf16 needs (16-byte rows)";
    assert_eq!(refused(&narrow, &lse), sentence);
    assert!(Combine::new(&narrow, &lse).run::<f32>(&Device::Cpu).is_ok());

    let error = Combine::new(&o, &lse).run::<E4m3>(&Device::Cpu).unwrap_err();
    assert_eq!(error, CombineProblemError::Dtype { tensor: TensorName::O, given: Dtype::E4m3 }.into());
    let (dim, tensor) = (Dim::Heads, TensorName::LsePartial);
    let mismatch = ProblemError::DimMismatch { tensor, dim, given: 1, expected: 2 };
    let error = Combine::new(&o, lse.slice_axis(Axis(3), (..1).into())).problem::<f32>().unwrap_err();
    assert_eq!(error, CombineProblemError::Tensor(mismatch).into());
}

/// With as many rows as heads, the shape of LSE does not show the wrong order of its dimensions.
#[test]
fn outputs_of_attention_are_merged_in_their_own_order() {
    let x = Array4::from_shape_fn((1, 4, 4, 16), |(_, s, h, d)| ((7 * s + 3 * h + d) as f32).sin());
    let parts = [0..1, 1..2, 2..4].map(|keys| {
        let keys = x.slice(s![.., keys, .., ..]);
        Attention::new(&x, keys, keys).forward(&Device::Cpu).unwrap()
    });
    let merge = |parts: &[Output<f32>]| Combine::of(parts).run(&Device::Cpu).unwrap().into_output();
    let whole = Attention::new(&x, &x, &x).forward(&Device::Cpu).unwrap();
    for combined in [merge(&parts), merge(&[merge(&parts[..2]), parts[2].clone()])] {
        assert!(whole.o.iter().zip(&combined.o).all(|(x, y)| (x - y).abs() < 1e-5));
        assert!(whole.lse.iter().zip(&combined.lse).all(|(x, y)| (x - y).abs() < 1e-5));
    }
}

#[test]
fn an_lse_in_the_order_of_outputs_is_named() {
    let (o, lse) = parts::<f32>(3, 8);
    let lse = lse.permuted_axes([0, 1, 3, 2]);
    let error = Combine::new(&o, &lse).problem::<f32>().unwrap_err();
    assert_eq!(error, Error::LseOrder { given: [2, 2, 3], expected: [2, 3, 2] });
}

#[test]
fn parts_have_one_shape() {
    let part = |rows| Output::new(Array4::<f32>::zeros((1, rows, 2, 8)), Array3::zeros((1, 2, rows)));
    let refused = |parts: &[Output<f32>]| Combine::of(parts).problem::<f32>().unwrap_err().to_string();
    assert_eq!(refused(&[]), "out_partial has num_splits 0");
    assert_eq!(refused(&[part(3), part(4)]), "out_partial has shape [1, 4, 2, 8], expected [1, 3, 2, 8]");
    let mixed = Output::new(part(3).o, part(4).lse);
    assert_eq!(refused(&[part(3), mixed]), "lse_partial has shape [1, 4, 2], expected [1, 3, 2]");
}
