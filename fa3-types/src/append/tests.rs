use super::*;
use crate::Dim;

const NEW: Shape = Shape { batch: 3, seqlen: 2, heads: 4, head_dim: 64 };
const CACHE: Shape = Shape { batch: 9, seqlen: 16, ..NEW };
const ROTARY: AppendRotary = AppendRotary {
    style: RopeStyle::HalfSplit,
    rotary_dim: 32,
    table: Dtype::F32,
    table_rows: 100,
    base: SequenceBase::Used,
};

fn tensor(shape: Shape) -> TensorDesc {
    TensorDesc::contiguous(Dtype::F16, shape)
}

fn rows() -> AppendedRows {
    AppendedRows {
        k_new: tensor(NEW),
        v_new: tensor(Shape { head_dim: 32, ..NEW }),
        new: Sequences::dense(3, 2),
        k_cache: tensor(CACHE),
        v_cache: tensor(Shape { head_dim: 32, ..CACHE }),
        cache: Sequences::paged(3, 5).used(),
    }
}

fn queries() -> RotatedQueries {
    let q = tensor(Shape { batch: 1, seqlen: 7, heads: 8, ..NEW });
    RotatedQueries { q, sequences: Sequences::packed(3), positions: QueryPositions::Each }
}

fn refused(spec: AppendSpec) -> AppendProblemError {
    spec.validate().unwrap_err()
}

#[test]
fn a_problem_says_what_it_reads() {
    let appended = AppendSpec::new(rows()).validate().unwrap();
    assert_eq!((appended.count(), appended.capacity(), appended.dtype()), (3, 80, Dtype::F16));
    assert!(appended.reads_used() && appended.q_rotated().is_none());
    assert_eq!(appended.to_string(), "f16 (3, 2, 4, 64) and 32 to sequences of 5 pages of 16 rows");

    let both = AppendSpec::new(rows()).rotary(ROTARY).queries(queries()).validate().unwrap();
    assert_eq!(both.q_rotated().unwrap(), queries().q);
    let text = "f16 (3, 2, 4, 64) and 32 to sequences of 5 pages of 16 rows, q packed (1, 7, 8, 64), \
                half-split rotary embedding of 32 by f32";
    assert_eq!(both.to_string(), text);

    let alone = AppendSpec::of_queries(queries(), ROTARY).validate().unwrap();
    assert_eq!((alone.count(), alone.capacity(), alone.reads_used()), (3, 0, true));
    let listed = AppendRotary { base: SequenceBase::Listed, ..ROTARY };
    assert!(!AppendSpec::of_queries(queries(), listed).validate().unwrap().reads_used());
}

#[test]
fn queries_have_one_position_where_they_see_the_same_keys() {
    assert_eq!(QueryPositions::under(Mask::None), QueryPositions::First);
    for mask in [Mask::Causal, Mask::window(Some(3), None)] {
        assert_eq!(QueryPositions::under(mask), QueryPositions::Each);
    }
}

#[test]
fn a_cache_may_be_dense_or_padded() {
    let dense = AppendedRows { cache: Sequences::dense(9, 16).used(), ..rows() };
    let count = AppendProblemError::Count { tensor: TensorName::KNew, given: 3, expected: 9 };
    assert_eq!(refused(AppendSpec::new(dense)), count);
    let new = tensor(Shape { batch: 9, ..NEW });
    let nine = AppendedRows { k_new: new, v_new: new, new: Sequences::dense(9, 2), ..dense };
    let nine = AppendedRows { v_cache: tensor(CACHE), ..nine };
    assert_eq!(AppendSpec::new(nine).validate().unwrap().capacity(), 16);
    let padded = AppendedRows { cache: nine.cache.left_padded(), ..nine };
    assert!(AppendSpec::new(padded).validate().is_ok());
}

