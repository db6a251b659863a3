//! The cosines and sines of a thread's row, kept from one head of the row to the next.

use fa3_ir::lang::*;
use fa3_sched::quantize::CHUNK;
use fa3_types::RopeStyle;

use super::params::{Params, RotationTables, RowPositions};
use super::spans::Span;
use super::spec::Rotation;
use super::tiles::HeadBlock;
use crate::kernels::params::InKernel;

/// The angles of the thread's row, which turn its rotary pairs.
pub(super) struct Angles<'f, 'k> {
    builder: &'k Builder,
    rotation: Rotation,
    tables: &'f RotationTables<InKernel<'k>>,
    seqlen: U32<'k>,
    lane: (U32<'k>, u32),
    /// Whether a row's position may lie outside the tables.
    may_be_outside: bool,
    /// The position of the row.
    position: Var<'k, B32>,
    /// The cosines and sines at that position, if the thread keeps them.
    kept: Option<Vec<[Var<'k, F32>; 2]>>,
}

impl<'f, 'k> Angles<'f, 'k> {
    /// The state before the first row. `keeps` says whether the thread has enough registers to keep the angles.
    #[track_caller]
    pub(super) fn new(
        builder: &'k Builder,
        rotation: Rotation,
        tables: &'f RotationTables<InKernel<'k>>,
        params: &Params<InKernel<'k>>,
        lane: (U32<'k>, u32),
        keeps: bool,
    ) -> Angles<'f, 'k> {
        let pairs = rotation.rotary_dim / (2 * lane.1);
        let var = |name: &str| builder.uninitialised(name);
        let kept = keeps.then(|| (0..pairs).map(|_| ["cos", "sin"].map(var)).collect());
        let (seqlen, may_be_outside) = (params.seqlen, rotation.listed || params.packed.is_some());
        let position = builder.var("position", 0);
        Angles { builder, rotation, tables, seqlen, lane, may_be_outside, position, kept }
    }

    /// Moves to row `row` of the sequence of a tile. If the thread keeps angles, begins to load the row's angles.
    #[track_caller]
    pub(super) fn go_to(&self, place: &HeadBlock<'k>, row: U32<'k>) {
        match place.span {
            None => self.set_position(place.batch, row),
            Some(span) => self.set_position_of(span, row),
        }
        if let Some(kept) = &self.kept {
            for (kept, loaded) in kept.iter().zip(self.load()) {
                kept.iter().zip(loaded).for_each(|(kept, loaded)| kept.set(loaded));
            }
        }
    }

    /// Sets the position of row `row` of sequence `batch`.
    #[track_caller]
    fn set_position(&self, batch: U32<'k>, row: U32<'k>) {
        let b = self.builder;
        match self.tables.positions {
            RowPositions::From(first) => self.position.set(row + first),
            RowPositions::Listed(positions) => {
                let at = positions + ((batch.mul_wide(self.seqlen) + row.to_u64()) << 2);
                b.guarded(row.lt(self.seqlen), || self.position.set(b.load::<B32>(at)));
            }
        }
    }

    /// Sets the position of row `row` of a packed sequence. Beyond the sequence's end, where rows are zeros, it is 0.
    #[track_caller]
    fn set_position_of(&self, span: Span<'k>, row: U32<'k>) {
        let (b, is_one) = (self.builder, row.lt(span.len));
        match self.tables.positions {
            RowPositions::From(first) => self.position.set(is_one.select(row + first, 0)),
            RowPositions::Listed(positions) => {
                let at = (span.first + row).mad_wide(4, positions);
                self.position.set(0);
                b.guarded(is_one, || self.position.set(b.load::<B32>(at)));
            }
        }
    }

    /// The cosines and sines of the thread's row.
    #[track_caller]
    pub(super) fn get(&self) -> Vec<[V<'k, F32>; 2]> {
        match &self.kept {
            Some(kept) => kept.iter().map(|pair| pair.map(Var::now)).collect(),
            None => self.load(),
        }
    }

    #[track_caller]
    fn load(&self) -> Vec<[V<'k, F32>; 2]> {
        // The position is clamped, because rows beyond the sequence's end are rotated, too.
        let row = self.position.now().min(self.tables.table_rows - 1).mul_wide(2 * self.rotation.rotary_dim);
        angles(self.builder, &self.rotation, self.lane, [self.tables.cos + row, self.tables.sin + row])
    }

    /// Whether the tables have the row's position. `None` if they have all positions, which is so unless positions are
    /// listed or sequences are packed.
    #[track_caller]
    pub(super) fn has_position(&self) -> Option<V<'k, Pred>> {
        self.may_be_outside.then(|| self.position.now().lt(self.tables.table_rows))
    }
}

/// The cosines and sines of a thread's pairs, from the rows of two tables.
#[track_caller]
fn angles<'k>(
    b: &'k Builder,
    rotation: &Rotation,
    (lane, lanes): (U32<'k>, u32),
    tables: [U64<'k>; 2],
) -> Vec<[V<'k, F32>; 2]> {
    let pairs = rotation.rotary_dim / (2 * lanes);
    // A chunk has four interleaved pairs, or one element of each of eight half-split pairs.
    let together = match rotation.style {
        RopeStyle::Interleaved => CHUNK / 2,
        RopeStyle::HalfSplit => CHUNK,
    };
    let tables = tables.map(|table| lane.mad_wide(4 * together, table));
    let quad = |pair: u32| {
        let bytes = 4 * (pair / together * together * lanes + pair % together);
        let [cos, sin]: [[V<'k, F32>; 4]; 2] = tables.map(|table| b.load_read_only(table.at(bytes as i32)));
        cos.into_iter().zip(sin).map(|(cos, sin)| [cos, sin])
    };
    (0..pairs).step_by(4).flat_map(quad).collect()
}
