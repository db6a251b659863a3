//! Where the work of a tile comes from: its number, or a table of sequences.

use fa3_ir::lang::*;
use fa3_sched::{Lens, VisibleKeys};

use super::geometry::{Geometry, keys};
use super::table::Table;
use crate::kernels::params::{InKernel, Pass, Side};

/// The numbers of a launch that give a tile's work.
#[derive(Clone, Copy)]
pub(crate) enum Lookup<S: Side> {
    /// Sequences are of one length: whoever has the number of a tile computes its work.
    Equal(Geometry<S::U32>),
    /// Sequences are in a table. Tiles are drawn from a counter, whose address is `ticket`.
    Listed {
        /// The table.
        table: Table<S>,
        /// 32 bits from which CTAs fetch their tiles.
        ticket: S::Pointer,
    },
}

impl<A: Side> Lookup<A> {
    /// Goes over its numbers.
    #[track_caller]
    pub(crate) fn pass<B: Side>(self, by: &mut impl Pass<A, B>) -> Lookup<B> {
        match self {
            Lookup::Equal(geometry) => Lookup::Equal(geometry.pass(by)),
            Lookup::Listed { table, ticket } => {
                Lookup::Listed { table: table.pass(by), ticket: by.pointer("ticket", ticket) }
            }
        }
    }
}

impl<'k> Lookup<InKernel<'k>> {
    /// The keys that query row `row` may see in a sequence of these lengths; any keys for a row beyond its end.
    #[track_caller]
    pub(crate) fn keys(&self, row: V<'k, B32>, lens: Lens<V<'k, B32>>) -> VisibleKeys<V<'k, B32>> {
        match self {
            Lookup::Equal(geometry) => geometry.keys(row, lens),
            Lookup::Listed { table, .. } => keys(&table.tiling, row, lens),
        }
    }
}