#[test]
fn a_cache_may_be_of_e4m3() {
    let codes = |x: TensorDesc| TensorDesc::contiguous(Dtype::E4m3, x.shape);
    let of_e4m3 = AppendedRows { k_cache: codes(rows().k_cache), v_cache: codes(rows().v_cache), ..rows() };
    let problem = AppendSpec::new(of_e4m3).rotary(ROTARY).validate().unwrap();
    assert_eq!((problem.dtype(), problem.descale_shape()), (Dtype::F16, Some([3, 4])));
    assert!(problem.to_string().contains("pages of 16 rows of e4m3, half-split"), "{problem}");
    assert!(!AppendSpec::new(rows()).validate().unwrap().quantizes());
    let all = AppendedRows { k_new: codes(of_e4m3.k_new), v_new: codes(of_e4m3.v_new), ..of_e4m3 };
    let copied = AppendSpec::new(all).validate().unwrap();
    assert_eq!((copied.dtype(), copied.descale_shape()), (Dtype::E4m3, None));
    let rotated = AppendProblemError::RotatedDtype { given: Dtype::E4m3 };
    assert_eq!(refused(AppendSpec::new(all).rotary(ROTARY)), rotated);
    assert_eq!(refused(AppendSpec::new(all).rotary(ROTARY).queries(queries())), rotated);
    let codes_of_q = RotatedQueries { q: codes(queries().q), ..queries() };
    assert_eq!(refused(AppendSpec::of_queries(codes_of_q, ROTARY)), rotated);
    let mismatch = |tensor, given, expected| AppendProblemError::DtypeMismatch { tensor, given, expected };
    let values = AppendedRows { v_cache: rows().v_cache, ..of_e4m3 };
    assert_eq!(refused(AppendSpec::new(values)), mismatch(TensorName::VCache, Dtype::F16, Dtype::E4m3));
    let cache = AppendedRows { k_cache: rows().k_cache, v_cache: rows().v_cache, ..all };
    assert_eq!(refused(AppendSpec::new(cache)), mismatch(TensorName::KCache, Dtype::F16, Dtype::E4m3));
}

#[test]
fn bad_rows_are_refused() {
    let of = |rows: AppendedRows| refused(AppendSpec::new(rows));
    assert_eq!(of(AppendedRows { cache: Sequences::paged(3, 5), ..rows() }), AppendProblemError::Unused);
    let packed = AppendedRows { cache: Sequences::packed(3).used(), ..rows() };
    assert_eq!(of(packed), AppendProblemError::PackedCache);
    let listed = AppendedRows { cache: Sequences::listed(3, 5).used(), ..rows() };
    assert_eq!(of(listed), AppendProblemError::ListedCache);
    for new in [Sequences::dense(3, 2).used(), Sequences::dense(3, 2).left_padded(), Sequences::paged(3, 1)] {
        assert_eq!(of(AppendedRows { new, ..rows() }), AppendProblemError::NewRows);
    }
    let f32s = AppendedRows { k_new: TensorDesc::contiguous(Dtype::F32, NEW), ..rows() };
    let (tensor, given, expected) = (TensorName::VNew, Dtype::F16, Dtype::F32);
    assert_eq!(of(f32s), AppendProblemError::DtypeMismatch { tensor, given, expected });
    let codes = AppendedRows { k_cache: TensorDesc::contiguous(Dtype::E4m3, CACHE), ..f32s };
    assert_eq!(of(codes), AppendProblemError::Dtype { tensor: TensorName::KNew, given: Dtype::F32 });
    let cache = AppendedRows { k_cache: TensorDesc::contiguous(Dtype::Bf16, CACHE), ..rows() };
    let (tensor, given, expected) = (TensorName::KCache, Dtype::Bf16, Dtype::F16);
    assert_eq!(of(cache), AppendProblemError::DtypeMismatch { tensor, given, expected });
    let mismatch = |tensor, dim, given, expected| {
        AppendProblemError::from(ProblemError::DimMismatch { tensor, dim, given, expected })
    };
    let heads = AppendedRows { v_new: self::tensor(Shape { heads: 2, head_dim: 32, ..NEW }), ..rows() };
    assert_eq!(of(heads), mismatch(TensorName::VNew, Dim::Heads, 2, 4));
    let entries = AppendedRows { v_cache: self::tensor(Shape { batch: 8, head_dim: 32, ..CACHE }), ..rows() };
    assert_eq!(of(entries), mismatch(TensorName::VCache, Dim::Batch, 8, 9));
    let dims = AppendedRows { k_cache: self::tensor(Shape { head_dim: 72, ..CACHE }), ..rows() };
    assert_eq!(of(dims), mismatch(TensorName::KCache, Dim::HeadDim, 72, 64));
    let longer = AppendedRows { new: Sequences::dense(3, 3), ..rows() };
    assert_eq!(of(longer), mismatch(TensorName::KNew, Dim::Seqlen, 2, 3));
    let mut same = rows();
    same.v_cache.strides.batch = 0;
    let (tensor, dim) = (TensorName::VCache, Dim::Batch);
    let overlaps = ProblemError::OutputOverlapsItself { tensor, dim, given: 0, needed: 32 };
    assert_eq!(of(same), overlaps.into());
    let mut odd = rows();
    odd.k_cache.strides.seqlen += 4;
    assert!(matches!(of(odd), AppendProblemError::Tensor(ProblemError::StrideMultiple { .. })));
    let pages = AppendedRows { cache: Sequences::paged(3, 1 << 28).used(), ..rows() };
    assert!(matches!(of(pages), AppendProblemError::Tensor(ProblemError::PagesTooMany { .. })));
    let paged = Sequences::paged(3, 4).used();
    for cache in
        [paged.table_stride(1 << 31), paged.table_stride(1 << 30), Sequences::indexed(3, [1 << 31, 0])]
    {
        let pages = AppendedRows { cache: cache.used(), ..rows() };
        assert!(matches!(of(pages), AppendProblemError::Tensor(ProblemError::TableTooLarge { .. })));
    }
}

