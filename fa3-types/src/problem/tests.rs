use super::*;
use crate::{BackwardSpec, ExtraCache, Intervals, KnownProblem, SequenceRows, Strides};

const Q: Shape = Shape { batch: 2, seqlen: 16, heads: 4, head_dim: 64 };
const KV: Shape = Shape { batch: 2, seqlen: 24, heads: 2, head_dim: 64 };

mod lists;
mod token_scales;

use lists::{listed, scaled_rows};

fn spec() -> ProblemSpec {
    ProblemSpec::dense(Dtype::F16, Q, KV)
}

fn rejects(change: impl FnOnce(&mut ProblemSpec), expected: ProblemError) {
    let mut spec = spec();
    change(&mut spec);
    assert_eq!(spec.validate().unwrap_err(), expected);
}

#[test]
fn a_good_problem() {
    let problem = spec().causal().softcap(30.0).head_dim_v(32).validate().unwrap();
    assert_eq!(problem.known().unwrap().lengths(1), Lengths { q: 16, k: 24 });
    assert_eq!((problem.head_dim(), problem.head_dim_v()), (64, 32));
    assert_eq!(problem.softmax_scale().natural(), 0.125);
    assert_eq!(problem.lse_shape(), [2, 4, 16]);
    let text = "f16 batch 2 seqlen 16 x 24 heads 4/2 head_dim 64/32 mask causal scale 0.125000 softcap 30";
    assert_eq!(problem.to_string(), text);
    assert!(!problem.has_sink());
    let problem = spec().softmax_scale(1e-18).softcap(1e18).sink().validate().unwrap();
    let text = problem.to_string();
    assert!(text.ends_with(" scale 1e-18 softcap 1e18 sink"), "{text}");
    assert!(problem.has_sink() && problem.padded().has_sink());
    // Without sinks there is nothing to leave out.
    let form = LseForm { without_sink: true, ..LseForm::default() };
    let problem = |spec: ProblemSpec| spec.lse_form(form).validate().unwrap();
    assert_eq!(problem(spec()), spec().validate().unwrap());
    assert!(problem(spec().sink()).to_string().ends_with(" sink lse without sink"));
}

/// Problems that have all features together.
fn of_every_feature() -> Vec<ProblemSpec> {
    let chunks = Mask::chunk(std::num::NonZeroU32::new(5).unwrap());
    let intervals = Intervals { of_row: crate::IntervalsOfRow::Two, per_sequence: true, per_head: false };
    let codes = || ProblemSpec::dense(Dtype::E4m3, Q, KV);
    let mut strided = spec().sink().softcap(30.0).causal();
    strided.q.strides = Strides { batch: 8192, seqlen: 64, heads: 1024, head_dim: 1 };
    let pages = Sequences::indexed(2, [7, 3]).table_stride(5).longest(40).used().left_padded();
    let rows = SequenceRows::packed_lengths(&[5, 0, 6]);
    vec![
        spec().score(crate::ScoreFunction::parse("2 * s", []).unwrap().form().clone()),
        strided.max_logits(),
        spec().mask(chunks).softmax_scale(0.3).seqs_q(Sequences::dense(2, 16).used()),
        spec().mask(Mask::of_intervals(intervals)).lse_form(LseForm { base_two: true, ..LseForm::default() }),
        spec().head_dim_v(32).qv(qv(Dtype::F16, 32)).mask(Mask::Window { left: Some(9), right: Some(99) }),
        spec().e4m3_keys().seqs_k(pages),
        listed().seqs_k(Sequences::listed(2, 7).table_stride(9)).sink(),
        codes().transposed_v().block_scales(64).v_channels(),
        spec().mask(Mask::of_intervals(Intervals::of_tree(1))).seqs_k(Sequences::dense(2, 24).used()),
        spec().mask(Mask::of_intervals(Intervals::of_shape([1, 1, 1, 3], Q).unwrap())),
        scaled_rows(),
        spec().e4m3_keys().token_scales(TokenScales::contiguous(KV)),
        spec().int8_keys(),
        ProblemSpec::packed(Dtype::Bf16, (4, 2), 64, &rows, &rows)
            .seqs_q(Sequences::packed(3).longest(6))
            .seqs_k(Sequences::packed(3)),
    ]
}

