//! The rows and columns of a work tile that a thread has.

use fa3_ir::lang::*;
use fa3_sched::FastDiv;

use super::state::Fwd;
use crate::kernels::parts::geometry::Work;
use crate::kernels::parts::store_rows::Columns;

/// A row of a tile that may have rows of several heads.
#[derive(Clone, Copy)]
pub(super) struct TileRow<'k> {
    /// Its position in the sequence.
    pub(super) position: V<'k, B32>,
    /// Its query head.
    pub(super) head: V<'k, B32>,
    /// Whether it is one of those that are copied.
    pub(super) is_inside: V<'k, Pred>,
}

impl<'k> Fwd<'k> {
    /// The first row of a thread: of its sequence, or of its tile, where that may have rows of several heads.
    #[track_caller]
    pub(super) fn first_row(&self, work: &Work<V<'k, B32>>, me: V<'k, B32>) -> V<'k, B32> {
        let within = self.row_in_tile(me);
        if self.spec.shares.is_some() { within } else { work.row + within }
    }

    /// The first row in its tile of a thread of warpgroup `me`.
    #[track_caller]
    pub(super) fn row_in_tile(&self, me: V<'k, B32>) -> V<'k, B32> {
        let row = self.builder.frag_row();
        if self.spec.tile.column_groups() > 1 { row } else { me.mad(64, row) }
    }

    /// Which of the tile's blocks of 64 rows warpgroup `me` has.
    pub(super) fn row_block(&self, me: V<'k, B32>) -> V<'k, B32> {
        if self.spec.tile.column_groups() > 1 { self.builder.value(0) } else { me }
    }

    /// Part number `part` of O's columns, as far as they are in memory.
    pub(super) fn columns(&self, part: u32) -> Columns {
        let most = self.spec.tile.columns();
        let first = part * most;
        Columns { first, count: self.spec.head_dim_v.saturating_sub(first).min(most) }
    }

    /// The rows of a thread, of which the first is `row` of a tile that may have rows of several heads.
    #[track_caller]
    pub(super) fn rows_of_heads(&self, work: &Work<V<'k, B32>>, row: V<'k, B32>) -> [TileRow<'k>; 2] {
        Half::BOTH.map(|half| {
            let row = row + half.rows();
            let (position, head) = self.pack().div_rem(row);
            TileRow {
                position: work.row + position,
                head: work.head.mad(self.spec.pack, head),
                is_inside: row.lt(self.spec.q_rows()),
            }
        })
    }

    /// Division by the query heads of a tile.
    #[track_caller]
    pub(super) fn pack(&self) -> FastDiv<V<'k, B32>> {
        FastDiv::new(self.spec.pack).map(|number| self.builder.value(number))
    }
}
