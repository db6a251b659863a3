//! The rows and columns of a work tile that belong to a thread, and the keys that its rows see.

use std::f32::consts::LOG2_E;

use fa3_ir::lang::*;
use fa3_sched::FastDiv;
use fa3_sched::forward::packed_positions;
use fa3_types::{ScoreRows, softcap};

use super::scales::TileScales;
use super::spec::FwdSpec;
use super::state::Fwd;
use crate::kernels::params::InKernel;
use crate::kernels::parts::geometry::WorkTile;
use crate::kernels::parts::intervals::IntervalRows;
use crate::kernels::parts::score::{ThreadRows, TileFunction};
use crate::kernels::parts::scores::Scores;
use crate::kernels::parts::store_rows::Columns;
use crate::kernels::parts::visible::{Position, Visible};

/// The first of a thread's two rows. The second follows 8 rows later.
#[derive(Clone, Copy)]
pub(super) enum ThreadRow<'k> {
    /// The row's position, in a tile of one query head.
    OfHead(Position<'k>),
    /// The row's number, in a tile that may have rows of several query heads (PackGQA).
    OfHeads(PackedRow<'k>),
}

/// The number of a row in a PackGQA tile; `pack` divides it into position and head.
#[derive(Clone, Copy)]
pub(super) struct PackedRow<'k> {
    number: U32<'k>,
    /// The divisor, which is the number of query heads of a tile.
    pack: FastDiv<U32<'k>>,
}

/// A row of a PackGQA tile.
#[derive(Clone, Copy)]
pub(super) struct TileRow<'k> {
    /// The row's position in the sequence.
    pub(super) position: Position<'k>,
    /// The row's query head.
    pub(super) head: U32<'k>,
    /// Whether the row is copied.
    pub(super) is_inside: V<'k, Pred>,
}

impl<'k> ThreadRow<'k> {
    /// The row's number in the tile, in a PackGQA tile.
    pub(super) fn packed(self) -> Option<PackedRow<'k>> {
        match self {
            ThreadRow::OfHead(_) => None,
            ThreadRow::OfHeads(row) => Some(row),
        }
    }
}

impl<'k> PackedRow<'k> {
    /// The query head, within the tile, of the thread's first or second row.
    #[track_caller]
    pub(super) fn head(self, half: Half) -> U32<'k> {
        self.pack.div_rem(self.number + half.rows()).1
    }
}

