//! The reduction of partial results of attention (split-KV), validated.

use std::fmt;

use crate::{Dim, Dtype, Partials, ProblemError, Shape, TensorDesc, TensorName};

/// The largest head dimension of a reduction.
const HEAD_DIM_LIMIT: usize = 512;

/// A caller's request, not yet checked: plain data that [`CombineProblem::new`] takes.
///
/// ```text
/// LSE = ln Σ_s exp(LSE_s)        O = Σ_s exp(LSE_s - LSE) O_s        s over the parts
/// ```
///
/// O_s and LSE_s are attention of the same rows over disjoint sets of keys. A part with LSE_s = -inf has seen no key,
/// and its O_s counts for nothing, even NaN. If no part has seen a key, O is 0 and LSE is -inf.
///
/// An LSE is a tensor (batch, seqlen, heads, 1) with any strides.
///
/// ```
/// use fa3_types::{CombineSpec, Dtype, Shape};
///
/// // A packed tensor has batch 1.
/// let shape = Shape { batch: 1, seqlen: 1000, heads: 8, head_dim: 128 };
/// let problem = CombineSpec::contiguous(Dtype::F32, Dtype::Bf16, 3, shape).validate()?;
/// assert_eq!(problem.to_string(), "f32 (3, 1, 1000, 8, 128) to bf16");
/// # Ok::<(), fa3_types::CombineProblemError>(())
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct CombineSpec {
    /// O of each part, f32, f16 or bf16.
    pub out_partial: Partials,
    /// LSE of each part, f32, natural logarithms, with rows of one element.
    pub lse_partial: Partials,
    /// O, f32, f16 or bf16.
    pub o: TensorDesc,
    /// LSE, f32, with rows of one element.
    pub lse: TensorDesc,
}

impl CombineSpec {
    /// A reduction of these parts into these tensors.
    pub fn new(out_partial: Partials, lse_partial: Partials, o: TensorDesc, lse: TensorDesc) -> CombineSpec {
        CombineSpec { out_partial, lse_partial, o, lse }
    }

    /// A reduction of contiguous tensors: `splits` parts of this type and shape into O of type `output`.
    pub fn contiguous(dtype: Dtype, output: Dtype, splits: usize, shape: Shape) -> CombineSpec {
        let of_lse = Shape { head_dim: 1, ..shape };
        let partial = |dtype, shape| Partials::contiguous(dtype, splits, shape);
        let [o, lse] = [(output, shape), (Dtype::F32, of_lse)]
            .map(|(dtype, shape)| TensorDesc::contiguous(dtype, shape));
        CombineSpec::new(partial(dtype, shape), partial(Dtype::F32, of_lse), o, lse)
    }

    /// Calls [`CombineProblem::new`].
    ///
    /// # Errors
    /// [`CombineProblemError`].
    pub fn validate(self) -> Result<CombineProblem, CombineProblemError> {
        CombineProblem::new(self)
    }
}

/// Everything that [`CombineProblem::new`] rejects. One sentence each, with the offending numbers.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub enum CombineProblemError {
    #[error(transparent)]
    Tensor(#[from] ProblemError),
    #[error("{tensor} is {given}, expected f32, f16 or bf16")]
    Dtype { tensor: TensorName, given: Dtype },
    #[error("{tensor} is {given}, expected f32")]
    LseDtype { tensor: TensorName, given: Dtype },
    #[error("out_partial has head_dim {given}, more than {HEAD_DIM_LIMIT}")]
    HeadDim { given: usize },
}

/// A reduction that can be computed: shapes agree, strides are usable. Later layers check none of this again.
#[derive(Clone, Copy, Debug)]
pub struct CombineProblem(CombineSpec);

