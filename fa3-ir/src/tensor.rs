//! Tensor maps as plain data: the part that a kernel fixes ([`BoxShape`]) and the part that a launch adds
//! ([`TensorView`]).

use std::fmt;

use crate::{Elem, Swizzle};

/// Part of a tensor map that a kernel fixes: elements, the box that one copy moves, its layout in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BoxShape {
    /// The element type of tensor and box.
    pub elem: Elem,
    dims: [u32; 5],
    rank: u32,
    /// The order of 16-byte chunks in shared memory.
    pub swizzle: Swizzle,
}

impl BoxShape {
    /// A box of `dims` elements, innermost dimension first; at most the first 5 dimensions are kept.
    pub fn new(elem: Elem, dims: &[u32], swizzle: Swizzle) -> BoxShape {
        let mut all = [1; 5];
        let rank = dims.len().min(5);
        all[..rank].copy_from_slice(&dims[..rank]);
        BoxShape { elem, dims: all, rank: rank as u32, swizzle }
    }

    /// Elements in each dimension, innermost first.
    pub fn dims(&self) -> &[u32] {
        &self.dims[..self.rank as usize]
    }

    /// The number of dimensions.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Bytes that one copy moves, including elements beyond the tensor.
    pub fn bytes(&self) -> u32 {
        self.dims().iter().product::<u32>() * self.elem.bytes()
    }

    /// Alignment of a box in shared memory: whole patterns of its swizzle, and multiples of 128 bytes.
    pub fn align(&self) -> u32 {
        match self.swizzle {
            Swizzle::None => 128,
            Swizzle::B32 | Swizzle::B64 | Swizzle::B128 => self.swizzle.pattern_bytes(),
        }
    }

    /// Checks the requirements of `cuTensorMapEncodeTiled` on the box alone, and that a swizzled row is as long as the
    /// swizzle's row.
    ///
    /// # Errors
    /// The first requirement that is not met.
    pub fn check(&self) -> Result<(), TensorMapError> {
        let (dims, row) = (self.dims(), self.dims[0].saturating_mul(self.elem.bytes()));
        if dims.is_empty() {
            return Err(TensorMapError::Rank { given: 0 });
        }
        if let Some((dim, &given)) = dims.iter().enumerate().find(|(_, given)| !(1..=256).contains(*given)) {
            return Err(TensorMapError::BoxDim { dim, given });
        }
        if !row.is_multiple_of(16) {
            return Err(TensorMapError::BoxRow { given: row });
        }
        let span = self.swizzle.row_bytes();
        // The H100 lays out shorter rows as far apart as the swizzle's rows, so that the box takes more than its bytes.
        if self.swizzle != Swizzle::None && row != span {
            return Err(TensorMapError::SwizzleSpan { given: row, span });
        }
        Ok(())
    }
}

impl fmt::Display for BoxShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dims: Vec<String> = self.dims().iter().map(u32::to_string).collect();
        write!(f, "{} box of {}, {}", self.elem, dims.join(" x "), self.swizzle)
    }
}

/// A tensor in global memory, as a launch describes it. Elements outside of it are read as zero and not written.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TensorView {
    /// The address of its first element.
    pub address: u64,
    /// Elements in each dimension, innermost first.
    pub dims: Vec<u64>,
    /// Bytes from one element to the next in each dimension but the innermost, whose elements are contiguous.
    pub strides: Vec<u64>,
}

impl TensorView {
    /// A tensor whose elements follow each other without gaps. Strides of 2^64 bytes and more, which no tensor map
    /// describes, are `u64::MAX`.
    pub fn contiguous(address: u64, dims: &[u64], elem: Elem) -> TensorView {
        let outer = dims.len().saturating_sub(1);
        let strides = dims[..outer].iter().scan(u64::from(elem.bytes()), |stride, dim| {
            *stride = stride.saturating_mul(*dim);
            Some(*stride)
        });
        TensorView { address, dims: dims.to_vec(), strides: strides.collect() }
    }

