//! Scales of tokens and heads, and int8, which needs them.

use super::*;

#[test]
fn scales_of_tokens_are_checked() {
    let scaled = |spec: ProblemSpec| spec.e4m3_keys().token_scales(TokenScales::contiguous(KV));
    let problem = scaled(spec()).validate().unwrap();
    assert!(!problem.has_scales() && problem.to_string().contains(" scales of tokens "), "{problem}");
    let refused = |spec: ProblemSpec| spec.validate().unwrap_err();
    let [f16, e4m3] = [Dtype::F16, Dtype::E4m3];
    let of = |q, k, qv, lists| ProblemError::TokenScales { q, k, qv, lists };
    assert_eq!(refused(spec().token_scales(TokenScales::contiguous(KV))), of(f16, f16, false, false));
    let of_e4m3 = ProblemSpec::dense(e4m3, Q, KV);
    assert_eq!(refused(of_e4m3.token_scales(TokenScales::contiguous(KV))), of(e4m3, e4m3, false, false));
    let latent = TensorDesc::contiguous(f16, spec().o.shape);
    assert_eq!(refused(scaled(spec()).qv(latent)), of(f16, e4m3, true, false));
    let lists = scaled(spec()).seqs_k(Sequences::listed(2, 9));
    assert_eq!(refused(lists), of(f16, e4m3, false, true));
    let mut wrong = scaled(spec());
    wrong.token_scales = Some(TokenScales::contiguous(Shape { seqlen: 23, ..KV }));
    let tensor = TensorName::KScales;
    let error = ProblemError::DimMismatch { tensor, dim: Dim::Seqlen, given: 23, expected: KV.seqlen };
    assert_eq!(refused(wrong), error);
}

#[test]
fn int8_is_for_keys_and_values_with_scales() {
    let problem = spec().int8_keys().validate().unwrap();
    assert!(
        problem.converts_keys() && !problem.has_scales() && problem.to_string().contains("f16 over int8 ")
    );
    assert_eq!(problem.features().find(|feature| *feature == Feature::E4m3Keys), None);
    let refused = |[q, k, v]: [Dtype; 3], token_scales: bool| {
        let mut spec = ProblemSpec::dense(q, Q, KV);
        (spec.k.dtype, spec.v.dtype) = (k, v);
        spec.token_scales = token_scales.then(|| TokenScales::contiguous(KV));
        assert_eq!(spec.validate().unwrap_err(), ProblemError::Int8 { q, k, v, token_scales });
    };
    let [f32, f16, e4m3, int8] = [Dtype::F32, Dtype::F16, Dtype::E4m3, Dtype::Int8];
    refused([f16, int8, int8], false);
    for dtypes in [[int8; 3], [f32, int8, int8], [e4m3, int8, int8], [f16, int8, f16], [f16, e4m3, int8]] {
        refused(dtypes, true);
    }
    let intervals =
        spec().int8_keys().mask(Mask::of_intervals(Intervals::of_shape([1, 1, 1, 3], Q).unwrap()));
    assert_eq!(intervals.validate().unwrap_err(), ProblemError::IntervalsDtype { given: int8 });
}