#[test]
fn a_problem_is_made_again_of_its_specification() {
    let problems: Vec<Problem> =
        of_every_feature().into_iter().map(|spec| spec.validate().unwrap()).collect();
    for problem in &problems {
        assert_eq!(problem.spec().validate().as_ref(), Ok(problem));
    }
    let features: Vec<Feature> = problems.iter().flat_map(Problem::features).collect();
    let missing: Vec<_> = Feature::ALL.iter().filter(|feature| !features.contains(feature)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn dimensions_are_checked() {
    use {Dim::*, TensorName::*};
    rejects(|s| s.q.shape.heads = 0, ProblemError::ZeroDim { tensor: Q, dim: Heads });
    rejects(|s| s.k.shape.head_dim = 0, ProblemError::ZeroDim { tensor: K, dim: HeadDim });
    let (given, limit) = (1 << 31, (1 << 31) - 1);
    rejects(|s| s.v.shape.seqlen = given, ProblemError::DimTooLarge { tensor: V, dim: Seqlen, given, limit });
    let large = ProblemError::DimTooLarge { tensor: Q, dim: HeadDim, given: 584, limit: 576 };
    rejects(|s| s.q = TensorDesc::contiguous(Dtype::F16, Shape { head_dim: 584, ..s.q.shape }), large);
    let mismatch = |tensor, dim, given, expected| ProblemError::DimMismatch { tensor, dim, given, expected };
    rejects(|s| s.k.shape.head_dim = 32, mismatch(K, HeadDim, 32, 64));
    rejects(|s| s.v.shape.seqlen = 23, mismatch(V, Seqlen, 23, 24));
    rejects(|s| s.v.shape.heads = 1, mismatch(V, Heads, 1, 2));
    rejects(|s| s.o.shape.batch = 1, mismatch(O, Batch, 1, 2));
    let error = ProblemSpec::dense(Dtype::F16, self::Q, Shape { batch: 3, ..KV }).validate().unwrap_err();
    assert_eq!(error, mismatch(K, Batch, 3, 2));
    rejects(|s| s.o.shape.head_dim = 8, mismatch(O, HeadDim, 8, 64));
    rejects(
        |s| [s.k.shape.heads, s.v.shape.heads] = [3, 3],
        ProblemError::HeadsNotDivisible { heads_q: 4, heads_kv: 3 },
    );
}

#[test]
fn dtypes_are_checked() {
    let of_16_bits = spec().e4m3_keys().validate().unwrap();
    assert!(of_16_bits.converts_keys() && of_16_bits.has_scales());
    assert_eq!(of_16_bits.o().dtype, Dtype::F16);
    assert_eq!(of_16_bits.descale_shapes()[1..], [vec![2, 2], vec![2, 2]]);
    assert!(of_16_bits.to_string().starts_with("f16 over e4m3 batch 2"), "{of_16_bits}");
    assert!(!spec().validate().unwrap().has_scales());
    // Q of 40 columns is padded as K is.
    let odd = |shape| Shape { head_dim: 40, ..shape };
    let padded = ProblemSpec::dense(Dtype::F16, odd(Q), odd(KV)).e4m3_keys().validate().unwrap().padded();
    assert_eq!((padded.head_dim(), padded.k().shape.head_dim, padded.o().shape.head_dim), (48, 48, 48));
    let refused = |spec: ProblemSpec| spec.validate().unwrap_err();
    let transposed = ProblemError::TransposedV { dtype: Dtype::F16, packed: false };
    assert_eq!(refused(spec().e4m3_keys().transposed_v()), transposed);
    let fine = ProblemError::FineScales { dtype: Dtype::F16, packed: false, cache: false };
    assert_eq!(refused(spec().e4m3_keys().v_channels()), fine);
    let gradients = BackwardSpec::contiguous(spec().e4m3_keys()).validate().unwrap_err();
    assert_eq!(gradients, ProblemError::NoGradients { feature: Feature::E4m3Keys });
    let apart = |k, v| ProblemError::KeysAndValues { k, v };
    rejects(|s| s.v.dtype = Dtype::E4m3, apart(Dtype::F16, Dtype::E4m3));
    rejects(|s| s.k.dtype = Dtype::E4m3, apart(Dtype::E4m3, Dtype::F16));
    let wide =
        ProblemError::DtypeMismatch { tensor: TensorName::K, given: Dtype::E4m3, expected: Dtype::F32 };
    assert_eq!(refused(ProblemSpec::dense(Dtype::F32, Q, KV).e4m3_keys()), wide);
    let mismatch = |tensor, given| ProblemError::DtypeMismatch { tensor, given, expected: Dtype::F16 };
    rejects(|s| s.k.dtype = Dtype::Bf16, mismatch(TensorName::K, Dtype::Bf16));
    rejects(|s| s.v.dtype = Dtype::Bf16, mismatch(TensorName::V, Dtype::Bf16));
    rejects(|s| s.o.dtype = Dtype::Bf16, ProblemError::OutputDtype { given: Dtype::Bf16, input: Dtype::F16 });
}

#[test]
fn numbers_are_checked() {
    rejects(|s| s.softmax_scale = Some(-1.0), ProblemError::SoftmaxScale { given: -1.0 });
    rejects(|s| s.softcap = Some(0.0), ProblemError::SoftCap { given: 0.0 });
}

#[test]
fn outputs_must_not_broadcast() {
    let overlap =
        ProblemError::OutputOverlapsItself { tensor: TensorName::O, dim: Dim::Batch, given: 0, needed: 64 };
    rejects(|s| s.o.strides.batch = 0, overlap);
    let mut broadcast_input = spec();
    broadcast_input.k.strides.batch = 0;
    broadcast_input.validate().unwrap();
}

#[test]
fn sequences_are_checked() {
    let batch = |given, expected| ProblemError::DimMismatch {
        tensor: TensorName::K,
        dim: Dim::Batch,
        given,
        expected,
    };
    rejects(|s| s.seqs_k = Sequences::packed(1), batch(2, 1));
    let seqlen =
        ProblemError::DimMismatch { tensor: TensorName::Q, dim: Dim::Seqlen, given: 16, expected: 15 };
    rejects(|s| s.seqs_q = Sequences::dense(2, 15), seqlen);

    let rows = |starts: &[i32]| SequenceRows::packed(starts).unwrap();
    let packed = |q, k| ProblemSpec::packed(Dtype::F16, (4, 2), 64, q, k);
    let [q, k] = [rows(&[0, 3, 10]), rows(&[0, 0, 7])];
    let spec = packed(&q, &k);
    let problem = spec.clone().with_rows(q.clone(), k.clone()).unwrap();
    assert_eq!(problem.lengths(0), Lengths { q: 3, k: 0 });
    assert_eq!(problem.lse_shape(), [1, 4, 10]);
    assert_eq!(problem.longest(), Lengths { q: 7, k: 7 });
    let count = packed(&q, &rows(&[0, 7])).validate().unwrap_err();
    assert_eq!(count, ProblemError::SequenceCount { q: 2, k: 1 });

    // The lengths must match the problem's sequences, and lie within its tensors.
    let unknown = ProblemError::UnknownLengths { tensor: TensorName::Q };
    assert_eq!(spec.clone().known().unwrap_err(), unknown);
    let problem = spec.clone().validate().unwrap();
    for other in [rows(&[0, 7]), SequenceRows::dense(2, 7), k.clone().with_used(&[0, 6]).unwrap()] {
        let error = KnownProblem::new(problem.clone(), q.clone(), other).unwrap_err();
        assert_eq!(error, ProblemError::OtherSequences { tensor: TensorName::K });
    }
    let mut short = spec;
    short.k.shape.seqlen = 6;
    short.v.shape.seqlen = 6;
    let end = ProblemError::CuSeqlensEnd { tensor: TensorName::K, given: 7, rows: 6 };
    assert_eq!(short.with_rows(q, k).unwrap_err(), end);
}

#[test]
fn transposed_values_are_contiguous_e4m3() {
    rejects(
        |s| s.v_layout = ValueLayout::Transposed,
        ProblemError::TransposedV { dtype: Dtype::F16, packed: false },
    );
    let spec = || ProblemSpec::dense(Dtype::E4m3, Q, KV).transposed_v();
    let problem = spec().validate().unwrap();
    assert_eq!(problem.v_bytes(), Bytes(2 * 2 * 64 * 128));
    assert!(problem.to_string().contains(" v transposed "), "{problem}");
    let mut other = spec();
    other.v.strides = Strides { heads: 24 * 64, seqlen: 64, ..other.v.strides };
    let error = ProblemError::TransposedStride { dim: Dim::Seqlen, given: 64, expected: 128 };
    assert_eq!(other.validate().unwrap_err(), error);
    let rows = SequenceRows::packed(&[0, 24]).unwrap();
    let packed = ProblemSpec::packed(Dtype::E4m3, (4, 2), 64, &rows, &rows).transposed_v();
    let error = ProblemError::TransposedV { dtype: Dtype::E4m3, packed: true };
    assert_eq!(packed.validate().unwrap_err(), error);
}

#[test]
fn scales_are_of_heads_or_of_blocks_or_of_channels() {
    use Granularity::{Block, Channel, Head, Tensor};
    let spec = || ProblemSpec::dense(Dtype::E4m3, Q, KV);
    let shapes = |spec: ProblemSpec| spec.validate().unwrap().descale_shapes();
    assert_eq!(shapes(spec()), [[2, 2], [2, 2], [2, 2]].map(Vec::from));
    let long = ProblemSpec::dense(Dtype::E4m3, Shape { seqlen: 129, ..Q }, Shape { seqlen: 200, ..KV });
    assert_eq!(shapes(long.block_scales(64)), [[2, 4, 3], [2, 2, 2], [2, 2, 2]].map(Vec::from));
    let text = spec().block_scales(64).validate().unwrap().to_string();
    assert!(text.contains(" scales for 64 rows/128 rows/128 rows "), "{text}");
    assert_eq!(shapes(spec().v_channels()), [vec![2, 2], vec![2, 2], vec![2, 2, 64]]);
    let both = spec().head_dim_v(32).block_scales(128).v_channels().validate().unwrap();
    assert_eq!(both.descale_shapes(), [vec![2, 4, 1], vec![2, 2, 1], vec![2, 2, 32]]);
    assert_eq!(both.v_mean_shape(), Some([2, 2, 32]));
    assert_eq!(spec().block_scales(64).validate().unwrap().v_mean_shape(), None);
    assert!(both.to_string().contains(" scales for 128 rows/128 rows/channel "), "{both}");
    let rows = |rows| Block { rows };
    for [q, k, v] in [
        [Head, Head, rows(128)],
        [Head, Channel, Channel],
        [Channel, Head, Head],
        [rows(64), Head, Channel],
        [rows(32), rows(128), rows(128)],
        [rows(64), rows(64), rows(128)],
        [rows(64), rows(64), rows(64)],
        [Tensor, Tensor, Tensor],
    ] {
        let mut spec = spec();
        spec.scales = [q, k, v];
        assert_eq!(spec.validate().unwrap_err(), ProblemError::Granularity { q, k, v });
    }
    let mut broadcast = ProblemSpec::dense(Dtype::E4m3, Q, KV).block_scales(64);
    for x in [&mut broadcast.q, &mut broadcast.o, &mut broadcast.k, &mut broadcast.v] {
        x.shape.batch = 1 << 30;
        x.strides.batch = 0;
    }
    broadcast.o.strides.batch = 16 * 4 * 64;
    broadcast = broadcast.seqs_q(Sequences::dense(1 << 30, 16)).seqs_k(Sequences::dense(1 << 30, 24));
    let (tensor, shape) = (TensorName::Q, broadcast.q.shape);
    let many = ProblemError::TooManyScales { tensor, shape, rows: 64 };
    assert_eq!(broadcast.validate().unwrap_err(), many);
    let rows = SequenceRows::packed(&[0, 100, 100, 300]).unwrap();
    let packed = || ProblemSpec::packed(Dtype::E4m3, (4, 2), 64, &rows, &rows);
    assert_eq!(shapes(packed().block_scales(64)), [[1, 4, 8], [1, 2, 6], [1, 2, 6]].map(Vec::from));
    let error = ProblemError::FineScales { dtype: Dtype::E4m3, packed: true, cache: false };
    assert_eq!(packed().v_channels().validate().unwrap_err(), error);
    let paged = spec().seqs_k(Sequences::paged(2, 1)).block_scales(64).validate().unwrap_err();
    assert_eq!(paged, ProblemError::FineScales { dtype: Dtype::E4m3, packed: false, cache: true });
    let error = ProblemError::FineScales { dtype: Dtype::F16, packed: false, cache: false };
    assert_eq!(self::spec().block_scales(64).validate().unwrap_err(), error);
    assert_eq!(self::spec().v_channels().validate().unwrap_err(), error);
}

#[test]
fn empty_sequences_are_legal() {
    let none = Shape { seqlen: 0, ..KV };
    assert!(ProblemSpec::dense(Dtype::F16, Q, none).validate().is_ok());
    assert!(ProblemSpec::dense(Dtype::F16, Shape { seqlen: 0, ..Q }, none).validate().is_ok());
    assert!(
        ProblemSpec::dense(Dtype::F16, Shape { batch: 0, ..Q }, Shape { batch: 0, ..KV }).validate().is_ok()
    );
}

#[test]
fn stride_order_is_free() {
    let mut spec = spec();
    let heads_outside_rows = Strides { batch: 4096, heads: 1024, seqlen: 64, head_dim: 1 };
    spec.q.strides = heads_outside_rows;
    spec.o.strides = heads_outside_rows;
    assert_eq!(spec.validate().unwrap().q().strides, heads_outside_rows);
}

/// A problem may have rows of any length. Kernels need multiples of 16 bytes, which padding provides.
#[test]
fn rows_of_any_length() {
    for (head_dim, head_dim_v) in [(1, 1), (64, 33), (33, 64), (576, 512), (575, 511)] {
        for dtype in Dtype::OF_Q {
            let [q, kv] = [Q, KV].map(|shape| Shape { head_dim, ..shape });
            let spec = ProblemSpec::dense(dtype, q, kv).head_dim_v(head_dim_v);
            let problem = spec.clone().validate().unwrap();
            let multiple = dtype.row_multiple();
            // O of an e4m3 problem is bf16.
            let whole = head_dim % multiple == 0 && head_dim_v % multiple == 0;
            assert_eq!(problem.check_rows().is_ok(), whole, "{problem}");
            let padded = problem.padded();
            padded.check_rows().unwrap();
            let dims = [head_dim, head_dim_v].map(|dim| dim.next_multiple_of(multiple));
            assert_eq!([padded.head_dim(), padded.head_dim_v()], dims);
            assert_eq!(padded.o().shape.head_dim, padded.head_dim_v());
            assert_eq!(padded.softmax_scale(), problem.softmax_scale());
            if dtype != Dtype::E4m3 {
                let backward = BackwardSpec::contiguous(spec).validate().unwrap();
                assert_eq!(backward.check_rows().is_ok(), whole, "{problem}");
                backward.padded().check_rows().unwrap();
            }
        }
    }
    let mut gradients = BackwardSpec::contiguous(spec());
    gradients.dv.strides.heads += 4;
    gradients.dv.strides.seqlen *= 2;
    gradients.dv.strides.batch *= 2;
    let gradients = gradients.validate().unwrap();
    assert_eq!(gradients.forward().check_rows(), Ok(()));
    let error = gradients.check_rows().unwrap_err();
    assert!(matches!(error, ProblemError::StrideMultiple { tensor: TensorName::DV, .. }), "{error}");
}

/// The description of `qv` beside queries [`Q`].
fn qv(dtype: Dtype, head_dim: usize) -> TensorDesc {
    TensorDesc::contiguous(dtype, Shape { head_dim, ..Q })
}

#[test]
fn latent_attention_is_attention_of_joined_columns() {
    let mut strided = qv(Dtype::F16, 512);
    strided.strides = Strides { heads: 576, seqlen: 4 * 576, batch: 16 * 4 * 576, head_dim: 1 };
    let problem = spec().head_dim_v(512).qv(strided).causal().softcap(9.0).sink().validate().unwrap();
    assert_eq!(problem.qv(), Some(&strided));
    assert_eq!(problem.softmax_scale().natural(), 1.0 / 24.0);
    let text = problem.to_string();
    assert!(text.contains(" head_dim 64/512 with qv mask causal scale 0.041667 "), "{text}");
    let joined = problem.joined();
    assert!(joined.qv().is_none());
    let [q, k] = [Q, KV].map(|shape| TensorDesc::contiguous(Dtype::F16, Shape { head_dim: 576, ..shape }));
    assert_eq!((joined.q(), joined.k(), joined.v(), joined.o()), (&q, &k, problem.v(), problem.o()));
    let joined_name =
        "f16 batch 2 seqlen 16 x 24 heads 4/2 head_dim 576/512 mask causal scale 0.041667 softcap 9 sink";
    assert_eq!(joined.to_string(), joined_name);
    let known = problem.known().unwrap();
    assert_eq!(known.forward_flops(), known.joined().forward_flops());
    let scaled = spec().qv(qv(Dtype::F16, 64)).softmax_scale(0.5).validate().unwrap();
    assert_eq!(scaled.joined().softmax_scale().natural(), 0.5);
    let plain = spec().validate().unwrap();
    assert_eq!(plain.joined().to_string(), plain.to_string());
}

#[test]
fn intervals_are_of_sequences_in_16_bits() {
    let form = Intervals { of_row: crate::IntervalsOfRow::Two, per_sequence: false, per_head: true };
    let mask = Mask::of_intervals(form);
    let problem = spec().mask(mask).validate().unwrap();
    assert_eq!((problem.mask(), form.shape(Q)), (mask, [1, 4, 16, 4]));
    assert_eq!(problem.known().unwrap_err(), ProblemError::UnknownIntervals);
    let count = ProblemError::IntervalsCount { given: 1, expected: 256 };
    assert_eq!(problem.known_intervals([0]).unwrap_err(), count);
    let known = problem.known_intervals([3, 5, 7, i32::MAX].repeat(64)).unwrap();
    let seen: Vec<usize> = (0..30).filter(|&key| known.allows([1, 3, 15], key)).collect();
    assert_eq!(seen, [[3, 4].as_slice(), &Vec::from_iter(7..24)].concat());
    assert!(!known.allows([1, 3, 16], 4));
    assert_eq!(known.forward_flops(), (2 * (64 + 64) * 2 * 4 * 16 * 19) as f64);
    // Row 3 has the position of key 11.
    let causal =
        spec().mask(mask).causal().validate().unwrap().known_intervals([3, 5, 7, 20].repeat(64)).unwrap();
    let seen: Vec<usize> = (0..30).filter(|&key| causal.allows([1, 3, 3], key)).collect();
    assert_eq!(
        (seen, causal.intervals_of_row([1, 3, 3])),
        (vec![3, 4, 7, 8, 9, 10, 11], Some(vec![3..5, 7..12]))
    );
    // Keys are counted in the sequence. The sequence's intervals lie at its rows of Q.
    let (rows_q, rows_k) =
        (SequenceRows::packed(&[0, 1, 3]).unwrap(), SequenceRows::packed(&[0, 5, 9]).unwrap());
    let packed = ProblemSpec::packed(Dtype::F16, (4, 2), 64, &rows_q, &rows_k).mask(mask);
    let bounds = [[0, 9, 1, 1], [0, 0, 0, 0], [1, 2, 3, 9]].concat().repeat(4);
    let packed = packed.validate().unwrap();
    assert_eq!(
        packed.known_intervals(bounds.clone()).unwrap_err(),
        ProblemError::UnknownLengths { tensor: TensorName::Q }
    );
    let packed = KnownProblem::with_intervals(packed, rows_q, rows_k, bounds).unwrap();
    let seen = |at| (0..9).filter(|&key| packed.allows(at, key)).collect::<Vec<_>>();
    assert_eq!(seen([0, 3, 0]), [0, 1, 2, 3, 4]);
    assert_eq!([seen([1, 0, 0]), seen([1, 0, 1]), seen([1, 0, 2])], [vec![], vec![1, 3], vec![]]);
    // The tensor may say which sequences have a causal mask.
    let causal = |sequences| spec().mask(Mask::of_intervals(Intervals::of_causal(sequences))).validate();
    let known = causal(2).unwrap().known_intervals([0, -1]).unwrap();
    let seen = |sequence, row| (0..30).filter(|&key| known.allows([sequence, 1, row], key)).count();
    assert_eq!([seen(0, 3), seen(1, 3), seen(1, 15), seen(1, 16)], [24, 12, 24, 0]);
    assert_eq!(Intervals::of_shape([2, 1, 1, 1], Q), Ok(Intervals::of_causal(2)));
    for given in [0, 3] {
        assert_eq!(causal(given).unwrap_err(), ProblemError::CausalCount { given, sequences: 2 });
    }
    // Or which new keys a row sees. 24 keys are 8 old ones and 16 new ones.
    let form = Intervals::of_shape([2, 16, 2, 1], Q).unwrap();
    assert_eq!((form, form.shape(Q)), (Intervals::of_tree(2), [2, 16, 2, 1]));
    let tree = spec().mask(Mask::of_intervals(form)).validate().unwrap();
    assert!(tree.features().any(|feature| feature == Feature::Tree));
    let known = tree.known_intervals([0b1_1000_0000_0000_1001, -1].repeat(32)).unwrap();
    assert_eq!(known.intervals_of_row([1, 3, 2]), Some(vec![0..8, 8..9, 11..12, 23..24]));
    let seen: Vec<usize> = (0..30).filter(|&key| known.allows([1, 3, 2], key)).collect();
    assert_eq!(seen, [&Vec::from_iter(0..9)[..], &[11, 23]].concat());
    // Or which blocks of keys a block of rows sees.
    let (q, kv) = (Shape { seqlen: 130, ..Q }, Shape { seqlen: 300, ..KV });
    let mask = Mask::of_intervals(Intervals::of_shape([2, 1, 2, 3], q).unwrap());
    let blocks = ProblemSpec::dense(Dtype::F16, q, kv).mask(mask).validate().unwrap();
    assert!(blocks.features().any(|feature| feature == Feature::Blocks));
    let known = blocks.known_intervals([0b101, -1, -1, 0, 0, 0].repeat(2)).unwrap();
    assert_eq!(known.intervals_of_row([1, 3, 127]), Some(vec![0..128, 256..300]));
    assert_eq!(known.intervals_of_row([0, 0, 128]), Some(vec![]));
    let rows = SequenceRows::packed_lengths(&[130]);
    let packed = ProblemSpec::packed(Dtype::F16, (4, 2), 64, &rows, &rows).seqs_q(rows.sequences());
    let packed = packed.seqs_k(rows.sequences()).mask(mask).validate();
    assert_eq!(packed.unwrap_err(), ProblemError::BlocksPacked);
    let none = spec().validate().unwrap().known_intervals([]);
    assert_eq!(none.unwrap_err(), ProblemError::NoIntervals { mask: Mask::None });

    let refused = |change: fn(ProblemSpec) -> ProblemSpec, expected| {
        assert_eq!(change(spec().mask(mask)).validate().unwrap_err(), expected);
    };
    refused(ProblemSpec::e4m3_keys, ProblemError::IntervalsDtype { given: Dtype::E4m3 });
    refused(|spec| spec.seqs_k(Sequences::listed(2, 9)), ProblemError::ListsAndMask { mask });
    refused(|spec| spec.qv(TensorDesc::contiguous(Dtype::F16, Q)), ProblemError::IntervalsLatent);
}

#[test]
fn qv_has_the_shape_of_o_and_the_type_of_q() {
    use Dim::{Batch, HeadDim, Heads, Seqlen};
    let refused = |spec: ProblemSpec| spec.validate().unwrap_err();
    let of_shape = |shape| refused(spec().head_dim_v(128).qv(TensorDesc::contiguous(Dtype::F16, shape)));
    let right = Shape { head_dim: 128, ..Q };
    let tensor = TensorName::Qv;
    for (shape, dim, given, expected) in [
        (Shape { batch: 3, ..right }, Batch, 3, 2),
        (Shape { seqlen: 24, ..right }, Seqlen, 24, 16),
        (Shape { heads: 2, ..right }, Heads, 2, 4),
        (Shape { head_dim: 64, ..right }, HeadDim, 64, 128),
    ] {
        assert_eq!(of_shape(shape), ProblemError::DimMismatch { tensor, dim, given, expected });
    }
    let dtype = ProblemError::DtypeMismatch { tensor, given: Dtype::Bf16, expected: Dtype::F16 };
    assert_eq!(refused(spec().qv(qv(Dtype::Bf16, 64))), dtype);
    let mut backwards = qv(Dtype::F16, 64);
    backwards.strides.seqlen = -64;
    let negative = ProblemError::NegativeStride { tensor, dim: Seqlen, given: -64 };
    assert_eq!(refused(spec().qv(backwards)), negative);
    // Joined rows of K and V may be no longer than the longest row of K.
    let wide = |shape| Shape { head_dim: 72, ..shape };
    let together = ProblemSpec::dense(Dtype::F16, wide(Q), wide(KV)).head_dim_v(512).qv(qv(Dtype::F16, 512));
    assert_eq!(refused(together), ProblemError::LatentHeadDim { head_dim: 72, head_dim_v: 512, limit: 576 });
    let codes = ProblemError::LatentDtype { given: Dtype::E4m3 };
    assert!(spec().e4m3_keys().qv(qv(Dtype::F16, 64)).validate().is_ok());
    assert_eq!(refused(ProblemSpec::dense(Dtype::E4m3, Q, KV).qv(qv(Dtype::E4m3, 64))), codes);
    let gradients = BackwardSpec::contiguous(spec().qv(qv(Dtype::F16, 64))).validate().unwrap_err();
    assert_eq!(gradients, ProblemError::NoGradients { feature: Feature::Qv });
}

#[test]
fn rows_of_qv_are_padded_as_those_of_v() {
    let narrow = spec().head_dim_v(36).qv(qv(Dtype::F16, 36)).validate().unwrap();
    let error = |tensor| ProblemError::HeadDimMultiple { tensor, given: 36, multiple: 8, dtype: Dtype::F16 };
    assert_eq!(narrow.check_rows().unwrap_err(), error(TensorName::V));
    assert_eq!(narrow.padded().qv(), Some(&qv(Dtype::F16, 40)));
    assert_eq!(narrow.padded().softmax_scale().natural(), 0.1);
    let mut odd = qv(Dtype::F16, 64);
    odd.strides.seqlen += 4;
    odd.strides.batch *= 2;
    let (tensor, given) = (TensorName::Qv, 4 * 64 + 4);
    let stride = ProblemError::StrideMultiple { tensor, dim: Dim::Seqlen, given, multiple: 8 };
    assert_eq!(spec().qv(odd).validate().unwrap().check_rows(), Err(stride));
}
