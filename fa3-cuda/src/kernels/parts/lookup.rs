//! Where a tile index becomes a work tile: by arithmetic, or through a table of sequences.

use fa3_ir::lang::*;
use fa3_sched::{KvRange, Lens, VisibleKeys};

use super::geometry::{Geometry, keys};
use super::intervals::{IntervalTiles, TilesUnderIntervals};
use super::table::Table;
use crate::kernels::params::{InKernel, Pass, Side};

/// Where the lengths of sequences are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SequenceForm {
    /// All sequences have one length, which is an argument.
    Equal,
    /// A table in device memory has the first row and the length of each sequence ([`fa3_sched::packed`]): sequences
    /// are packed, or only a part of each is valid. The scheduler is
    /// [`Scheduler::DynamicPersistent`](fa3_sched::Scheduler::DynamicPersistent), a producer loads, e4m3 V is
    /// transposed in the kernel, and there are no clusters.
    Listed,
}

/// The numbers of a launch that turn a tile index into a work tile.
#[derive(Clone, Copy)]
pub(crate) enum Lookup<S: Side> {
    /// Sequences have one length: each role computes a work tile from its index.
    Equal(Geometry<S::U32>),
    /// Sequences are in a table. The producer draws tile indices from a counter.
    Listed {
        /// The table.
        table: Table<S>,
        /// The tile counter: 32 bits.
        ticket: S::Pointer,
    },
}

impl<A: Side> Lookup<A> {
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
    /// The work tiles under a mask of intervals, drawn from the counter `ticket`; `None` under any other mask.
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

    /// The keys that query row `row` may see in a sequence of these lengths; unspecified for a row beyond its end.
    #[track_caller]
    pub(crate) fn keys(&self, row: V<'k, B32>, lens: Lens<V<'k, B32>>) -> VisibleKeys<V<'k, B32>> {
        match self {
            Lookup::Equal(geometry) => geometry.keys(row, lens),
            Lookup::Listed { table, .. } => keys(&table.tiling, row, lens),
        }
    }

    /// The KV blocks that tile `m_block` of a head visits in a sequence of these lengths; none if the sequence has no
    /// such tile.
    #[track_caller]
    pub(crate) fn kv_range(&self, m_block: V<'k, B32>, lens: Lens<V<'k, B32>>) -> KvRange<V<'k, B32>> {
        match self {
            Lookup::Equal(geometry) => geometry.kv_range(m_block, lens),
            Lookup::Listed { table, .. } => table.tiling.kv_range(m_block, lens),
        }
    }
}
