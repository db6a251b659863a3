//! Shape, strides and dtype of one tensor.

use std::fmt;

use crate::{Bytes, Dim, Dtype, Elems, ProblemError, TensorName};

/// No dimension may be larger: kernels and tensor maps count rows in 32 signed bits.
pub(crate) const DIM_LIMIT: usize = i32::MAX as usize;

/// Strides must stay below 2⁴⁰ bytes, the limit of a tensor map.
const STRIDE_BYTES_LIMIT: i64 = 1 << 40;

/// (batch, seqlen, heads, head_dim). A packed tensor (total, heads, head_dim) has batch 1 and seqlen total.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Sequences, or 1 for a packed tensor.
    pub batch: usize,
    /// Rows of a batch entry.
    pub seqlen: usize,
    /// Heads.
    pub heads: usize,
    /// Elements of a row.
    pub head_dim: usize,
}

/// Distances between neighbours in each dimension, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Strides {
    /// Between batch entries.
    pub batch: i64,
    /// Between rows.
    pub seqlen: i64,
    /// Between heads.
    pub heads: i64,
    /// Between the elements of a row: must be 1.
    pub head_dim: i64,
}

/// Layout of one tensor in memory, without its address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TensorDesc {
    /// Element type.
    pub dtype: Dtype,
    /// Extents.
    pub shape: Shape,
    /// Element strides.
    pub strides: Strides,
}

/// The dimensions of a tensor, in order.
const DIMS: [Dim; 4] = [Dim::Batch, Dim::Seqlen, Dim::Heads, Dim::HeadDim];

impl Shape {
    /// The extents in order.
    pub fn dims(self) -> [usize; 4] {
        [self.batch, self.seqlen, self.heads, self.head_dim]
    }

    /// Checks that a tensor of this shape has the `expected` one.
    pub(crate) fn check(self, tensor: TensorName, expected: Shape) -> Result<(), ProblemError> {
        let pairs = self.dims().into_iter().zip(expected.dims());
        match DIMS.into_iter().zip(pairs).find(|(_, (given, expected))| given != expected) {
            Some((dim, (given, expected))) => Err(ProblemError::DimMismatch { tensor, dim, given, expected }),
            None => Ok(()),
        }
    }

    /// Strides of a contiguous tensor of this shape. Saturating: [`crate::Problem::new`] rejects a shape that is too
    /// large.
    pub fn contiguous_strides(self) -> Strides {
        let extent = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        let heads = extent(self.head_dim);
        let seqlen = heads.saturating_mul(extent(self.heads));
        let batch = seqlen.saturating_mul(extent(self.seqlen));
        Strides { batch, seqlen, heads, head_dim: 1 }
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "({}, {}, {}, {})", self.batch, self.seqlen, self.heads, self.head_dim)
    }
}

impl TensorDesc {
    /// A contiguous tensor.
    pub fn contiguous(dtype: Dtype, shape: Shape) -> TensorDesc {
        TensorDesc { dtype, shape, strides: shape.contiguous_strides() }
    }

    /// The element offset of (batch, row, head, element) from the tensor's start. 64-bit; the indices
    /// must lie within the shape of a tensor that a [`crate::Problem`] holds.
    pub fn offset(&self, batch: usize, row: usize, head: usize, element: usize) -> Elems {
        let strides = [self.strides.batch, self.strides.seqlen, self.strides.heads, self.strides.head_dim];
        let index = [batch, row, head, element];
        Elems(index.iter().zip(strides).map(|(&i, stride)| i as u64 * stride as u64).sum())
    }

    pub(crate) fn has_no_elements(&self) -> bool {
        self.shape.dims().contains(&0)
    }

    /// Elements from the first to one past the last; 0 for an empty tensor. As [`TensorDesc::offset`], for a
    /// tensor that a [`crate::Problem`] holds.
    pub fn extent(&self) -> Elems {
        if self.has_no_elements() {
            return Elems(0);
        }
        let [batch, seqlen, heads, head_dim] = self.shape.dims();
        Elems(self.offset(batch - 1, seqlen - 1, heads - 1, head_dim - 1).0 + 1)
    }

    /// [`TensorDesc::extent`] in bytes.
    pub fn extent_bytes(&self) -> Bytes {
        self.extent().bytes(self.dtype)
    }

