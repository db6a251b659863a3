//! The layouts of V in memory.

use crate::{Bytes, Dim, Dtype, ProblemError, Shape, TensorDesc, TensorName};

/// Number of keys whose order is permuted together.
const GROUP: usize = 16;

/// The layout of e4m3 V in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ValueLayout {
    /// A row for each key, like K.
    #[default]
    Rows,
    /// The layout that FP8 products read: (batch, heads, head_dim_v, keys), contiguous. Keys are seqlen_k rounded up to
    /// a multiple of 128; codes at keys beyond seqlen_k are 0. Each 16 keys are in the order 0 1 8 9 2 3 10 11 4 5 12
    /// 13 6 7 14 15, the order of P in a thread's registers: see [`ValueLayout::place_of_key`].
    Transposed,
}

impl ValueLayout {
    /// A row of transposed V has a multiple of this many keys.
    pub const ROW_KEYS: usize = 128;

    /// Checks that transposed V is e4m3, contiguous and in a dense batch, and that Q is e4m3.
    pub(crate) fn check(self, v: &TensorDesc, q: Dtype, packed: bool) -> Result<(), ProblemError> {
        if self == ValueLayout::Rows {
            return Ok(());
        }
        if q != Dtype::E4m3 || packed {
            return Err(ProblemError::TransposedV { dtype: q, packed });
        }
        if let Some((dim, given, expected)) = ValueLayout::other_stride(v) {
            return Err(ProblemError::TransposedStride { dim, given, expected });
        }
        if ValueLayout::transposed_bytes(v.shape).0 > i64::MAX as u64 {
            return Err(ProblemError::TooLarge { tensor: TensorName::V, shape: v.shape });
        }
        Ok(())
    }

    /// The first stride that is not the contiguous one, as (dimension, stride, contiguous stride).
    pub(crate) fn other_stride(x: &TensorDesc) -> Option<(Dim, i64, i64)> {
        let contiguous = TensorDesc::contiguous(x.dtype, x.shape).outer();
        let strides = x.canonical().outer().into_iter().zip(contiguous);
        strides.map(|((dim, _, given), (.., expected))| (dim, given, expected)).find(|of| of.1 != of.2)
    }

    /// Keys of a row of transposed V.
    pub fn keys_of_row(seqlen_k: usize) -> usize {
        seqlen_k.next_multiple_of(ValueLayout::ROW_KEYS)
    }

    /// The index of a key's code in its row of transposed V.
    pub fn place_of_key(key: usize) -> usize {
        let (group, within) = (key / GROUP, key % GROUP);
        // Within a group, a pair of keys of the upper half follows each pair of keys of the lower half.
        let (half, pair, last) = (within >> 3, within >> 1 & 3, within & 1);
        GROUP * group + 4 * pair + 2 * half + last
    }

    /// Bytes of transposed V of this shape; saturating, as shapes are not checked yet.
    pub fn transposed_bytes(shape: Shape) -> Bytes {
        let Shape { batch, seqlen, heads, head_dim } = shape;
        let dims = [batch, heads, head_dim, ValueLayout::keys_of_row(seqlen)];
        Bytes(dims.iter().fold(1, |bytes: u64, &dim| bytes.saturating_mul(dim as u64)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_in_the_order_of_an_accumulators_registers() {
        let mut keys = [0; 32];
        (0..32).for_each(|key| keys[ValueLayout::place_of_key(key)] = key);
        assert_eq!(keys[..16], [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]);
        assert_eq!(keys[16..20], [16, 17, 24, 25]);
    }

    #[test]
    fn rows_are_whole() {
        let shape = Shape { batch: 2, seqlen: 129, heads: 3, head_dim: 32 };
        assert_eq!(ValueLayout::transposed_bytes(shape), Bytes(2 * 3 * 32 * 256));
        assert_eq!(ValueLayout::transposed_bytes(Shape { seqlen: 0, ..shape }), Bytes(0));
    }
}
