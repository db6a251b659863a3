//! Units that must not be mixed: a stride counts elements, a tensor map and an address count bytes.

use std::fmt;

use crate::Dtype;

/// A number of elements. 64-bit: a tensor may hold more than 2³¹ of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Elems(pub u64);

/// A number of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(pub u64);

impl Elems {
    /// The bytes that this many elements of `dtype` take, or `None` past 2⁶⁴.
    pub fn bytes(self, dtype: Dtype) -> Option<Bytes> {
        self.0.checked_mul(dtype.bytes() as u64).map(Bytes)
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
