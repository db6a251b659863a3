//! A tensor of a call, as its caller describes it.

use std::fmt;

use fa3_types::{Dtype, Shape, Strides, TensorDesc};

use crate::error::Error;
use crate::place::Place;

/// Largest number of dimensions of a tensor.
pub const DIMS: usize = 5;

/// How an operation uses a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Where it lies, with its own strides. It is never copied.
    InPlace,
    /// With any strides of its own.
    Strided,
    /// With its own strides, but on a GPU the last dimension has no gaps.
    Rows,
    /// As rows without gaps that begin at multiples of 16 bytes. If `is_apart`, no two rows share memory.
    Aligned {
        /// Whether no two rows may share memory.
        is_apart: bool,
    },
    /// On a GPU as rows without gaps that may be parts of wider rows, and on the CPU contiguous.
    Slices,
    /// Contiguous. On a GPU it begins at a multiple of this many bytes.
    Contiguous(u64),
}

/// The type of a tensor's elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Element {
    /// Numbers.
    Number(Dtype),
    /// Signed 32-bit integers.
    Integer,
    /// A type that no operation supports, by the caller's name for it.
    Other(String),
}

impl Element {
    /// The size of an element in bytes; 1 if it is not known.
    pub fn bytes(&self) -> u64 {
        match self {
            Element::Number(dtype) => dtype.bytes() as u64,
            Element::Integer => 4,
            Element::Other(_) => 1,
        }
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Element::Number(dtype) => dtype.fmt(f),
            Element::Integer => f.write_str("i32"),
            Element::Other(name) => f.write_str(name),
        }
    }
}

/// A tensor argument.
#[derive(Clone, Debug)]
pub struct Tensor {
    name: &'static str,
    element: Element,
    address: u64,
    rank: usize,
    shape: [usize; DIMS],
    strides: [i64; DIMS],
}

/// Numbers in parentheses, as Python prints a tuple.
struct Tuple<'a>(&'a [usize]);

impl fmt::Display for Tuple<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [only] => write!(f, "({only},)"),
            numbers => {
                let numbers: Vec<String> = numbers.iter().map(usize::to_string).collect();
                write!(f, "({})", numbers.join(", "))
            }
        }
    }
}

impl Tensor {
    /// A tensor at `address`. Its shape and its strides, which count elements, are each given with the number of their
    /// dimensions.
    ///
    /// # Errors
    /// The tensor has more than [`DIMS`] dimensions, or shape and strides have different numbers of dimensions.
    #[inline]
    pub fn new(
        name: &'static str,
        element: Element,
        address: u64,
        (rank, shape): (usize, [usize; DIMS]),
        (steps, strides): (usize, [i64; DIMS]),
    ) -> Result<Tensor, Error> {
        if rank > DIMS || steps != rank {
            return Err(Error::Dims { tensor: name, dims: rank, strides: steps });
        }
        Ok(Tensor { name, element, address, rank, shape, strides })
    }

    /// The tensor's address.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// The tensor's shape.
    pub(crate) fn shape(&self) -> &[usize] {
        &self.shape[..self.rank]
    }

    /// The tensor with the strides that it would have if it were contiguous.
    #[must_use]
    pub fn contiguous(mut self) -> Tensor {
        self.strides = self.contiguous_strides();
        self
    }

    /// Number of bytes from the first element to the end of the last.
    pub fn bytes(&self) -> u64 {
        if self.shape().contains(&0) {
            return 0;
        }
        let span =
            |(extent, stride): (&usize, i64)| (*extent as u64 - 1).saturating_mul(stride.unsigned_abs());
        let last = self.shape().iter().zip(self.strides).map(span).fold(0, u64::saturating_add);
        last.saturating_add(1).saturating_mul(self.element.bytes())
    }

    /// The tensor's extents, if it has N dimensions.
    pub(crate) fn extents<const N: usize>(&self) -> Result<[usize; N], Error> {
        let wrong = |_| Error::Rank { tensor: self.name, given: self.rank, expected: N };
        self.shape().try_into().map_err(wrong)
    }

    fn contiguous_strides(&self) -> [i64; DIMS] {
        let (mut strides, mut step) = ([0; DIMS], 1_i64);
        for (to, extent) in strides[..self.rank].iter_mut().zip(self.shape()).rev() {
            *to = step;
            step = step.saturating_mul(*extent as i64);
        }
        strides
    }

    fn is_contiguous(&self) -> bool {
        let mut dims = self.shape().iter().zip(self.strides).zip(self.contiguous_strides());
        self.shape().contains(&0) || dims.all(|((extent, given), wanted)| *extent == 1 || given == wanted)
    }

    /// Checks a list of integers. `fits` says whether its shape is as expected.
    pub(crate) fn check_list(&self, fits: bool, expected: fmt::Arguments<'_>) -> Result<(), Error> {
        if fits && self.element == Element::Integer {
            return Ok(());
        }
        Err(self.refused(format!("i32 {expected}")))
    }