    /// The dimensions outside the row with their extents and strides.
    pub(crate) fn outer(&self) -> [(Dim, usize, i64); 3] {
        [
            (Dim::Batch, self.shape.batch, self.strides.batch),
            (Dim::Seqlen, self.shape.seqlen, self.strides.seqlen),
            (Dim::Heads, self.shape.heads, self.strides.heads),
        ]
    }

    /// Checks the demands on a single tensor. Sequence lengths and batches of 0 are legal (nothing to do); heads and
    /// head dimensions of 0 are not. A stride matters only where there are two neighbours, and none does in a tensor
    /// without elements. Kernels ask for more: [`TensorDesc::check_rows`].
    pub(crate) fn check(&self, tensor: TensorName) -> Result<(), ProblemError> {
        let Shape { heads, head_dim, .. } = self.shape;
        for (dim, extent) in [(Dim::Heads, heads), (Dim::HeadDim, head_dim)] {
            if extent == 0 {
                return Err(ProblemError::ZeroDim { tensor, dim });
            }
        }
        for (dim, given) in DIMS.into_iter().zip(self.shape.dims()) {
            if given > DIM_LIMIT {
                return Err(ProblemError::DimTooLarge { tensor, dim, given, limit: DIM_LIMIT });
            }
        }
        if self.has_no_elements() {
            return self.check_size(tensor);
        }
        if self.strides.head_dim != 1 {
            return Err(ProblemError::HeadDimStride { tensor, given: self.strides.head_dim });
        }
        for (dim, _, stride) in self.outer().into_iter().filter(|(_, extent, _)| *extent > 1) {
            self.check_stride(tensor, dim, stride)?;
        }
        self.check_span(tensor)
    }

    pub(crate) fn check_stride(&self, tensor: TensorName, dim: Dim, given: i64) -> Result<(), ProblemError> {
        let limit = STRIDE_BYTES_LIMIT / self.dtype.bytes() as i64;
        if given < 0 {
            Err(ProblemError::NegativeStride { tensor, dim, given })
        } else if given >= limit {
            Err(ProblemError::StrideTooLarge { tensor, dim, given, limit })
        } else {
            Ok(())
        }
    }

    /// Checks the kernels' demands on a valid tensor: rows of a multiple of 16 bytes that begin at multiples of 16
    /// bytes.
    pub(crate) fn check_rows(&self, tensor: TensorName) -> Result<(), ProblemError> {
        let (dtype, given) = (self.dtype, self.shape.head_dim);
        let multiple = dtype.row_multiple();
        if !given.is_multiple_of(multiple) {
            return Err(ProblemError::HeadDimMultiple { tensor, given, multiple, dtype });
        }
        let mut strides = self.outer().into_iter().filter(|&(_, extent, _)| extent > 1);
        match strides.find(|(_, _, stride)| stride % multiple as i64 != 0) {
            Some((dim, _, given)) if !self.has_no_elements() => {
                Err(ProblemError::StrideMultiple { tensor, dim, given, multiple })
            }
            _ => Ok(()),
        }
    }

    /// A contiguous tensor whose rows are padded with zeros to a multiple of 16 bytes.
    pub(crate) fn padded(&self) -> TensorDesc {
        let head_dim = self.shape.head_dim.next_multiple_of(self.dtype.row_multiple());
        TensorDesc::contiguous(self.dtype, Shape { head_dim, ..self.shape })
    }

    /// Checks that offsets stay below 2⁶³: extents below 2³¹ and strides below 2⁴⁰ only bound them by 3 · 2⁷¹.
    fn check_span(&self, tensor: TensorName) -> Result<(), ProblemError> {
        let span = |n: usize, stride: i64| (n - 1) as i128 * i128::from(stride);
        let last: i128 =
            self.outer().into_iter().filter(|d| d.1 > 1).map(|(_, n, stride)| span(n, stride)).sum();
        if (last + self.shape.head_dim as i128) * self.dtype.bytes() as i128 > i128::from(i64::MAX) {
            return Err(ProblemError::TooLarge { tensor, shape: self.shape });
        }
        self.check_size(tensor)
    }

