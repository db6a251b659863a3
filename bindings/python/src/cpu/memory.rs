//! Torch's memory as arrays. All that is unsafe on the CPU is here, and where these functions are called.

use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use std::slice;

use bytemuck::Pod;
use fa3::ndarray::{ArrayView4, ShapeBuilder};
use fa3_types::{Address, Dim, ProblemError, TensorDesc, TensorName};

/// The elements of a tensor with its own strides.
///
/// # Safety
/// A tensor of that shape, those strides and that type lies there, unless it has no elements. It lives, and nobody
/// writes to it, for as long as the view.
///
/// # Errors
/// [`ProblemError::NegativeStride`], or those of an address.
#[allow(unsafe_code, reason = "torch's tensors are plain addresses")]
pub(super) unsafe fn view<'a, T: Pod>(
    tensor: TensorName,
    desc: &TensorDesc,
    at: Address,
) -> Result<ArrayView4<'a, T>, ProblemError> {
    let dims = desc.shape.dims();
    if dims.contains(&0) {
        return Ok(ArrayView4::from_shape(dims, &[]).expect("there are no elements"));
    }
    let given = desc.strides;
    let stride = |dim, given: i64| {
        usize::try_from(given).map_err(|_| ProblemError::NegativeStride { tensor, dim, given })
    };
    let strides = [
        stride(Dim::Batch, given.batch)?,
        stride(Dim::Seqlen, given.seqlen)?,
        stride(Dim::Heads, given.heads)?,
        stride(Dim::HeadDim, given.head_dim)?,
    ];
    check::<T>(tensor, at)?;
    let start = with_exposed_provenance(at.0 as usize);
    // SAFETY: the address is not null and aligned, and the strides are not negative. The caller vouches for the rest: a
    // tensor's elements lie in one allocation, and any bits are an element of plain old data.
    Ok(unsafe { ArrayView4::from_shape_ptr(dims.strides(strides), start) })
}

/// The elements of a contiguous tensor.
///
/// # Safety
/// So many elements of that type lie there. They live, and nobody writes to them, for as long as the slice.
///
/// # Errors
/// Those of an address.
#[allow(unsafe_code, reason = "torch's tensors are plain addresses")]
pub(super) unsafe fn slice<'a, T: Pod>(
    tensor: TensorName,
    count: usize,
    at: Address,
) -> Result<&'a [T], ProblemError> {
    if count == 0 {
        return Ok(&[]);
    }
    check::<T>(tensor, at)?;
    // SAFETY: the address is not null and aligned. The caller vouches for the rest, and any bits are an element.
    Ok(unsafe { slice::from_raw_parts(with_exposed_provenance(at.0 as usize), count) })
}

/// The elements of a contiguous tensor, to be written.
///
/// # Safety
/// So many elements of that type lie there. They live, and nobody else reads or writes them, for as long as the slice.
///
/// # Errors
/// Those of an address.
#[allow(unsafe_code, reason = "torch's tensors are plain addresses")]
pub(super) unsafe fn slice_mut<'a, T: Pod>(
    tensor: TensorName,
    count: usize,
    at: Address,
) -> Result<&'a mut [T], ProblemError> {
    if count == 0 {
        return Ok(&mut []);
    }
    check::<T>(tensor, at)?;
    // SAFETY: the address is not null and aligned. The caller vouches for the rest, and any bits are an element.
    Ok(unsafe { slice::from_raw_parts_mut(with_exposed_provenance_mut(at.0 as usize), count) })
}

fn check<T>(tensor: TensorName, Address(address): Address) -> Result<(), ProblemError> {
    let alignment = align_of::<T>() as u64;
    match address {
        0 => Err(ProblemError::NullAddress { tensor }),
        _ if address.is_multiple_of(alignment) => Ok(()),
        _ => Err(ProblemError::Misaligned { tensor, address, alignment }),
    }
}
