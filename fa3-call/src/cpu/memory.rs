//! The caller's memory as arrays. Only this file and the callers of its functions have unsafe code of the CPU path.

use std::cell::RefCell;
use std::ops::Range;
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use std::slice;

use bytemuck::Pod;
use fa3::ndarray::{ArrayView4, ArrayView5, ArrayViewMut4, Ix4, ShapeBuilder, StrideShape};
use fa3_cuda::host::PlacementError;
use fa3_types::{Dim, Partials, TensorDesc, are_apart};

use crate::call::At;
use crate::error::Error;

/// The memory of a call's tensors. It checks that no output overlaps another tensor, and that no tensor is too small.
pub struct Memory<'a> {
    at: &'a At,
    bytes: &'a [(&'static str, u64)],
    lent: RefCell<Vec<Lent>>,
}

/// A tensor of which a view was made.
struct Lent {
    tensor: &'static str,
    bytes: Range<u64>,
    is_written: bool,
    /// The tensor's shape and strides; `None` if it is contiguous.
    desc: Option<TensorDesc>,
}

impl Lent {
    /// Whether two tensors share no byte: one lies after the other, or between the rows of the other.
    fn is_apart(&self, other: &Lent) -> bool {
        let is_behind = self.bytes.end <= other.bytes.start || other.bytes.end <= self.bytes.start;
        let are_between = || match (&self.desc, &other.desc) {
            (Some(x), Some(y)) => are_apart([x, y], [self.bytes.start, other.bytes.start]),
            _ => false,
        };
        is_behind || are_between()
    }
}

impl<'a> Memory<'a> {
    /// The memory of the tensors at these addresses. A tensor with an entry in `bytes` spans that many bytes.
    ///
    /// # Safety
    /// The memory is used for one call. At each address lies the call's tensor of this name, with the call's shape,
    /// strides and type. As long as the call is computed, the tensors stay alive, no other code uses outputs, and no
    /// other code writes to inputs.
    #[allow(unsafe_code, reason = "tensors are plain addresses")]
    pub unsafe fn new(at: &'a At, bytes: &'a [(&'static str, u64)]) -> Memory<'a> {
        Memory { at, bytes, lent: RefCell::default() }
    }
}

impl Memory<'_> {
    /// Whether the call has a tensor.
    pub(super) fn has(&self, tensor: &str) -> bool {
        self.address(tensor).is_some()
    }

    /// Lets later views overlap this tensor. The caller must know that they share no element.
    pub(super) fn release(&self, tensor: &str) {
        self.lent.borrow_mut().retain(|lent| lent.tensor != tensor);
    }

    /// Lets later views overlap all tensors so far. The caller must have dropped their views.
    pub(super) fn release_all(&self) {
        self.lent.borrow_mut().clear();
    }

    pub(super) fn address(&self, tensor: &str) -> Option<u64> {
        self.at.iter().find(|(name, _)| *name == tensor).and_then(|(_, address)| *address)
    }

    /// The elements of a tensor with its own strides.
    ///
    /// # Safety
    /// The address must have a tensor of this shape, these strides and type `T`, unless it has no elements. The tensor
    /// stays alive and is not written to as long as the view lives.
    ///
    /// # Errors
    /// A stride is negative, or the address is invalid.
    #[allow(unsafe_code, reason = "tensors are plain addresses")]
    pub(super) unsafe fn view<'a, T: Pod>(
        &self,
        tensor: &'static str,
        desc: &TensorDesc,
    ) -> Result<ArrayView4<'a, T>, Error> {
        let Some((shape, elements)) = shape(tensor, desc)? else {
            return Ok(ArrayView4::from_shape(desc.shape.dims(), &[]).expect("there are no elements"));
        };
        let start = self.lend::<T>(tensor, elements, (false, Some(desc)))?;
        // SAFETY: the address is not null and aligned, and the strides are not negative. The caller guarantees the
        // rest: a tensor's elements lie in one allocation, and any bits are an element of plain old data.
        Ok(unsafe { ArrayView4::from_shape_ptr(shape, with_exposed_provenance(start)) })
    }

