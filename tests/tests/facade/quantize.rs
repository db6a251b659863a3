//! Quantization on the CPU.

use fa3::{Device, Error, Quantize, Rope, RopeStyle, RopeTable, Scalar, Scaling};
use fa3_quant::{Channels, E4m3, Granularity, Incoherent, Preparation, Rotation, RowPositions};
use fa3_types::{QuantizeProblemError, SequenceRows};
use half::{bf16, f16};
use ndarray::{Array3, Array4, Axis};

const DIMS: [usize; 4] = [2, 150, 3, 48];

fn wave<T: Scalar>(dims: [usize; 4]) -> Array4<T> {
    let mut x = 0.0;
    Array4::from_shape_simple_fn(dims, || {
        x += 0.7;
        T::from_f32(3.0 * f32::sin(x))
    })
}

fn table(positions: usize) -> RopeTable {
    Rope::new(RopeStyle::Interleaved, 32, 10_000.0).unwrap().table(positions)
}

/// Codes and scales of `x` computed by fa3-quant.
fn expected<T: Scalar>(x: &Array4<T>, preparation: &Preparation<'_>) -> (Array4<E4m3>, Vec<f32>) {
    let (batch, seqlen, ..) = x.dim();
    let x = x.mapv(|x| x.to_f32());
    let quantized = preparation.quantize(x.view(), &SequenceRows::dense(batch, seqlen)).unwrap();
    (quantized.codes().clone(), quantized.scales().values().to_vec())
}

fn is_as_fa3_quant_s<T: Scalar + Copy>() {
    let (x, table, mixed) = (wave::<T>(DIMS), table(170), Incoherent::new(48, 9));
    let first = |first| Rotation { table: &table, positions: RowPositions::First(first) };
    let listed: Vec<i32> = (0..300).map(|row| row * 37 % 180 - 5).collect();
    let each = Rotation { table: &table, positions: RowPositions::Each(&listed) };
    let [small, large] = [64, 128].map(|rows| Preparation::new(Granularity::Block { rows }));
    let quantize = Quantize::new(x.view());
    for (quantize, preparation) in [
        (quantize.clone(), large),
        (quantize.clone().scaling(Scaling::Block { rows: 64 }).hadamard(9), small.incoherent(&mixed)),
        (quantize.clone().rotary(&table), large.rotation(first(&[0, 0]))),
        (quantize.clone().rotary(&table).first_position(20), large.rotation(first(&[20, 20]))),
        (
            quantize.clone().rotary(&table).positions(&listed).hadamard(9),
            large.rotation(each).incoherent(&mixed),
        ),
        (quantize.clone().scaling(Scaling::Given(0.01)), Preparation::with_scale(0.01)),
        (
            quantize.clone().scaling(Scaling::Tensor).hadamard(9),
            Preparation::new(Granularity::Tensor).incoherent(&mixed),
        ),
        (
            quantize.clone().scaling(Scaling::Heads { heads: 1 }).rotary(&table).positions(&listed),
            Preparation::new(Granularity::Head).rotation(each),
        ),
    ] {
        let quantized = quantize.run(&Device::Cpu).unwrap();
        let (codes, scales) = expected(&x, &preparation);
        assert_eq!(quantized.codes, codes);
        assert_eq!(quantized.scales.iter().copied().collect::<Vec<_>>(), scales);
        let shape = quantize.problem().unwrap().scales_shape().unwrap_or([1; 3]);
        assert_eq!(quantized.scales.shape(), shape);
    }
    let values = x.mapv(|x| x.to_f32());
    let channels = Channels::of(values.view());
    let quantized = Quantize::new(x.view()).scaling(Scaling::Channel).run(&Device::Cpu).unwrap();
    assert_eq!(quantized.codes, channels.quantize(values.view()).unwrap().codes());
    assert_eq!((&quantized.scales, quantized.mean.as_ref()), (channels.scale(), Some(channels.mean())));
}

#[test]
fn codes_and_scales_are_those_of_fa3_quant() {
    is_as_fa3_quant_s::<f16>();
    is_as_fa3_quant_s::<bf16>();
}