    /// Checks the requirements of `cuTensorMapEncodeTiled` on a tensor for boxes of this shape.
    ///
    /// # Errors
    /// The first requirement that is not met.
    pub fn check(&self, shape: &BoxShape) -> Result<(), TensorMapError> {
        shape.check()?;
        let (dims, strides, rank) = (self.dims.len(), self.strides.len(), shape.rank());
        if dims != rank as usize || strides + 1 != dims {
            return Err(TensorMapError::Dims { dims, strides, rank });
        }
        if !self.address.is_multiple_of(16) {
            return Err(TensorMapError::Address { given: self.address });
        }
        let bad_dim = |given: &u64| !(1..=1 << 32).contains(given);
        if let Some((dim, &given)) = self.dims.iter().enumerate().find(|(_, given)| bad_dim(given)) {
            return Err(TensorMapError::Dim { dim, given });
        }
        let bad_stride = |given: &u64| !given.is_multiple_of(16) || *given >= 1 << 40;
        if let Some((dim, &given)) = self.strides.iter().enumerate().find(|(_, given)| bad_stride(given)) {
            return Err(TensorMapError::Stride { dim: dim + 1, given });
        }
        Ok(())
    }
}

/// A tensor map that `cuTensorMapEncodeTiled` would not make.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub enum TensorMapError {
    #[error("a tensor map has 1 to 5 dimensions, not {given}")]
    Rank { given: u32 },
    #[error("dimension {dim} of the box has {given} elements, not 1 to 256")]
    BoxDim { dim: usize, given: u32 },
    #[error("a row of the box has {given} bytes, not a multiple of 16")]
    BoxRow { given: u32 },
    #[error("a row of the box has {given} bytes, not the {span} of its swizzle")]
    SwizzleSpan { given: u32, span: u32 },
    #[error("{dims} dimensions and {strides} strides for a tensor map of rank {rank}")]
    Dims { dims: usize, strides: usize, rank: u32 },
    #[error("address {given:#x} is not aligned to 16 bytes")]
    Address { given: u64 },
    #[error("dimension {dim} has {given} elements, not 1 to 2^32")]
    Dim { dim: usize, given: u64 },
    #[error("stride {dim} has {given} bytes, not a multiple of 16 below 2^40")]
    Stride { dim: usize, given: u64 },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contiguous_strides_are_products_of_inner_dimensions() {
        let view = TensorView::contiguous(4096, &[64, 10, 3], Elem::Bf16);
        assert_eq!(view.strides, [128, 1280]);
        assert_eq!(TensorView::contiguous(0, &[7], Elem::F32).strides, []);
    }

    #[test]
    fn every_demand_is_checked() {
        let shape = |dims: &[u32], swizzle| BoxShape::new(Elem::Bf16, dims, swizzle);
        let good = shape(&[64, 128], Swizzle::B128);
        assert_eq!((good.bytes(), good.align(), good.rank()), (16384, 1024, 2));
        let view = TensorView::contiguous(256, &[512, 100], Elem::Bf16);
        assert_eq!(view.check(&good), Ok(()));

        let boxes = [
            (shape(&[], Swizzle::None), TensorMapError::Rank { given: 0 }),
            (shape(&[64, 257], Swizzle::B128), TensorMapError::BoxDim { dim: 1, given: 257 }),
            (shape(&[0, 64], Swizzle::B128), TensorMapError::BoxDim { dim: 0, given: 0 }),
            (shape(&[4, 64], Swizzle::None), TensorMapError::BoxRow { given: 8 }),
            (shape(&[128, 64], Swizzle::B128), TensorMapError::SwizzleSpan { given: 256, span: 128 }),
            (shape(&[32, 64], Swizzle::B128), TensorMapError::SwizzleSpan { given: 64, span: 128 }),
        ];
        for (shape, error) in boxes {
            assert_eq!(shape.check(), Err(error));
        }
        let views = [
            (
                TensorView { dims: vec![512], ..view.clone() },
                TensorMapError::Dims { dims: 1, strides: 1, rank: 2 },
            ),
            (TensorView { address: 8, ..view.clone() }, TensorMapError::Address { given: 8 }),
            (TensorView { dims: vec![512, 0], ..view.clone() }, TensorMapError::Dim { dim: 1, given: 0 }),
            (TensorView { strides: vec![24], ..view.clone() }, TensorMapError::Stride { dim: 1, given: 24 }),
            (
                TensorView { strides: vec![1 << 40], ..view },
                TensorMapError::Stride { dim: 1, given: 1 << 40 },
            ),
        ];
        for (view, error) in views {
            assert_eq!(view.check(&good), Err(error));
        }
    }
}