impl CombineProblem {
    /// Validates `spec`.
    ///
    /// # Errors
    /// The first violation found, with its numbers: see [`CombineProblemError`].
    pub fn new(spec: CombineSpec) -> Result<CombineProblem, CombineProblemError> {
        let CombineSpec { out_partial, lse_partial, o, lse } = spec;
        for (tensor, given) in [(TensorName::OutPartial, out_partial.first.dtype), (TensorName::O, o.dtype)] {
            if !matches!(given, Dtype::F32 | Dtype::F16 | Dtype::Bf16) {
                return Err(CombineProblemError::Dtype { tensor, given });
            }
        }
        for (tensor, given) in
            [(TensorName::LsePartial, lse_partial.first.dtype), (TensorName::Lse, lse.dtype)]
        {
            if given != Dtype::F32 {
                return Err(CombineProblemError::LseDtype { tensor, given });
            }
        }
        out_partial.check(TensorName::OutPartial)?;
        lse_partial.check(TensorName::LsePartial)?;
        o.check(TensorName::O)?;
        lse.check(TensorName::Lse)?;
        let shape = out_partial.first.shape;
        if shape.head_dim > HEAD_DIM_LIMIT {
            return Err(CombineProblemError::HeadDim { given: shape.head_dim });
        }
        let of_lse = Shape { head_dim: 1, ..shape };
        lse_partial.first.shape.check(TensorName::LsePartial, of_lse)?;
        if lse_partial.splits != out_partial.splits {
            let (tensor, dim) = (TensorName::LsePartial, Dim::Splits);
            let (given, expected) = (lse_partial.splits, out_partial.splits);
            return Err(ProblemError::DimMismatch { tensor, dim, given, expected }.into());
        }
        o.shape.check(TensorName::O, shape)?;
        lse.shape.check(TensorName::Lse, of_lse)?;
        out_partial.check_rows(TensorName::OutPartial)?;
        o.check_rows(TensorName::O)?;
        o.check_distinct(TensorName::O)?;
        lse.check_distinct(TensorName::Lse)?;
        let [out_partial, lse_partial] = [out_partial, lse_partial].map(Partials::canonical);
        let [o, lse] = [o, lse].map(TensorDesc::canonical);
        Ok(CombineProblem(CombineSpec { out_partial, lse_partial, o, lse }))
    }

    /// Number of parts.
    pub fn splits(&self) -> usize {
        self.0.out_partial.splits
    }

    /// (batch, seqlen, heads, head_dim) of O and of each part.
    pub fn shape(&self) -> Shape {
        self.0.o.shape
    }

    /// O of each part.
    pub fn out_partial(&self) -> &Partials {
        &self.0.out_partial
    }

    /// LSE of each part, with rows of one element.
    pub fn lse_partial(&self) -> &Partials {
        &self.0.lse_partial
    }

    /// O.
    pub fn o(&self) -> &TensorDesc {
        &self.0.o
    }

    /// LSE, with rows of one element.
    pub fn lse(&self) -> &TensorDesc {
        &self.0.lse
    }
}