/// The heads of a group share the largest scale of any of them, and their codes use it.
#[test]
fn heads_share_the_largest_scale() {
    let x = Array4::from_shape_fn([2, 150, 6, 48], |(b, s, h, d)| {
        f16::from_f32(((7 * b + 3 * s + d) as f32).sin() * (1 + h) as f32 * if h == 3 { 0.0 } else { 1.0 })
    });
    let quantize = Quantize::new(x.view()).hadamard(1);
    let single = quantize.clone().scaling(Scaling::Heads { heads: 1 }).run(&Device::Cpu).unwrap();
    let shared = quantize.clone().scaling(Scaling::Heads { heads: 3 }).run(&Device::Cpu).unwrap();
    assert_eq!((single.scales.dim(), shared.scales.dim()), ((2, 6, 1), (2, 2, 1)));
    for ((batch, group, _), &scale) in shared.scales.indexed_iter() {
        // A head of zeros alone has scale 1. In a group, its zeros do not affect the group's scale.
        let heads = (3 * group..3 * group + 3).filter(|&head| head != 3);
        let largest = heads.map(|head| single.scales[[batch, head, 0]]).fold(0.0, f32::max);
        assert_eq!(scale, largest);
        let given = quantize.clone().scaling(Scaling::Given(scale)).run(&Device::Cpu).unwrap();
        for ((b, row, head, column), &code) in shared.codes.indexed_iter() {
            if (b, head / 3) == (batch, group) {
                assert_eq!(code, given.codes[[b, row, head, column]]);
            }
        }
    }
    assert_eq!(single.scales[[0, 3, 0]], 1.0);
}

#[test]
fn a_gpu_gives_the_same_bits() {
    let (device, no_gpu) = Device::best();
    if let Some(why) = no_gpu {
        println!("skipped: {why}");
        return;
    }
    let (x, table, listed) = (wave::<bf16>(DIMS), table(170), vec![7; 300]);
    let quantize = Quantize::new(x.view()).hadamard(9);
    let rotated = quantize.clone().rotary(&table);
    let empty = Array4::from_elem([2, 0, 3, 48], bf16::ZERO);
    for quantize in [
        quantize.clone(),
        quantize.scaling(Scaling::Given(0.01)),
        rotated.clone().first_position(20).scaling(Scaling::Block { rows: 64 }),
        rotated.clone().positions(&listed),
        Quantize::new(x.view()).scaling(Scaling::Channel),
        rotated.clone().scaling(Scaling::Heads { heads: 1 }),
        Quantize::new(x.view()).scaling(Scaling::Heads { heads: 3 }),
        Quantize::new(x.view()).scaling(Scaling::Tensor),
        Quantize::new(empty.view()).scaling(Scaling::Tensor),
        Quantize::new(empty.view()),
        Quantize::new(empty.view()).scaling(Scaling::Channel),
    ] {
        assert_eq!(quantize.run(&device).unwrap(), quantize.run(&Device::Cpu).unwrap());
    }
}

#[test]
fn dequantized_numbers_are_near() {
    let x = wave::<f16>(DIMS);
    let quantize = Quantize::new(x.view());
    for quantize in [
        quantize.clone().scaling(Scaling::Block { rows: 64 }),
        quantize.clone().scaling(Scaling::Given(0.01)),
        quantize.scaling(Scaling::Channel),
    ] {
        let quantized = quantize.run(&Device::Cpu).unwrap();
        for ((at, &near), x) in quantized.dequantize().indexed_iter().zip(&x) {
            let (batch, _, head, column) = at;
            let mean = quantized.mean.as_ref().map_or(0.0, |mean| mean[[batch, head, column]]);
            // The bound is half a step of 3 fraction bits, or half a step of the smallest numbers.
            let bound = (x.to_f32() - mean).abs() / 16.0 + 1e-4;
            assert!((near - x.to_f32()).abs() <= bound, "{at:?}: {near} {x}");
        }
    }
}

#[test]
fn strides_are_free() {
    let x = wave::<f16>(DIMS);
    let expected = Quantize::new(x.view()).run(&Device::Cpu).unwrap();
    let heads_first = x.view().permuted_axes([0, 2, 1, 3]).as_standard_layout().into_owned();
    let view = heads_first.view().permuted_axes([0, 2, 1, 3]);
    assert_eq!(Quantize::new(view).run(&Device::Cpu).unwrap(), expected);
    let one = x.index_axis(Axis(0), 0);
    let twice = one.broadcast(DIMS).unwrap();
    let quantized = Quantize::new(twice).run(&Device::Cpu).unwrap();
    assert_eq!(quantized.codes.index_axis(Axis(0), 1), expected.codes.index_axis(Axis(0), 0));
}

