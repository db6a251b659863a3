//! Units that must not be mixed: strides and offsets count elements, tensor maps and addresses count bytes.

use std::fmt;

use crate::Dtype;

/// A number of elements. 64-bit: a tensor may hold more than 2³¹ of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Elems(pub u64);

/// A number of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(pub u64);

impl Elems {
    /// The bytes of this many elements of `dtype`. Saturating; a tensor of a valid problem has fewer than 2⁶³.
    pub fn bytes(self, dtype: Dtype) -> Bytes {
        Bytes(self.0.saturating_mul(dtype.bytes() as u64))
    }
}

impl fmt::Display for Elems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} elements", self.0)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0)
    }
}