impl fmt::Display for CombineProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to {}", self.out_partial(), self.o().dtype)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape { batch: 2, seqlen: 5, heads: 3, head_dim: 96 };

    fn spec() -> CombineSpec {
        CombineSpec::contiguous(Dtype::F32, Dtype::Bf16, 4, SHAPE)
    }

    fn refused(spec: CombineSpec) -> CombineProblemError {
        spec.validate().unwrap_err()
    }

    #[test]
    fn parts_lie_behind_one_another_or_between_rows() {
        let problem = spec().validate().unwrap();
        assert_eq!((problem.splits(), problem.shape()), (4, SHAPE));
        assert_eq!(problem.out_partial().extent(), crate::Elems(4 * 2 * 5 * 3 * 96));
        assert_eq!(problem.lse_partial().offset(3, [1, 4, 2, 0]), crate::Elems(4 * 2 * 5 * 3 - 1));
        // (batch, seqlen, heads, num_splits, head_dim) in memory.
        let mut inside = spec();
        let strides = &mut inside.out_partial.first.strides;
        (strides.heads, strides.seqlen, strides.batch) = (4 * 96, 3 * 4 * 96, 5 * 3 * 4 * 96);
        inside.out_partial.stride = 96;
        let problem = inside.validate().unwrap();
        assert_eq!(problem.out_partial().extent(), crate::Elems(4 * 2 * 5 * 3 * 96));
        assert_eq!(problem.out_partial().offset(1, [0, 0, 1, 5]), crate::Elems(4 * 96 + 96 + 5));
    }

    #[test]
    fn strides_without_a_meaning_are_usual_ones() {
        let mut one = CombineSpec::contiguous(Dtype::F16, Dtype::F16, 1, SHAPE);
        (one.out_partial.stride, one.lse_partial.stride) = (-7, 3);
        let problem = one.validate().unwrap();
        assert_eq!(problem.out_partial().stride, 2 * 5 * 3 * 96);
        assert_eq!(problem.lse_partial().stride, 2 * 5 * 3);
        let mut none = CombineSpec::contiguous(Dtype::F16, Dtype::F16, 3, Shape { seqlen: 0, ..SHAPE });
        none.out_partial.stride = 5;
        let problem = none.validate().unwrap();
        assert_eq!((problem.out_partial().stride, problem.out_partial().extent()), (0, crate::Elems(0)));
    }

    #[test]
    fn any_strides_of_lse_will_do() {
        let mut transposed = spec();
        for strides in [&mut transposed.lse_partial.first.strides, &mut transposed.lse.strides] {
            (strides.batch, strides.heads, strides.seqlen) = (15, 5, 1);
        }
        // The splits of an LSE may share memory.
        transposed.lse_partial.stride = 0;
        assert!(transposed.validate().is_ok());
        transposed.lse.strides.heads = 1;
        let error = ProblemError::OutputOverlapsItself {
            tensor: TensorName::Lse,
            dim: Dim::Heads,
            given: 1,
            needed: 5,
        };
        assert_eq!(refused(transposed), error.into());
    }

    #[test]
    fn bad_requests_are_refused() {
        let with = |change: fn(&mut CombineSpec)| {
            let mut spec = spec();
            change(&mut spec);
            refused(spec)
        };
        let tensor = TensorName::OutPartial;
        let given = Dtype::E4m3;
        let e4m3 = with(|spec| spec.out_partial.first.dtype = Dtype::E4m3);
        assert_eq!(e4m3, CombineProblemError::Dtype { tensor, given });
        let e4m3 = with(|spec| spec.o.dtype = Dtype::E4m3);
        assert_eq!(e4m3, CombineProblemError::Dtype { tensor: TensorName::O, given });
        let (tensor, given) = (TensorName::LsePartial, Dtype::F16);
        let of_16_bits = with(|spec| spec.lse_partial.first.dtype = Dtype::F16);
        assert_eq!(of_16_bits, CombineProblemError::LseDtype { tensor, given });
        let wide = CombineSpec::contiguous(Dtype::F32, Dtype::F32, 1, Shape { head_dim: 516, ..SHAPE });
        assert_eq!(refused(wide), CombineProblemError::HeadDim { given: 516 });
        let sentences = [
            with(|spec| spec.out_partial.splits = 0),
            with(|spec| spec.lse_partial.splits = 5),
            with(|spec| spec.lse_partial.first.shape.head_dim = 2),
            with(|spec| spec.lse.shape.seqlen = 6),
            with(|spec| spec.o.shape.head_dim = 88),
            with(|spec| spec.out_partial.stride = -4),
            with(|spec| spec.out_partial.stride = 4098),
            with(|spec| spec.out_partial.splits = 1 << 31),
        ];
        assert_eq!(
            sentences.map(|error| error.to_string()),
            [
                "out_partial has num_splits 0",
                "lse_partial has num_splits 5, expected 4",
                "lse_partial has head_dim 2, expected 1",
                "lse has seqlen 6, expected 5",
                "o has head_dim 88, expected 96",
                "out_partial has stride -4 in num_splits, which is negative",
                "out_partial has stride 4098 in num_splits, not a multiple of 4 elements (16 bytes)",
                "out_partial has num_splits 2147483648, more than 2147483647",
            ]
        );
    }

    #[test]
    fn rows_are_whole_chunks() {
        let of = |input, output, head_dim| {
            CombineSpec::contiguous(input, output, 2, Shape { head_dim, ..SHAPE }).validate()
        };
        assert!(of(Dtype::F32, Dtype::F32, 12).is_ok() && of(Dtype::F32, Dtype::Bf16, 8).is_ok());
        for (input, output, tensor, dtype) in [
            (Dtype::F16, Dtype::F32, TensorName::OutPartial, Dtype::F16),
            (Dtype::F32, Dtype::F16, TensorName::O, Dtype::F16),
        ] {
            let error = ProblemError::HeadDimMultiple { tensor, given: 12, multiple: 8, dtype };
            assert_eq!(of(input, output, 12).unwrap_err(), error.into());
        }
    }

    #[test]
    fn parts_past_2_to_the_63_bytes_are_refused() {
        let shape = Shape { batch: 1 << 14, seqlen: 1 << 14, heads: 1, head_dim: 512 };
        let (splits, tensor) = (1 << 24, TensorName::OutPartial);
        let many = |splits| CombineSpec::contiguous(Dtype::F32, Dtype::F16, splits, shape);
        assert!(many(splits / 2).validate().is_ok());
        let error = CombineProblemError::from(ProblemError::TooManyParts { tensor, splits, shape });
        assert_eq!(refused(many(splits)), error);
        // Splits that share memory have the same number of elements and fewer bytes.
        let mut same = many(splits);
        same.out_partial.stride = 0;
        assert_eq!(refused(same), error);
    }
}