impl<'k> Fwd<'k> {
    /// The first row of a thread of warpgroup `me`.
    #[track_caller]
    pub(super) fn first_row(&self, work: &WorkTile<'k>, me: U32<'k>) -> ThreadRow<'k> {
        let within = self.row_in_tile(me);
        self.pack.map_or_else(
            || ThreadRow::OfHead(Position(work.row + within)),
            |pack| ThreadRow::OfHeads(PackedRow { number: within, pack }),
        )
    }

    /// The positions of a thread's rows.
    #[track_caller]
    pub(super) fn positions(
        &self,
        work: &WorkTile<'k>,
        row: ThreadRow<'k>,
    ) -> Box<dyn Fn(Half) -> Position<'k> + 'k> {
        match row {
            ThreadRow::OfHead(Position(row)) => Box::new(move |half| Position(row + half.rows())),
            ThreadRow::OfHeads(PackedRow { number, pack }) => {
                let first = work.row;
                Box::new(move |half| Position(first + pack.quotient(number + half.rows())))
            }
        }
    }

    /// The number, in its tile, of the first row of a thread of warpgroup `me`.
    #[track_caller]
    pub(super) fn row_in_tile(&self, me: U32<'k>) -> U32<'k> {
        let row = self.builder.frag_row();
        if self.spec.tile.column_groups() > 1 { row } else { me.mad(64, row) }
    }

    /// Number of rows of a tile that take part in attention.
    #[track_caller]
    pub(super) fn rows_of(&self, work: &WorkTile<'k>) -> U32<'k> {
        let FwdSpec { pack, tile, .. } = self.spec;
        (work.lens.q - work.row).min(packed_positions(pack, tile.tile_m)) * pack
    }

    /// The index of the block of 64 rows that warpgroup `me` has.
    pub(super) fn row_block(&self, me: U32<'k>) -> U32<'k> {
        if self.spec.tile.column_groups() > 1 { self.builder.value(0) } else { me }
    }

    /// Part `part` of O's columns, without columns that O in memory does not have.
    pub(super) fn columns(&self, part: u32) -> Columns {
        let most = self.spec.tile.columns();
        let first = part * most;
        Columns { first, count: self.spec.head_dim_v.saturating_sub(first).min(most) }
    }

    /// The two rows of a thread; `row` is the first.
    #[track_caller]
    pub(super) fn rows_of_heads(&self, work: &WorkTile<'k>, row: PackedRow<'k>) -> [TileRow<'k>; 2] {
        let PackedRow { number, pack } = row;
        Half::BOTH.map(|half| {
            let row = number + half.rows();
            let (position, head) = pack.div_rem(row);
            TileRow {
                position: Position(work.row + position),
                head: work.head.mad(self.spec.pack, head),
                is_inside: row.lt(self.spec.q_rows()),
            }
        })
    }

    /// The functions that turn QKᵀ into the scores for the softmax: the soft cap, the function of scores, and the mask.
    pub(super) fn scores(&self, work: &WorkTile<'k>, row: ThreadRow<'k>) -> Scores<'k> {
        let (walk, (left, _)) = (self.params.walk, self.spec.mask.reach());
        let (lens, position) = (work.lens, self.positions(work, row));
        let modify = self.spec.softcap.then(|| Box::new(softcap) as _);
        let (function, takes_exponents) = (self.function(work, row), self.spec.tile.rescales_lazily());
        if let Some(rows) = self.params.intervals.filter(|_| !self.spec.lists_blocks()) {
            let visible = self.visible_by_intervals(work, row, rows, position);
            return Scores { modify, function, takes_exponents, visible, in_bits: true };
        }
        Scores {
            modify,
            function,
            takes_exponents,
            visible: Box::new(move |half| {
                let Position(row) = position(half);
                let keys = walk.keys(row, lens);
                Visible { start: left.map(|_| keys.start), end: keys.end, other: None, tree: None }
            }),
            in_bits: false,
        }
    }

    /// The factor that turns what the softmax takes into an exponent of 2: a product, a capped score, an exponent, or a
    /// value of the function of scores.
    pub(super) fn scale_log2(&self, scales: &TileScales<'_, 'k>) -> V<'k, F32> {
        match self.spec.score {
            None => scales.scale_log2(),
            Some(_) if self.spec.tile.rescales_lazily() => self.builder.value(1.0),
            Some(_) => self.builder.value(LOG2_E),
        }
    }

    /// The function of scores, if there is one.
    #[track_caller]
    fn function(&self, work: &WorkTile<'k>, row: ThreadRow<'k>) -> Option<TileFunction<'k>> {
        let expr = self.spec.score.as_ref().zip(self.params.score.as_ref())?;
        let (of_tile, pack) = (work.head, self.spec.pack);
        let head: Box<dyn Fn(Half) -> U32<'k> + 'k> = match row.packed() {
            None => Box::new(move |_| of_tile),
            Some(row) => Box::new(move |half| of_tile.mad(pack, row.head(half))),
        };
        let position = self.positions(work, row);
        let rows = ThreadRows { sequence: work.batch, lens: work.lens, head, position };
        let are = if row.packed().is_some() { ScoreRows::OfHeads } else { ScoreRows::OfHead };
        Some(TileFunction::new(self.builder, expr, rows, are))
    }

    /// The keys that the thread's rows see by their intervals, and by the mask beside them.
    #[track_caller]
    fn visible_by_intervals(
        &self,
        work: &WorkTile<'k>,
        row: ThreadRow<'k>,
        rows: IntervalRows<InKernel<'k>>,
        position: Box<dyn Fn(Half) -> Position<'k> + 'k>,
    ) -> Box<dyn Fn(Half) -> Visible<'k> + 'k> {
        let (b, lens, walk) = (self.builder, work.lens, self.params.walk);
        match row {
            ThreadRow::OfHead(_) => {
                let of_head = rows.of_tile(work);
                Box::new(move |half| rows.visible(b, of_head, position(half), lens, walk.tiling()))
            }
            ThreadRow::OfHeads(row) => {
                let (batch, first) = (work.batch, work.varlen.map(|varlen| varlen.q_row));
                let (pack, group) = (self.spec.pack, work.head);
                Box::new(move |half| {
                    let head = group.mad(pack, row.head(half));
                    let of_head = rows.of_sequence([batch, head], first);
                    rows.visible(b, of_head, position(half), lens, walk.tiling())
                })
            }
        }
    }
}
