//! Partial results of attention on their way to the whole: what is merged, validated.

use std::fmt;

use crate::{Dim, Dtype, Partials, ProblemError, Shape, TensorDesc, TensorName};

/// The largest head dimension that is merged.
const HEAD_DIM_LIMIT: usize = 512;

/// A caller's request, not yet checked: plain data that [`CombineProblem::new`] takes.
///
/// ```text
/// LSE = ln Σ_s exp(LSE_s)        O = Σ_s exp(LSE_s - LSE) O_s        s over the parts
/// ```
///
/// O_s and LSE_s are attention of the same rows over disjoint sets of keys. A part whose LSE_s is -inf has seen no key,
/// and its O_s counts for nothing, even NaN. If no part has seen any, O is 0 and LSE is -inf.
///
/// A row of an LSE has one element: it is a tensor (batch, seqlen, heads, 1) of any strides.
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
    pub out: TensorDesc,
    /// LSE, f32, with rows of one element.
    pub lse: TensorDesc,
}

impl CombineSpec {
    /// A merge of these parts into these tensors.
    pub fn new(
        out_partial: Partials,
        lse_partial: Partials,
        out: TensorDesc,
        lse: TensorDesc,
    ) -> CombineSpec {
        CombineSpec { out_partial, lse_partial, out, lse }
    }

    /// A merge of contiguous tensors: so many parts of this type and shape into O of type `output`.
    pub fn contiguous(dtype: Dtype, output: Dtype, splits: usize, shape: Shape) -> CombineSpec {
        let of_lse = Shape { head_dim: 1, ..shape };
        let partial = |dtype, shape| Partials::contiguous(dtype, splits, shape);
        let [out, lse] = [(output, shape), (Dtype::F32, of_lse)]
            .map(|(dtype, shape)| TensorDesc::contiguous(dtype, shape));
        CombineSpec::new(partial(dtype, shape), partial(Dtype::F32, of_lse), out, lse)
    }

    /// [`CombineProblem::new`].
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

/// A merge that can be computed: shapes agree, strides are usable. Later layers check nothing of this again.
#[derive(Clone, Copy, Debug)]
pub struct CombineProblem(CombineSpec);

impl CombineProblem {
    /// Validates `spec`.
    ///
    /// # Errors
    /// The first violation found, with its numbers: see [`CombineProblemError`].
    pub fn new(spec: CombineSpec) -> Result<CombineProblem, CombineProblemError> {
        let CombineSpec { out_partial, lse_partial, out, lse } = spec;
        for (tensor, given) in [(TensorName::OutPartial, out_partial.first.dtype), (TensorName::O, out.dtype)]
        {
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
        out.check(TensorName::O)?;
        lse.check(TensorName::Lse)?;
        let shape = out_partial.first.shape;
        if shape.head_dim > HEAD_DIM_LIMIT {
            return Err(CombineProblemError::HeadDim { given: shape.head_dim });
        }
        let of_lse = Shape { head_dim: 1, ..shape };
        same_shape(TensorName::LsePartial, lse_partial.first.shape, of_lse)?;
        same_extent(TensorName::LsePartial, Dim::Splits, lse_partial.splits, out_partial.splits)?;
        same_shape(TensorName::O, out.shape, shape)?;
        same_shape(TensorName::Lse, lse.shape, of_lse)?;
        out_partial.check_rows(TensorName::OutPartial)?;
        out.check_rows(TensorName::O)?;
        out.check_distinct(TensorName::O)?;
        lse.check_distinct(TensorName::Lse)?;
        let [out_partial, lse_partial] = [out_partial, lse_partial].map(Partials::canonical);
        let [out, lse] = [out, lse].map(TensorDesc::canonical);
        Ok(CombineProblem(CombineSpec { out_partial, lse_partial, out, lse }))
    }

    /// Parts.
    pub fn splits(&self) -> usize {
        self.0.out_partial.splits
    }

    /// (batch, seqlen, heads, head_dim) of O and of each part.
    pub fn shape(&self) -> Shape {
        self.0.out.shape
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
    pub fn out(&self) -> &TensorDesc {
        &self.0.out
    }

    /// LSE, with rows of one element.
    pub fn lse(&self) -> &TensorDesc {
        &self.0.lse
    }
}

fn same_shape(tensor: TensorName, given: Shape, expected: Shape) -> Result<(), ProblemError> {
    let dims = [Dim::Batch, Dim::Seqlen, Dim::Heads, Dim::HeadDim];
    let mut extents = dims.into_iter().zip(given.dims()).zip(expected.dims());
    extents.try_for_each(|((dim, given), expected)| same_extent(tensor, dim, given, expected))
}

fn same_extent(tensor: TensorName, dim: Dim, given: usize, expected: usize) -> Result<(), ProblemError> {
    match given == expected {
        true => Ok(()),
        false => Err(ProblemError::DimMismatch { tensor, dim, given, expected }),
    }
}

impl fmt::Display for CombineProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to {}", self.out_partial(), self.out().dtype)
    }
}