#[test]
fn tensors_without_elements_are_legal() {
    for dims in [[0, 4, 2, 16], [2, 0, 2, 16], [1 << 30, 0, 1, 16]] {
        let x = Array4::from_elem(dims, f16::ZERO);
        let quantized = Quantize::new(x.view()).hadamard(1).run(&Device::Cpu).unwrap();
        assert_eq!(quantized.codes.shape(), dims);
        assert_eq!(quantized.scales.shape(), [dims[0], dims[2], dims[1].div_ceil(128)]);
        let given = Quantize::new(x.view()).scaling(Scaling::Given(0.5)).run(&Device::Cpu).unwrap();
        assert_eq!(given.scales, Array3::from_elem([1; 3], 0.5));
        let one = Quantize::new(x.view()).scaling(Scaling::Tensor).run(&Device::Cpu).unwrap();
        assert_eq!(one.scales, Array3::ones([1; 3]));
    }
}

#[test]
fn channels_without_elements_have_mean_0_and_scale_1() {
    for dims in [[0, 4, 2, 16], [2, 0, 2, 16]] {
        let x = Array4::from_elem(dims, f16::ZERO);
        let quantized = Quantize::new(x.view()).scaling(Scaling::Channel).run(&Device::Cpu).unwrap();
        let shape = [dims[0], dims[2], dims[3]];
        assert_eq!(quantized.mean, Some(Array3::zeros(shape)));
        assert_eq!(quantized.scales, Array3::ones(shape));
    }
}

#[test]
fn bad_requests_are_refused() {
    let (x, table) = (wave::<f16>(DIMS), table(150));
    let quantize = Quantize::new(x.view());
    let refused = |quantize: &Quantize<'_, f16>| quantize.run(&Device::Cpu).unwrap_err();
    let error = refused(&quantize.clone().scaling(Scaling::Block { rows: 32 }));
    assert_eq!(error, QuantizeProblemError::BlockRows { given: 32 }.into());
    let error = refused(&quantize.clone().scaling(Scaling::Given(-1.0)));
    assert_eq!(error.to_string(), "the scale -1 is outside 2^-64 to 2^64");
    let rotated = quantize.clone().rotary(&table);
    let error = refused(&rotated.clone().first_position(1));
    assert_eq!(error, QuantizeProblemError::Positions { last: 150, rows: 150 }.into());
    let error = refused(&rotated.clone().positions(&[0; 299]));
    assert_eq!(error.to_string(), "299 positions were given for 2 sequences of 150 rows");
    for quantize in [quantize.clone().first_position(0), quantize.clone().positions(&[0; 300])] {
        assert_eq!(refused(&quantize).to_string(), "positions were given without a rotation");
    }
    // The setters are called in either order, with and without a rotation.
    for quantize in [rotated.clone(), quantize.clone()] {
        let first = quantize.clone().first_position(0).positions(&[0; 300]);
        let last = quantize.positions(&[0; 300]).first_position(0);
        assert_eq!([refused(&first), refused(&last)], [Error::TwoPositions, Error::TwoPositions]);
    }
    let error = refused(&quantize.clone().scaling(Scaling::Heads { heads: 2 }));
    assert_eq!(error.to_string(), "a scale for each 2 heads, of which the tensor has 3");
    let error = refused(&quantize.scaling(Scaling::Channel).hadamard(1));
    assert_eq!(error, QuantizeProblemError::MixedChannels.into());
    let wide = Rope::new(RopeStyle::HalfSplit, 64, 10_000.0).unwrap().table(150);
    let error = refused(&Quantize::new(x.view()).rotary(&wide));
    assert_eq!(error, QuantizeProblemError::RotaryDim { given: 64, head_dim: 48 }.into());
    let single = wave::<f32>(DIMS);
    let error = Quantize::new(single.view()).run(&Device::Cpu).unwrap_err();
    assert_eq!(error.to_string(), "x is f32, expected f16 or bf16");
}

/// A head dimension that is too large is refused before the signs are drawn.
#[test]
fn a_head_dimension_that_is_too_large_is_refused_at_once() {
    let one = Array4::from_elem([1, 1, 1, 1], f16::ZERO);
    let wide = one.broadcast([1, 1, 1, (1 << 31) - 16]).unwrap();
    let error = Quantize::new(wide).hadamard(1).problem().unwrap_err();
    assert_eq!(error.to_string(), "x has head_dim 2147483632, not a multiple of 16 up to 256");
}
