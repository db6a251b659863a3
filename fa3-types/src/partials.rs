//! Tensors of partial results.

use std::fmt;

use crate::tensor::DIM_LIMIT;
use crate::{Bytes, Dim, Dtype, Elems, ProblemError, Shape, TensorDesc, TensorName};

/// Tensors of one shape and one layout, one for each split of the keys: (num_splits, batch, seqlen, heads, head_dim).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Partials {
    /// Number of splits.
    pub splits: usize,
    /// Elements from one split to the next.
    pub stride: i64,
    /// The tensor of the first split.
    pub first: TensorDesc,
}

impl Partials {
    /// `splits` tensors of this shape, contiguous as a whole.
    pub fn contiguous(dtype: Dtype, splits: usize, shape: Shape) -> Partials {
        let first = TensorDesc::contiguous(dtype, shape);
        Partials { splits, stride: dense_stride(shape), first }
    }

    /// The element offset of an element of split `split`, as [`TensorDesc::offset`].
    pub fn offset(&self, split: usize, [batch, row, head, element]: [usize; 4]) -> Elems {
        Elems(split as u64 * self.stride as u64 + self.first.offset(batch, row, head, element).0)
    }

    /// Elements from the first to one past the last; 0 without elements.
    pub fn extent(&self) -> Elems {
        match (self.splits, self.first.extent()) {
            (0, _) | (_, Elems(0)) => Elems(0),
            (splits, Elems(first)) => Elems((splits as u64 - 1) * self.stride as u64 + first),
        }
    }

    /// [`Partials::extent`] in bytes.
    pub fn extent_bytes(&self) -> Bytes {
        self.extent().bytes(self.first.dtype)
    }

    /// Checks that there is at least one split, and the demands of [`TensorDesc::check`] on every split's tensor.
    pub(crate) fn check(&self, tensor: TensorName) -> Result<(), ProblemError> {
        let (dim, given) = (Dim::Splits, self.splits);
        if given == 0 {
            return Err(ProblemError::ZeroDim { tensor, dim });
        }
        if given > DIM_LIMIT {
            return Err(ProblemError::DimTooLarge { tensor, dim, given, limit: DIM_LIMIT });
        }
        self.first.check(tensor)?;
        if self.has_stride() {
            self.first.check_stride(tensor, dim, self.stride)?;
        }
        self.check_size(tensor)
    }

    /// Checks the kernels' demands, as [`TensorDesc::check_rows`] does.
    pub(crate) fn check_rows(&self, tensor: TensorName) -> Result<(), ProblemError> {
        self.first.check_rows(tensor)?;
        let multiple = self.first.dtype.row_multiple();
        if self.has_stride() && self.stride % multiple as i64 != 0 {
            let (dim, given) = (Dim::Splits, self.stride);
            return Err(ProblemError::StrideMultiple { tensor, dim, given, multiple });
        }
        Ok(())
    }

    /// Whether the stride matters: only if there are two splits with elements.
    fn has_stride(&self) -> bool {
        self.splits > 1 && !self.first.has_no_elements()
    }

    /// Checks that the elements of all splits lie within 2⁶³ bytes. The first split is checked already.
    fn check_size(&self, tensor: TensorName) -> Result<(), ProblemError> {
        let Partials { splits, stride, first } = *self;
        let others = if self.has_stride() { (splits as i128 - 1) * i128::from(stride) } else { 0 };
        let reach = others + i128::from(first.extent().0);
        // Extents of 0 count as 1, as in the size of a tensor.
        let elements: i128 = first.shape.dims().iter().map(|&extent| extent.max(1) as i128).product();
        if reach.max(elements * splits as i128) * first.dtype.bytes() as i128 > i128::from(i64::MAX) {
            return Err(ProblemError::TooManyParts { tensor, splits, shape: first.shape });
        }
        Ok(())
    }

    /// These tensors with contiguous values for strides that do not matter.
    pub fn canonical(self) -> Partials {
        let first = self.first.canonical();
        match self.has_stride() {
            true => Partials { first, ..self },
            false => Partials { stride: dense_stride(first.shape), first, ..self },
        }
    }
}

/// The number of elements of a tensor of this shape, saturating like [`Shape::contiguous_strides`].
fn dense_stride(shape: Shape) -> i64 {
    let batch = i64::try_from(shape.batch).unwrap_or(i64::MAX);
    shape.contiguous_strides().batch.saturating_mul(batch)
}

impl fmt::Display for Partials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shape { batch, seqlen, heads, head_dim } = self.first.shape;
        write!(f, "{} ({}, {batch}, {seqlen}, {heads}, {head_dim})", self.first.dtype, self.splits)
    }
}
