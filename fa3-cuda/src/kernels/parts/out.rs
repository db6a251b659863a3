//! The destination of a work tile's result.

use fa3_ir::lang::*;

/// The destination of a work tile's result: 0 for the tensor, 1 + the index of a split for its buffer, or nowhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Out<T>(pub(crate) T);

impl Out<u32> {
    /// The destination of a whole result, which goes to the tensor.
    pub(crate) const TENSOR: u32 = 0;
    /// The destination of a split tile, which has no result of its own: its parts have the result.
    pub(crate) const NOWHERE: u32 = u32::MAX;
}

impl<'k> Out<U32<'k>> {
    /// Whether the result goes to the tensor.
    #[track_caller]
    pub(crate) fn is_tensor(self) -> V<'k, Pred> {
        self.0.eq(Out::TENSOR)
    }

    /// Whether the result goes to the buffer of a split, in a kernel that never uses `NOWHERE`.
    #[track_caller]
    pub(crate) fn is_not_tensor(self) -> V<'k, Pred> {
        self.0.gt(Out::TENSOR)
    }

    /// Whether the result goes to the buffer of a split.
    #[track_caller]
    pub(crate) fn is_split(self) -> V<'k, Pred> {
        self.0.ne(Out::TENSOR) & self.0.ne(Out::NOWHERE)
    }

    /// The index of the split.
    #[track_caller]
    pub(crate) fn split(self) -> U32<'k> {
        self.0 - 1
    }
}
