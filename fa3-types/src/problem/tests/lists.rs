//! Lists of keys, caches that they name, and rows with scales of their own.

use super::*;

/// Rows of 656 bytes: 512 codes of e4m3, four scales, and K of 64 columns.
pub(super) fn scaled_rows() -> ProblemSpec {
    let q = Shape { batch: 2, seqlen: 1, heads: 4, head_dim: 64 };
    let mut spec = ProblemSpec::dense(Dtype::Bf16, q, Shape { heads: 1, seqlen: 24, ..q }).head_dim_v(512);
    spec.k.strides = Strides { batch: 24 * 328, seqlen: 328, heads: 328, head_dim: 1 };
    spec.v = TensorDesc::contiguous(Dtype::E4m3, spec.v.shape);
    spec.v.strides = Strides { batch: 24 * 656, seqlen: 656, heads: 656, head_dim: 1 };
    spec.seqs_k(Sequences::listed(2, 7))
}

#[test]
fn scales_of_rows_are_as_far_apart_as_rows() {
    let problem = scaled_rows().validate().unwrap();
    let scales = problem.v_scales().unwrap();
    assert_eq!(scales.shape, Shape { batch: 2, seqlen: 24, heads: 1, head_dim: 4 });
    assert_eq!((scales.strides.batch, scales.strides.seqlen, scales.dtype), (24 * 164, 164, Dtype::F32));
    assert!(!problem.has_scales() && !problem.converts_keys());
    assert!(problem.to_string().starts_with("bf16 over v of e4m3 batch 2"), "{problem}");
    assert_eq!(spec().validate().unwrap().v_scales(), None);
    // K must have Q's type.
    let mut spec = scaled_rows();
    spec.k = TensorDesc::contiguous(Dtype::F16, spec.k.shape);
    assert!(matches!(spec.validate().unwrap_err(), ProblemError::KeysAndValues { .. }));
}

/// Lists of 7 rows of a cache of 48 rows, and of up to 3 rows of another cache of 5.
pub(super) fn listed() -> ProblemSpec {
    let rows = TensorDesc::contiguous(Dtype::F16, Shape { batch: 1, seqlen: 5, ..KV });
    let extra = ExtraCache { k: rows, v: rows, sequences: Sequences::listed(2, 3).used() };
    spec().seqs_k(Sequences::listed(2, 7)).extra(extra)
}

#[test]
fn lists_of_keys() {
    let problem = listed().validate().unwrap();
    let text = problem.to_string();
    assert!(text.contains(" in lists of 7 of 48 rows and of 3 of 5 rows mask none "), "{text}");
    assert_eq!((problem.longest().k, problem.batch()), (10, 2));
    let gathered = problem.gathered();
    assert_eq!(
        (gathered.k().shape, gathered.v().shape),
        (Shape { seqlen: 10, ..KV }, Shape { seqlen: 10, ..KV })
    );
    assert_eq!((gathered.seqs_k(), gathered.extra()), (Sequences::dense(2, 10).used(), None));
    let latent = listed().qv(qv(Dtype::F16, 64)).validate().unwrap().joined();
    assert_eq!([latent.k().shape.head_dim, latent.extra().unwrap().k.shape.head_dim], [128, 128]);
    // The cache has any number of rows, and none is fine, too.
    let none = Shape { batch: 0, ..KV };
    ProblemSpec::dense(Dtype::F16, Q, none).seqs_k(Sequences::listed(2, 7)).validate().unwrap();

    let refused = |spec: ProblemSpec| spec.validate().unwrap_err();
    assert_eq!(refused(listed().causal()), ProblemError::ListsAndMask { mask: Mask::Causal });
    let tensor = TensorName::K;
    let (long, limit) = (1 << 31, i32::MAX as usize);
    let too_long = ProblemError::ListTooLong { tensor, entries: long, limit };
    assert_eq!(refused(spec().seqs_k(Sequences::listed(2, long))), too_long);
    assert_eq!(refused(spec().seqs_k(Sequences::listed(2, 7).table_stride(long))), too_long);
    let mut many = spec().seqs_k(Sequences::listed(2, 7));
    for x in [&mut many.k, &mut many.v] {
        (x.shape.batch, x.shape.seqlen, x.strides.batch) = (1 << 16, 1 << 15, 0);
    }
    assert_eq!(refused(many), ProblemError::ListedRows { tensor, rows: 1 << 31 });
    assert_eq!(refused(spec().seqs_k(Sequences::listed(3, 7))), ProblemError::SequenceCount { q: 2, k: 3 });
    assert_eq!(refused(spec().seqs_q(Sequences::listed(2, 7))), ProblemError::CachedQueries);
    let gradients = BackwardSpec::contiguous(spec().seqs_k(Sequences::listed(2, 7))).validate().unwrap_err();
    assert_eq!(gradients, ProblemError::NoGradients { feature: Feature::Lists });
}

#[test]
fn a_second_cache_is_like_the_first_one() {
    let rejects = |change: fn(&mut ExtraCache), expected| {
        let mut spec = listed();
        change(spec.extra.as_mut().unwrap());
        assert_eq!(spec.validate().unwrap_err(), expected);
    };
    let tensor = TensorName::ExtraV;
    let mismatch = |dim, given, expected| ProblemError::DimMismatch { tensor, dim, given, expected };
    rejects(|extra| extra.v.shape.head_dim = 8, mismatch(Dim::HeadDim, 8, 64));
    rejects(|extra| extra.v.shape.heads = 1, mismatch(Dim::Heads, 1, 2));
    rejects(|extra| extra.v.shape.seqlen = 4, mismatch(Dim::Seqlen, 4, 5));
    let dtype = ProblemError::ExtraDtype { tensor, given: Dtype::Bf16, expected: Dtype::F16 };
    rejects(|extra| extra.v.dtype = Dtype::Bf16, dtype);
    let lists = |given| ProblemError::ExtraLists { given, expected: 2 };
    rejects(|extra| extra.sequences = Sequences::listed(1, 3), lists(1));
    rejects(|extra| extra.sequences = Sequences::dense(1, 5), lists(1));
    assert_eq!(listed().seqs_k(Sequences::dense(2, 24)).validate().unwrap_err(), lists(2));
    let mut odd = listed();
    odd.extra.as_mut().unwrap().k.strides.seqlen += 4;
    let error = odd.validate().unwrap().check_rows().unwrap_err();
    assert!(matches!(error, ProblemError::StrideMultiple { tensor: TensorName::ExtraK, .. }), "{error}");
}
