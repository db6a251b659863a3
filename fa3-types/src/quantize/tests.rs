use super::*;
use crate::RopeStyle;

const SHAPE: Shape = Shape { batch: 2, seqlen: 100, heads: 3, head_dim: 96 };
const ROTARY: Rotary =
    Rotary { style: RopeStyle::Interleaved, rotary_dim: 32, table_rows: 110, positions: Positions::From(10) };

fn spec() -> QuantizeSpec {
    QuantizeSpec::contiguous(Dtype::F16, SHAPE)
}

fn refused(spec: QuantizeSpec) -> QuantizeProblemError {
    spec.validate().unwrap_err()
}

#[test]
fn blocks_have_scales_and_a_given_scale_has_none() {
    let shape = |spec: QuantizeSpec| spec.validate().unwrap().scales_shape();
    assert_eq!(shape(spec()), Some([2, 3, 1]));
    assert_eq!(shape(spec().scaling(Scaling::Block { rows: 64 })), Some([2, 3, 2]));
    assert_eq!(shape(spec().scaling(Scaling::Given(0.5))), None);
}

#[test]
fn packed_sequences_have_scales_of_blocks() {
    let one = || QuantizeSpec::contiguous(Dtype::F16, Shape { batch: 1, ..SHAPE });
    let packed = one().packed(4).validate().unwrap();
    assert_eq!((packed.packed(), packed.scales_shape()), (Some(4), Some([1, 3, 5])));
    assert_eq!(packed.to_string(), "f16 (1, 100, 3, 96), a scale for each 128 rows, 4 packed sequences");
    let (tensor, dim) = (TensorName::X, Dim::Batch);
    let batch = ProblemError::DimMismatch { tensor, dim, given: 2, expected: 1 };
    assert_eq!(refused(spec().packed(4)), batch.into());
    for scaling in [Scaling::Tensor, Scaling::Channel, Scaling::Given(1.0), Scaling::Heads { heads: 1 }] {
        let error = refused(one().scaling(scaling).packed(4));
        assert_eq!(error, QuantizeProblemError::PackedScaling { scaling });
    }
    let transposed = ProblemError::TransposedV { dtype: Dtype::E4m3, packed: true };
    assert_eq!(refused(one().transposed().packed(4)), transposed.into());
    // The lengths of packed sequences are data, so only the position of a first row is checked.
    let rotary = |first| Rotary { positions: Positions::From(first), ..ROTARY };
    assert!(one().packed(4).rotary(rotary(109)).validate().is_ok());
    let beyond = QuantizeProblemError::Positions { last: 110, rows: 110 };
    assert_eq!(refused(one().packed(4).rotary(rotary(110))), beyond);
}

#[test]
fn heads_may_share_a_scale() {
    let shape = |spec: QuantizeSpec| spec.validate().unwrap().scales_shape();
    let of_heads = |heads| spec().scaling(Scaling::Heads { heads });
    let of_tensor = spec().scaling(Scaling::Tensor);
    assert_eq!([1, 3].map(|heads| shape(of_heads(heads))), [Some([2, 3, 1]), Some([2, 1, 1])]);
    assert_eq!(shape(of_tensor), Some([1, 1, 1]));
    for given in [0, 2, 6] {
        assert_eq!(refused(of_heads(given)), QuantizeProblemError::ScaleHeads { given, heads: 3 });
    }
    let texts = [of_heads(1), of_heads(3), of_tensor].map(|spec| spec.validate().unwrap().to_string());
    assert_eq!(texts[0], "f16 (2, 100, 3, 96), a scale for each head");
    assert!(texts[1].ends_with(", a scale for each 3 heads") && texts[2].ends_with(", a scale for all"));
}

#[test]
fn channels_have_scales_and_means() {
    let of_channels = spec().scaling(Scaling::Channel);
    let problem = of_channels.validate().unwrap();
    assert_eq!((problem.scales_shape(), problem.mean_shape()), (Some([2, 3, 96]), Some([2, 3, 96])));
    assert_eq!(spec().validate().unwrap().mean_shape(), None);
    assert_eq!(problem.to_string(), "f16 (2, 100, 3, 96), a scale and a mean for each channel");
    let signs = Signs { leading: [1; 8], between: [2; 8] };
    for mixed in [of_channels.rotary(ROTARY), of_channels.signs(signs)] {
        assert_eq!(refused(mixed), QuantizeProblemError::MixedChannels);
    }
}

