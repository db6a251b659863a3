//! Where the work of a tile comes from: its number, or a table of sequences.

use fa3_ir::lang::*;
use fa3_sched::{KvRange, Lens, VisibleKeys};

use super::geometry::{Geometry, keys};
use super::intervals::{IntervalTiles, TilesUnderIntervals};
use super::table::Table;
use crate::kernels::params::{InKernel, Pass, Side};

/// The place where lengths of sequences are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SequenceForm {
    /// All are of one length, which is an argument.
    Equal,
    /// Where each begins and how long it is, is in a table in the device's memory ([`fa3_sched::packed`]): packed
    /// sequences, or such of which only a part is in use. The scheduler is
    /// [`Scheduler::DynamicPersistent`](fa3_sched::Scheduler::DynamicPersistent), the producer loads, V of e4m3 is
    /// transposed in the kernel, and there are no clusters.
    Listed,
}

/// The numbers of a launch that give a tile's work.
#[derive(Clone, Copy)]
pub(crate) enum Lookup<S: Side> {
    /// Sequences are of one length: a role computes a work tile from its number.
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
    /// The tiles under a mask of intervals, which are drawn from a counter, if it is such a mask.
    pub(crate) fn under_intervals(
        &self,
        of: Option<TilesUnderIntervals<'k>>,
        ticket: Option<V<'k, B64>>,
        tile: [u32; 2],
    ) -> Option<IntervalTiles<'k>> {
        match *self {
            Lookup::Equal(geometry) => Some(IntervalTiles { geometry, ticket: ticket?, tile, of: of? }),
            Lookup::Listed { .. } => None,
        }
    }

    /// The keys that query row `row` may see in a sequence of these lengths; any keys for a row beyond its end.
    #[track_caller]
    pub(crate) fn keys(&self, row: V<'k, B32>, lens: Lens<V<'k, B32>>) -> VisibleKeys<V<'k, B32>> {
        match self {
            Lookup::Equal(geometry) => geometry.keys(row, lens),
            Lookup::Listed { table, .. } => keys(&table.tiling, row, lens),
        }
    }

    /// The blocks of keys that tile `m_block` of a head visits in a sequence of these lengths; none if there is no such
    /// tile.
    #[track_caller]
    pub(crate) fn kv_range(&self, m_block: V<'k, B32>, lens: Lens<V<'k, B32>>) -> KvRange<V<'k, B32>> {
        match self {
            Lookup::Equal(geometry) => geometry.kv_range(m_block, lens),
            Lookup::Listed { table, .. } => table.tiling.kv_range(m_block, lens),
        }
    }
}