    /// The elements of a tensor of several splits with its own strides.
    ///
    /// # Safety
    /// The conditions of [`Memory::view`].
    ///
    /// # Errors
    /// A stride is negative, or the address is invalid.
    #[allow(unsafe_code, reason = "tensors are plain addresses")]
    pub(super) unsafe fn parts<'a, T: Pod>(
        &self,
        tensor: &'static str,
        Partials { splits, stride, first }: &Partials,
    ) -> Result<ArrayView5<'a, T>, Error> {
        let [batch, seqlen, heads, head_dim] = first.shape.dims();
        let dims = [*splits, batch, seqlen, heads, head_dim];
        if dims.contains(&0) {
            return Ok(ArrayView5::from_shape(dims, &[]).expect("there are no elements"));
        }
        let [batch, seqlen, heads, head_dim] = strides(tensor, first)?;
        let strides = [positive(tensor, Dim::Splits, *stride)?, batch, seqlen, heads, head_dim];
        let start = self.lend::<T>(tensor, spanned(&dims, &strides), (false, None))?;
        // SAFETY: as in [`Memory::view`].
        Ok(unsafe { ArrayView5::from_shape_ptr(dims.strides(strides), with_exposed_provenance(start)) })
    }

    /// The elements of an output with its own strides.
    ///
    /// # Safety
    /// The address must have a tensor of this shape, these strides and type `T`, without overlapping elements. As long
    /// as the view lives, the tensor stays alive, and no other code reads or writes it.
    ///
    /// # Errors
    /// A stride is negative, or the address is invalid, or the tensor overlaps a tensor of which a view was made
    /// before.
    #[allow(unsafe_code, reason = "tensors are plain addresses")]
    pub(super) unsafe fn view_mut<'a, T: Pod>(
        &self,
        tensor: &'static str,
        desc: &TensorDesc,
    ) -> Result<ArrayViewMut4<'a, T>, Error> {
        let Some((shape, elements)) = shape(tensor, desc)? else {
            return Ok(ArrayViewMut4::from_shape(desc.shape.dims(), &mut []).expect("there are no elements"));
        };
        let start = self.lend::<T>(tensor, elements, (true, Some(desc)))?;
        // SAFETY: as in [`Memory::view`], and `lend` has checked that no other tensor of the call overlaps its
        // elements.
        Ok(unsafe { ArrayViewMut4::from_shape_ptr(shape, with_exposed_provenance_mut(start)) })
    }

    /// The elements of a contiguous tensor.
    ///
    /// # Safety
    /// The address must have `count` elements of type `T`. They stay alive and are not written to as long as the slice
    /// lives.
    ///
    /// # Errors
    /// An address is invalid.
    #[allow(unsafe_code, reason = "tensors are plain addresses")]
    pub(super) unsafe fn slice<'a, T: Pod>(
        &self,
        tensor: &'static str,
        count: usize,
    ) -> Result<&'a [T], Error> {
        if count == 0 {
            return Ok(&[]);
        }
        let start = self.lend::<T>(tensor, count as u64, (false, None))?;
        // SAFETY: the address is not null and aligned. The caller guarantees the rest, and any bits are an element.
        Ok(unsafe { slice::from_raw_parts(with_exposed_provenance(start), count) })
    }

    /// The elements of a contiguous output.
    ///
    /// # Safety
    /// The address must have `count` elements of type `T`. As long as the slice lives, they stay alive, and no other
    /// code reads or writes them.
    ///
    /// # Errors
    /// The address is invalid, or the elements overlap a tensor of which a view was made before.
    #[allow(unsafe_code, reason = "tensors are plain addresses")]
    pub(super) unsafe fn slice_mut<'a, T: Pod>(
        &self,
        tensor: &'static str,
        count: usize,
    ) -> Result<&'a mut [T], Error> {
        if count == 0 {
            return Ok(&mut []);
        }
        let start = self.lend::<T>(tensor, count as u64, (true, None))?;
        // SAFETY: as in [`Memory::slice`], and no other tensor of the call overlaps the elements.
        Ok(unsafe { slice::from_raw_parts_mut(with_exposed_provenance_mut(start), count) })
    }

    /// The address of a tensor of `elements` elements, which is then recorded as lent.
    ///
    /// # Errors
    /// The address is null, not aligned or too high; or the elements overlap another tensor, and one of the two is an
    /// output.
    fn lend<T>(
        &self,
        tensor: &'static str,
        elements: u64,
        (is_written, desc): (bool, Option<&TensorDesc>),
    ) -> Result<usize, PlacementError> {
        let (alignment, address) = (align_of::<T>() as u64, self.address(tensor).unwrap_or(0));
        if address == 0 {
            return Err(PlacementError::Null { tensor });
        }
        if !address.is_multiple_of(alignment) {
            return Err(PlacementError::Misaligned { tensor, address, alignment });
        }
        let bytes = elements.saturating_mul(size_of::<T>() as u64);
        if let Some(&(_, given)) = self.bytes.iter().find(|(name, given)| *name == tensor && *given < bytes) {
            return Err(PlacementError::BufferSize { tensor, given, needed: bytes });
        }
        let end = address.checked_add(bytes).ok_or(PlacementError::Overflow { tensor, address, bytes })?;
        let new = Lent { tensor, bytes: address..end, is_written, desc: desc.copied() };
        let mut lent = self.lent.borrow_mut();
        for old in lent.iter().filter(|old| old.is_written || is_written) {
            if !new.is_apart(old) {
                let (output, other) = if is_written { (&new, old) } else { (old, &new) };
                let (at, other_at) = (output.bytes.clone(), other.bytes.clone());
                return Err(PlacementError::Overlap {
                    output: output.tensor,
                    at,
                    other: other.tensor,
                    other_at,
                });
            }
        }
        lent.push(new);
        Ok(address as usize)
    }
}

/// The extents and strides of an array, and the number of elements that it spans; `None` if it has no elements.
///
/// # Errors
/// [`Error::NegativeStride`].
fn shape(tensor: &'static str, desc: &TensorDesc) -> Result<Option<(StrideShape<Ix4>, u64)>, Error> {
    let dims = desc.shape.dims();
    if dims.contains(&0) {
        return Ok(None);
    }
    let strides = strides(tensor, desc)?;
    Ok(Some((dims.strides(strides), spanned(&dims, &strides))))
}

/// The strides of an array.
///
/// # Errors
/// [`Error::NegativeStride`].
fn strides(tensor: &'static str, desc: &TensorDesc) -> Result<[usize; 4], Error> {
    let given = desc.strides;
    Ok([
        positive(tensor, Dim::Batch, given.batch)?,
        positive(tensor, Dim::Seqlen, given.seqlen)?,
        positive(tensor, Dim::Heads, given.heads)?,
        positive(tensor, Dim::HeadDim, given.head_dim)?,
    ])
}

fn positive(tensor: &'static str, dim: Dim, given: i64) -> Result<usize, Error> {
    usize::try_from(given).map_err(|_| Error::NegativeStride { tensor, dim, given })
}

/// The number of elements that an array spans, if it is not empty.
fn spanned(dims: &[usize], strides: &[usize]) -> u64 {
    let span = |(extent, stride): (&usize, &usize)| (*extent as u64 - 1).saturating_mul(*stride as u64);
    dims.iter().zip(strides).map(span).fold(1, u64::saturating_add)
}