    /// Checks that the bytes of all elements stay below 2⁶³. Extents of 0 count as 1, because ndarray multiplies the
    /// other extents even if an array is empty. Rows count with the padding of [`TensorDesc::padded`]: a row has 16
    /// bytes or more, so that Q's size bounds LSE's, too. (Four extents of at most 2³¹ and at most 4 bytes stay below
    /// 2¹²⁷.)
    fn check_size(&self, tensor: TensorName) -> Result<(), ProblemError> {
        let elements: i128 = self.padded().shape.dims().iter().map(|&n| n.max(1) as i128).product();
        if elements * self.dtype.bytes() as i128 > i128::from(i64::MAX) {
            return Err(ProblemError::TooLarge { tensor, shape: self.shape });
        }
        Ok(())
    }

    /// Checks that no two indices of an output share an element. Each dimension, taken by growing stride, must step
    /// over everything that the previous dimensions span. (This is sufficient, and every transposed or sliced tensor
    /// satisfies it. Interleavings that happen to miss each other are refused.)
    pub(crate) fn check_distinct(&self, tensor: TensorName) -> Result<(), ProblemError> {
        if self.has_no_elements() {
            return Ok(());
        }
        let mut dims = self.outer();
        dims.sort_by_key(|&(_, _, stride)| stride);
        let mut needed = self.shape.head_dim as i64;
        for (dim, extent, given) in dims.into_iter().filter(|&(_, extent, _)| extent > 1) {
            if given < needed {
                return Err(ProblemError::OutputOverlapsItself { tensor, dim, given, needed });
            }
            needed += (extent as i64 - 1) * given;
        }
        Ok(())
    }