#[test]
fn bad_requests_are_refused() {
    let x = QuantizeSpec::contiguous(Dtype::F32, SHAPE);
    assert_eq!(refused(x), QuantizeProblemError::Input { given: Dtype::F32 });
    let codes = QuantizeSpec { codes: spec().x, ..spec() };
    assert_eq!(refused(codes), QuantizeProblemError::Codes { given: Dtype::F16 });
    let other = QuantizeSpec::contiguous(Dtype::F16, Shape { heads: 4, ..SHAPE });
    let (tensor, dim) = (TensorName::Codes, Dim::Heads);
    let mismatch = ProblemError::DimMismatch { tensor, dim, given: 4, expected: 3 };
    assert_eq!(refused(QuantizeSpec { codes: other.codes, ..spec() }), mismatch.into());
    for given in [1, 17, 24, 72, 255, 257, 264, 272] {
        let spec = QuantizeSpec::contiguous(Dtype::F16, Shape { head_dim: given, ..SHAPE });
        assert_eq!(refused(spec), QuantizeProblemError::HeadDim { given });
    }
    let text = QuantizeProblemError::HeadDim { given: 17 }.to_string();
    assert_eq!(text, "x has head_dim 17, not a multiple of 16 up to 256");
    let mut odd = spec();
    odd.codes.strides.batch += 8;
    let (tensor, dim, given) = (TensorName::Codes, Dim::Batch, odd.codes.strides.batch);
    assert_eq!(refused(odd), ProblemError::StrideMultiple { tensor, dim, given, multiple: 16 }.into());
    assert_eq!(
        refused(spec().scaling(Scaling::Block { rows: 32 })),
        QuantizeProblemError::BlockRows { given: 32 }
    );
    for given in [0.0, -1.0, f32::INFINITY, 1e20, 1e-20] {
        assert_eq!(refused(spec().scaling(Scaling::Given(given))), QuantizeProblemError::Scale { given });
    }
    assert!(matches!(refused(spec().scaling(Scaling::Given(f32::NAN))), QuantizeProblemError::Scale { .. }));
}

#[test]
fn transposed_codes_are_contiguous_and_whole_rows_of_keys() {
    let bytes = |spec: QuantizeSpec| spec.validate().unwrap().codes_bytes().0;
    assert_eq!(bytes(spec()), 2 * 100 * 3 * 96);
    assert_eq!(bytes(spec().transposed()), 2 * 3 * 96 * 128);
    let mut gaps = spec();
    gaps.codes.strides.heads = 112;
    gaps.codes.strides.seqlen = 3 * 112;
    gaps.codes.strides.batch = 100 * 3 * 112;
    assert!(gaps.validate().is_ok());
    let (dim, given, expected) = (Dim::Batch, 33600, 28800);
    assert_eq!(refused(gaps.transposed()), QuantizeProblemError::CodesStride { dim, given, expected });
    // Strides of dimensions with one element are ignored.
    let mut one = QuantizeSpec::contiguous(Dtype::F16, Shape { batch: 1, ..SHAPE }).transposed();
    one.codes.strides.batch = 16;
    assert!(one.validate().is_ok());
    // The tensor has 2^60 bytes, and transposed 2^66 bytes, because rows of keys are padded.
    let shape = Shape { batch: 1 << 30, seqlen: 1, heads: 1 << 25, head_dim: 16 };
    let large = QuantizeSpec::contiguous(Dtype::F16, shape);
    assert!(large.validate().is_ok());
    let (tensor, shape) = (TensorName::Codes, Shape { seqlen: 128, ..shape });
    assert_eq!(refused(large.transposed()), ProblemError::TooLarge { tensor, shape }.into());
}

#[test]
fn rotations_need_a_table_for_every_position() {
    assert!(spec().rotary(ROTARY).validate().is_ok());
    for given in [0, 24, 112] {
        let error = refused(spec().rotary(Rotary { rotary_dim: given, ..ROTARY }));
        assert_eq!(error, QuantizeProblemError::RotaryDim { given, head_dim: 96 });
    }
    let beyond = Rotary { positions: Positions::From(11), ..ROTARY };
    assert_eq!(refused(spec().rotary(beyond)), QuantizeProblemError::Positions { last: 110, rows: 110 });
    let listed = Rotary { positions: Positions::Listed, table_rows: 1, ..ROTARY };
    assert!(spec().rotary(listed).validate().is_ok());
    let none = Rotary { table_rows: 0, ..listed };
    assert_eq!(refused(spec().rotary(none)), QuantizeProblemError::Positions { last: 0, rows: 0 });
}

#[test]
fn it_says_what_it_does() {
    let problem = spec().rotary(ROTARY).signs(Signs { leading: [1; 8], between: [2; 8] });
    assert_eq!(
        problem.validate().unwrap().to_string(),
        "f16 (2, 100, 3, 96), interleaved rotary embedding of 32, Hadamard, a scale for each 128 rows"
    );
    assert_eq!(
        spec().scaling(Scaling::Given(0.5)).transposed().validate().unwrap().to_string(),
        "f16 (2, 100, 3, 96), scale 0.5, transposed"
    );
}
