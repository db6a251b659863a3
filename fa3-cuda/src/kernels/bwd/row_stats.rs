//! The statistics of a thread's rows, which kernels whose rows are query rows load from memory.

use fa3_ir::lang::*;

use crate::kernels::params::{Form, InKernel, Pass, Side, param, params};
use crate::kernels::parts::geometry::WorkTile;

params! {
    /// -LSE (base 2) and -D of all rows, in pairs of rows.
    struct RowStats {
        address: pointer = "stats",
        /// Pairs of query rows of a head.
        pairs: u32,
        /// Number of query heads.
        heads: u32,
    }
}

impl RowStats<Form> {
    pub(super) const FORM: RowStats<Form> = RowStats { address: Elem::F32, pairs: (), heads: () };
}

impl<'k> RowStats<InKernel<'k>> {
    /// Loads -LSE and -D of the rows `row` and `row` + 8. Row indices are clamped to the last valid row.
    #[track_caller]
    pub(super) fn of_rows(&self, b: &'k Builder, work: &WorkTile<'k>, row: U32<'k>) -> [Rows<'k>; 2] {
        let last = work.lens.q - 1;
        // With a table, the arrays of statistics are padded, so that every row of a tile has statistics.
        let padded_row = work.varlen.and_then(|varlen| varlen.padded_row);
        let of_head = match padded_row {
            None => work.batch.mad(self.heads, work.head),
            Some(_) => work.head,
        };
        let of_head = of_head.mul_wide(self.pairs);
        let [upper, lower] = Half::BOTH.map(|half| {
            let row = match padded_row {
                None => (row + half.rows()).min(last),
                Some(padded_row) => padded_row + row + half.rows(),
            };
            let at = self.address + ((of_head + (row >> 1).to_u64()) << 4) + ((row & 1) << 2).to_u64();
            [b.load::<F32>(at), b.load::<F32>(at.at(8))]
        });
        [Rows([upper[0], lower[0]]), Rows([upper[1], lower[1]])]
    }
}
