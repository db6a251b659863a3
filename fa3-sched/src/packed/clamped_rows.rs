//! The rows of a sequence, clamped to its tensor. Lengths may be any numbers.

use crate::Int;

/// Rows of a sequence of Q, or of K and V. They lie within the tensor for any lengths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClampedRows<T> {
    /// The first row: in a packed tensor, or 0 in a dense one.
    pub row: T,
    /// Number of rows.
    pub rows: T,
    /// Number of leading rows that take part in attention.
    pub len: T,
}

impl<T: Int> ClampedRows<T> {
    /// Rows `begin .. end` of a packed tensor of `total` < 2³¹ rows. Both are entries of `cu_seqlens`, signed.
    pub fn packed([begin, end]: [T; 2], total: T) -> ClampedRows<T> {
        let row = not_negative(begin).at_most(total);
        let rows = not_negative(end).at_most(total).sub_sat(row);
        ClampedRows { row, rows, len: rows }
    }

    /// All rows of a sequence of a dense tensor.
    pub fn dense(seqlen: T) -> ClampedRows<T> {
        ClampedRows { row: seqlen.lit(0), rows: seqlen, len: seqlen }
    }

    /// The rows of a packed tensor from the last entry of `cu_seqlens` on, which belong to no sequence.
    pub fn behind(end: T, total: T) -> ClampedRows<T> {
        ClampedRows { len: total.lit(0), ..ClampedRows::packed([end, total], total) }
    }

    /// Limits the rows in use to the first `used`, a signed entry of `seqused`.
    #[must_use]
    pub fn used(self, used: T) -> ClampedRows<T> {
        ClampedRows { len: not_negative(used).at_most(self.rows), ..self }
    }

    /// Leaves out the first `leftpad` rows, a signed entry of the array of that name.
    #[must_use]
    pub fn left_padded(self, leftpad: T) -> ClampedRows<T> {
        let pad = not_negative(leftpad).at_most(self.rows);
        ClampedRows { row: self.row + pad, rows: self.rows.sub_sat(pad), len: self.len.sub_sat(pad) }
    }
}

/// The larger of 0 and a signed number.
pub(crate) fn not_negative<T: Int>(x: T) -> T {
    T::select(x.lt(x.lit(1 << 31)), x, x.lit(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checked::Checked;
    use proptest::prelude::*;

    /// A random number, or often one near an edge.
    fn entry() -> impl Strategy<Value = i32> {
        prop_oneof![-2..12, any::<i32>(), Just(i32::MIN), Just(i32::MAX)]
    }

    fn numbers<T>(rows: ClampedRows<T>) -> [T; 3] {
        [rows.row, rows.rows, rows.len]
    }

    proptest! {
        /// The functions equal their definitions in signed 64-bit arithmetic, and no 32-bit value overflows.
        #[test]
        fn rows_are_clamped(
            (begin, end, used) in (entry(), entry(), entry()), total in prop_oneof![0..10, Just(i32::MAX)],
        ) {
            let word = |x: i32| Checked::from(x.cast_unsigned());
            let clamp = |x: i32, low: i64, high: i64| i64::from(x).max(low).min(high);
            let expect = |rows: ClampedRows<Checked>, expected: [i64; 3]| {
                prop_assert_eq!(numbers(rows).map(|x| x.0 as i64), expected);
                Ok(())
            };
            let all = i64::from(total);
            let row = clamp(begin, 0, all);
            let rows = clamp(end, row, all) - row;
            let packed = ClampedRows::packed([word(begin), word(end)], word(total));
            expect(packed, [row, rows, rows])?;
            expect(packed.used(word(used)), [row, rows, clamp(used, 0, rows)])?;
            let dense = ClampedRows::dense(word(total));
            expect(dense, [0, all, all])?;
            let in_part = dense.used(word(used));
            expect(in_part, [0, all, clamp(used, 0, all)])?;
            let pad = clamp(begin, 0, all);
            expect(in_part.left_padded(word(begin)), [pad, all - pad, (clamp(used, 0, all) - pad).max(0)])?;
            let last = clamp(end, 0, all);
            expect(ClampedRows::behind(word(end), word(total)), [last, all - last, 0])?;
        }
    }
}
