//! A tensor as equally spaced rows of memory, whichever sequences they belong to.

use fa3_types::TensorDesc;

/// The rows of a tensor, numbered through all of its sequences: row r of sequence i is row i · `batch` + r in memory.
///
/// Row r of memory begins r · `stride` elements behind the tensor's first element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRows {
    /// One past the last row.
    pub count: u32,
    /// Rows from one sequence to the next; 0 if the batch has one entry, as a tensor of packed sequences has.
    pub batch: u32,
    /// Elements from one row to the next.
    pub stride: u64,
}

/// The reasons why a tensor's rows cannot be numbered. The messages say what kernels take instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub enum NotInRows {
    #[error("a batch stride that is a multiple of the row stride, not {batch} of {row}")]
    Stride { batch: u64, row: u64 },
    #[error("rows less than {limit} bytes apart, not {given}")]
    Apart { given: u64, limit: u64 },
    #[error("up to {limit} rows of all sequences, not {given}")]
    Count { given: u128, limit: u32 },
}

impl MemoryRows {
    /// Largest number of rows of a tensor: a copy counts valid rows down from this number.
    pub const LIMIT: u32 = 1 << 30;

    /// Rows are less than this many bytes apart, so that [`MemoryRows::LIMIT`] rows have less than 2⁶⁴ bytes.
    pub const STRIDE_LIMIT: u64 = 1 << 34;

    /// The rows of a tensor of a problem.
    ///
    /// # Errors
    /// [`NotInRows`].
    pub fn of(tensor: &TensorDesc) -> Result<MemoryRows, NotInRows> {
        let (shape, strides) = (tensor.shape, tensor.strides);
        // Strides of a problem's tensors are not negative.
        let [batch, row] = [strides.batch, strides.seqlen].map(i64::unsigned_abs);
        let (stride, apart) = match (shape.batch > 1, shape.seqlen > 1) {
            (false, _) => (row, 0),
            (true, false) => (batch, 1),
            (true, true) if batch == 0 => (row, 0),
            (true, true) if row > 0 && batch.is_multiple_of(row) => (row, batch / row),
            (true, true) => return Err(NotInRows::Stride { batch, row }),
        };
        let (given, limit) = (stride.saturating_mul(tensor.dtype.bytes() as u64), Self::STRIDE_LIMIT);
        if given >= limit {
            return Err(NotInRows::Apart { given, limit });
        }
        let last = shape.batch.saturating_sub(1) as u128 * u128::from(apart);
        let (given, limit) = (last + shape.seqlen as u128, Self::LIMIT);
        let count = u32::try_from(given).ok().filter(|&count| count <= limit);
        let count = count.ok_or(NotInRows::Count { given, limit })?;
        // Sequences that begin beyond the limit would make too many rows.
        let batch = u32::try_from(apart).map_err(|_| NotInRows::Count { given: apart.into(), limit })?;
        Ok(MemoryRows { count, batch, stride })
    }
}

#[cfg(test)]
mod tests {
    use fa3_types::{Dtype, Shape, Strides};
    use proptest::prelude::*;

    use super::*;

    fn tensor(batch: usize, seqlen: usize, [of_batch, of_row]: [i64; 2]) -> TensorDesc {
        let shape = Shape { batch, seqlen, heads: 2, head_dim: 64 };
        let strides = Strides { batch: of_batch, seqlen: of_row, heads: 64, head_dim: 1 };
        TensorDesc { dtype: Dtype::Bf16, shape, strides }
    }

    proptest! {
        /// Row addresses match the tensor, and none exceeds the count.
        #[test]
        fn rows_are_where_the_tensor_has_them(
            (batch, seqlen) in (1_usize..5, 1_usize..9), (times, row, other) in (0_i64..12, 0_i64..400, 0_i64..4000),
            is_multiple in any::<bool>(),
        ) {
            let tensor = tensor(batch, seqlen, [if is_multiple { times * row } else { other }, row]);
            let Ok(rows) = MemoryRows::of(&tensor) else {
                prop_assert!(!is_multiple && batch > 1 && seqlen > 1);
                return Ok(());
            };
            for (i, r) in (0..batch).flat_map(|i| (0..seqlen).map(move |r| (i, r))) {
                let number = i as u64 * u64::from(rows.batch) + r as u64;
                prop_assert_eq!(number * rows.stride, tensor.offset(i, r, 0, 0).0);
                prop_assert!(number < rows.count.into());
            }
        }
    }

    #[test]
    fn limits_are_refused_with_their_numbers() {
        let refused = |tensor: TensorDesc| MemoryRows::of(&tensor).unwrap_err();
        assert_eq!(refused(tensor(2, 5, [1000, 128])), NotInRows::Stride { batch: 1000, row: 128 });
        assert_eq!(refused(tensor(2, 5, [64, 0])), NotInRows::Stride { batch: 64, row: 0 });
        let apart = NotInRows::Apart { given: 1 << 34, limit: 1 << 34 };
        assert_eq!(refused(tensor(1, 5, [0, 1 << 33])), apart);
        assert_eq!(refused(tensor(2, 1, [1 << 33, 128])), apart);
        let count = |given| NotInRows::Count { given, limit: 1 << 30 };
        assert_eq!(refused(tensor(1, (1 << 30) + 1, [0, 128])), count((1 << 30) + 1));
        assert_eq!(refused(tensor(2, 2, [1 << 37, 128])), count((1 << 30) + 2));
        assert_eq!(MemoryRows::of(&tensor(1, 1 << 30, [0, 128])).unwrap().count, 1 << 30);
        assert_eq!(
            refused(tensor(2, 5, [1000, 128])).to_string(),
            "a batch stride that is a multiple of the row stride, not 1000 of 128"
        );
    }
}