#[test]
fn bad_rotations_and_queries_are_refused() {
    let with = |rotary: AppendRotary| refused(AppendSpec::new(rows()).rotary(rotary));
    for given in [0, 24, 80] {
        let error = AppendProblemError::RotaryDim { given, head_dim: 64 };
        assert_eq!(with(AppendRotary { rotary_dim: given, ..ROTARY }), error);
    }
    let (given, expected) = (Dtype::Bf16, Dtype::F16);
    assert_eq!(
        with(AppendRotary { table: given, ..ROTARY }),
        AppendProblemError::TableDtype { given, expected }
    );
    let limit = i32::MAX as usize;
    for given in [0, limit + 1] {
        let error = AppendProblemError::TableRows { given, limit };
        assert_eq!(with(AppendRotary { table_rows: given, ..ROTARY }), error);
    }
    let nothing = AppendSpec { rows: None, ..AppendSpec::new(rows()) };
    assert_eq!(refused(nothing), AppendProblemError::Nothing);
    let plain = AppendSpec::new(rows()).queries(queries());
    assert_eq!(refused(plain), AppendProblemError::QueriesWithoutRotary);
    let of = |queries: RotatedQueries| refused(AppendSpec::new(rows()).rotary(ROTARY).queries(queries));
    let count = AppendProblemError::Count { tensor: TensorName::Q, given: 2, expected: 3 };
    assert_eq!(of(RotatedQueries { sequences: Sequences::packed(2), ..queries() }), count);
    let paged = RotatedQueries { sequences: Sequences::paged(3, 2), ..queries() };
    assert_eq!(of(paged), ProblemError::CachedQueries.into());
    let narrow = RotatedQueries { q: tensor(Shape { head_dim: 32, ..queries().q.shape }), ..queries() };
    let (tensor, dim) = (TensorName::Q, Dim::HeadDim);
    assert_eq!(of(narrow), ProblemError::DimMismatch { tensor, dim, given: 32, expected: 64 }.into());
}
