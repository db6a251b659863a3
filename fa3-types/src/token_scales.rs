//! Scales of tokens and heads: an f32 number for each row and head of e4m3 or int8 K, and one for each row and head of
//! V.

use crate::{Dtype, ProblemError, Sequences, Shape, TensorDesc, TensorName};

/// The scales of the rows of e4m3 or int8 K and V, beside Q of 16 bits. An element of a row is its code times the row's
/// scale, rounded to Q's type, once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TokenScales {
    /// Scales of the rows of K, f32 of K's shape with a single column.
    pub k: TensorDesc,
    /// Scales of the rows of V, likewise.
    pub v: TensorDesc,
}

impl TokenScales {
    /// Contiguous scales of rows of this shape.
    pub fn contiguous(rows: Shape) -> TokenScales {
        let scales = TensorDesc::contiguous(Dtype::F32, Shape { head_dim: 1, ..rows });
        TokenScales { k: scales, v: scales }
    }

    /// Checks that each row and head of K and V has a scale, and that they are e4m3 or int8 rows of 16-bit attention
    /// without `qv`.
    pub(crate) fn check(
        &self,
        [q, k]: [&TensorDesc; 2],
        qv: bool,
        seqs: Sequences,
    ) -> Result<(), ProblemError> {
        let has_codes = matches!(k.dtype, Dtype::E4m3 | Dtype::Int8);
        if q.dtype == Dtype::E4m3 || !has_codes || qv || seqs.list().is_some() {
            let lists = seqs.list().is_some();
            return Err(ProblemError::TokenScales { q: q.dtype, k: k.dtype, qv, lists });
        }
        for (tensor, given) in [(TensorName::KScales, &self.k), (TensorName::VScales, &self.v)] {
            given.check(tensor)?;
            given.shape.check(tensor, Shape { head_dim: 1, ..k.shape })?;
            if given.dtype != Dtype::F32 {
                return Err(ProblemError::ScaleDtype { tensor, given: given.dtype });
            }
        }
        Ok(())
    }

    pub(crate) fn canonical(self) -> TokenScales {
        TokenScales { k: self.k.canonical(), v: self.v.canonical() }
    }
}