    /// This tensor with contiguous values for strides that do not matter: of dimensions with fewer than two entries,
    /// and all strides of a tensor without elements.
    pub fn canonical(mut self) -> TensorDesc {
        let contiguous = self.shape.contiguous_strides();
        if self.has_no_elements() {
            return TensorDesc { strides: contiguous, ..self };
        }
        let keep = |extent: usize, given: i64, otherwise: i64| if extent > 1 { given } else { otherwise };
        self.strides.batch = keep(self.shape.batch, self.strides.batch, contiguous.batch);
        self.strides.seqlen = keep(self.shape.seqlen, self.strides.seqlen, contiguous.seqlen);
        self.strides.heads = keep(self.shape.heads, self.strides.heads, contiguous.heads);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape { batch: 2, seqlen: 3, heads: 4, head_dim: 8 };

    fn q(strides: Strides) -> Result<(), ProblemError> {
        TensorDesc { dtype: Dtype::F16, shape: SHAPE, strides }.check(TensorName::Q)
    }

    #[test]
    fn contiguous_offsets_count_up() {
        let desc = TensorDesc::contiguous(Dtype::F16, SHAPE);
        let mut expected = 0;
        for b in 0..2 {
            for s in 0..3 {
                for h in 0..4 {
                    for d in 0..8 {
                        assert_eq!(desc.offset(b, s, h, d), Elems(expected));
                        expected += 1;
                    }
                }
            }
        }
        assert_eq!((desc.extent(), desc.extent_bytes()), (Elems(expected), Bytes(2 * expected)));
    }

    #[test]
    fn offsets_are_64_bit() {
        let shape = Shape { batch: 1, seqlen: 1 << 24, heads: 8, head_dim: 128 };
        let desc = TensorDesc::contiguous(Dtype::F16, shape);
        desc.check(TensorName::K).unwrap();
        assert_eq!(desc.extent(), Elems(1 << 34));
    }

    #[test]
    fn bad_strides_are_rejected() {
        let good = SHAPE.contiguous_strides();
        let tensor = TensorName::Q;
        q(good).unwrap();
        assert_eq!(q(Strides { head_dim: 2, ..good }), Err(ProblemError::HeadDimStride { tensor, given: 2 }));
        let negative = ProblemError::NegativeStride { tensor, dim: Dim::Seqlen, given: -32 };
        assert_eq!(q(Strides { seqlen: -32, ..good }), Err(negative));
        let limit = 1 << 39;
        let huge = ProblemError::StrideTooLarge { tensor, dim: Dim::Batch, given: limit, limit };
        assert_eq!(q(Strides { batch: limit, ..good }), Err(huge));
    }

    #[test]
    fn kernels_need_rows_of_16_bytes() {
        let (dtype, tensor) = (Dtype::F16, TensorName::Q);
        for head_dim in 1..=33 {
            let shape = Shape { head_dim, ..SHAPE };
            let desc = TensorDesc::contiguous(dtype, shape);
            desc.check(tensor).unwrap();
            let error = ProblemError::HeadDimMultiple { tensor, given: head_dim, multiple: 8, dtype };
            assert_eq!(desc.check_rows(tensor), if head_dim % 8 == 0 { Ok(()) } else { Err(error) });
            desc.padded().check_rows(tensor).unwrap();
            assert_eq!(desc.padded().shape, Shape { head_dim: head_dim.next_multiple_of(8), ..SHAPE });
        }
        let strides = Strides { heads: 12, ..SHAPE.contiguous_strides() };
        let odd = TensorDesc { dtype, shape: SHAPE, strides };
        let error = ProblemError::StrideMultiple { tensor, dim: Dim::Heads, given: 12, multiple: 8 };
        assert_eq!((odd.check(tensor), odd.check_rows(tensor)), (Ok(()), Err(error)));
        let one = TensorDesc { shape: Shape { heads: 1, ..SHAPE }, ..odd };
        let none = TensorDesc { shape: Shape { seqlen: 0, ..SHAPE }, ..odd };
        assert_eq!([one, none].map(|desc| desc.check_rows(tensor)), [Ok(()), Ok(())]);
    }

    #[test]
    fn a_stride_without_neighbours_means_nothing() {
        let shape = Shape { batch: 1, ..SHAPE };
        let strides = Strides { batch: -7, ..shape.contiguous_strides() };
        let desc = TensorDesc { dtype: Dtype::F16, shape, strides };
        desc.check(TensorName::Q).unwrap();
        assert_eq!(desc.canonical(), TensorDesc::contiguous(Dtype::F16, shape));
    }

    #[test]
    fn a_tensor_without_elements_may_have_any_strides() {
        let shape = Shape { seqlen: 0, ..SHAPE };
        let strides = Strides { batch: 0, seqlen: 0, heads: 0, head_dim: 0 };
        let desc = TensorDesc { dtype: Dtype::F16, shape, strides };
        desc.check(TensorName::Q).unwrap();
        desc.check_distinct(TensorName::O).unwrap();
        assert_eq!(desc.canonical(), TensorDesc::contiguous(Dtype::F16, shape));
    }

    #[test]
    fn tensors_past_2_to_the_63_bytes_are_rejected() {
        let shape = Shape { batch: 1 << 30, seqlen: 1 << 30, heads: 1, head_dim: 256 };
        let strides = Strides { batch: 0, seqlen: 0, heads: 0, head_dim: 1 };
        let desc = TensorDesc { dtype: Dtype::F16, shape, strides };
        let error = desc.check(TensorName::V).unwrap_err();
        assert_eq!(error, ProblemError::TooLarge { tensor: TensorName::V, shape });
    }

    #[test]
    fn empty_tensors_have_extents_that_arrays_can_have() {
        let shape = Shape { batch: 0, seqlen: 1 << 30, heads: 1 << 25, head_dim: 512 };
        let error = TensorDesc::contiguous(Dtype::F32, shape).check(TensorName::O).unwrap_err();
        assert_eq!(error, ProblemError::TooLarge { tensor: TensorName::O, shape });
        let half = Shape { heads: 1 << 20, ..shape };
        TensorDesc::contiguous(Dtype::F32, half).check(TensorName::O).unwrap();
    }

    #[test]
    fn outputs_must_not_overlap_themselves() {
        let good = SHAPE.contiguous_strides();
        let check =
            |strides| TensorDesc { dtype: Dtype::F16, shape: SHAPE, strides }.check_distinct(TensorName::O);
        check(good).unwrap();
        check(Strides { heads: 24, seqlen: 8, ..good }).unwrap(); // (batch, heads, seqlen, head_dim) in memory
        let error = |dim, given, needed| {
            Err(ProblemError::OutputOverlapsItself { tensor: TensorName::O, dim, given, needed })
        };
        assert_eq!(check(Strides { batch: 0, ..good }), error(Dim::Batch, 0, 8));
        assert_eq!(check(Strides { seqlen: 16, ..good }), error(Dim::Seqlen, 16, 24 + 8));
    }
}