    /// Checks a tensor whose dtype and shape follow from other tensors. Tensors of packed sequences have no batch.
    /// `what` names the dimensions.
    pub(crate) fn check<const N: usize>(
        &self,
        dtype: Dtype,
        shape: [usize; N],
        is_packed: bool,
        what: &str,
    ) -> Result<(), Error> {
        let fits = self.dims(0).is_ok_and(|(found, _)| found == shape);
        if fits && self.element == Element::Number(dtype) {
            return Ok(());
        }
        Err(self.refused(format!("{dtype} {}{what}", Tuple(&shape[usize::from(is_packed)..]))))
    }

    /// Checks the type of the elements.
    ///
    /// # Errors
    /// [`Error::Tensor`].
    pub fn check_dtype(&self, dtype: Dtype) -> Result<(), Error> {
        if self.element == Element::Number(dtype) { Ok(()) } else { Err(self.refused(dtype.to_string())) }
    }

    /// Checks that an operation can use the tensor as it is.
    ///
    /// # Errors
    /// [`Error::Tensor`].
    pub fn check_access(&self, access: Access, place: Place) -> Result<(), Error> {
        if self.is_readable(access, place) {
            return Ok(());
        }
        let expected = match access {
            Access::InPlace | Access::Strided => "any strides",
            Access::Rows => "rows without gaps",
            Access::Aligned { .. } => "rows without gaps at multiples of 16 bytes",
            Access::Slices | Access::Contiguous(_) => "no gaps",
        };
        let strides = &self.strides[..self.rank];
        Err(self.refused(format!("{expected}, which strides {strides:?} do not have")))
    }

    fn refused(&self, expected: String) -> Error {
        let found = format!("{} {}", self.element, Tuple(self.shape()));
        Error::Tensor { tensor: self.name, found, expected }
    }

    /// Whether rows have no gaps.
    pub fn has_rows(&self) -> bool {
        self.rank == 0 || self.strides[self.rank - 1] == 1
    }

    /// Whether the tensor has rows without gaps, at multiples of 8 elements (16 bytes of 16-bit types). If `is_apart`,
    /// they must not be expanded.
    fn has_aligned_rows(&self, is_apart: bool) -> bool {
        let outer = self.rank.saturating_sub(1);
        let are_apart = !is_apart || self.shape().contains(&0) || !self.strides[..self.rank].contains(&0);
        let mut outer = self.shape[..outer].iter().zip(&self.strides[..outer]);
        self.has_rows() && are_apart && outer.all(|(extent, stride)| *extent <= 1 || stride % 8 == 0)
    }

    /// Whether the tensor has rows without gaps, in order, that do not overlap.
    fn has_slices(&self) -> bool {
        self.rank == 2 && self.has_rows() && self.strides[0] >= self.shape[1] as i64
    }

    /// Whether an operation can use the tensor with its strides.
    pub fn is_readable(&self, access: Access, place: Place) -> bool {
        match access {
            Access::InPlace | Access::Strided => true,
            Access::Rows => place.is_cpu() || self.has_rows(),
            Access::Aligned { is_apart } => self.has_aligned_rows(is_apart),
            Access::Slices if !place.is_cpu() => self.has_slices(),
            Access::Slices | Access::Contiguous(_) => self.is_contiguous(),
        }
    }

    /// Whether an operation can use the tensor at its address.
    pub fn is_aligned(&self, access: Access, place: Place) -> bool {
        let multiple = match access {
            Access::Aligned { .. } => 16,
            Access::InPlace => 1,
            _ if place.is_cpu() => self.element.bytes(),
            Access::Contiguous(multiple) => multiple,
            Access::Strided | Access::Rows | Access::Slices => 1,
        };
        self.address.is_multiple_of(multiple)
    }

    /// The tensor's extents and strides. If a dimension is missing, a dimension of 1 is inserted at index `at`.
    pub(crate) fn dims<const N: usize>(&self, at: usize) -> Result<([usize; N], [i64; N]), Error> {
        let (mut shape, mut strides) = ([1; N], [0; N]);
        let gap = match N.checked_sub(self.rank) {
            Some(0) => N,
            Some(1) => at,
            _ => return Err(Error::Rank { tensor: self.name, given: self.rank, expected: N }),
        };
        for i in 0..self.rank {
            let to = i + usize::from(i >= gap);
            (shape[to], strides[to]) = (self.shape[i], self.strides[i]);
        }
        Ok((shape, strides))
    }

    /// The type of the numbers.
    pub(crate) fn dtype(&self) -> Result<Dtype, Error> {
        match &self.element {
            Element::Number(dtype) => Ok(*dtype),
            Element::Integer | Element::Other(_) => Err(Error::Dtype { given: self.element.to_string() }),
        }
    }

    /// The tensor's description without meaningless strides. Calls that differ only in such strides share a plan.
    pub(crate) fn desc(&self) -> Result<TensorDesc, Error> {
        let ([batch, seqlen, heads, head_dim], strides) = self.dims(0)?;
        let shape = Shape { batch, seqlen, heads, head_dim };
        Ok(TensorDesc { dtype: self.dtype()?, shape, strides: in_order(strides) }.canonical())
    }
}

/// Strides in the order of a tensor's dimensions.
pub(crate) fn in_order([batch, seqlen, heads, head_dim]: [i64; 4]) -> Strides {
    Strides { batch, seqlen, heads, head_dim }
}
