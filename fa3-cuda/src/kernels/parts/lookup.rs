//! Turns a tile index into a work tile: by arithmetic, or through a table of sequences.

use fa3_ir::lang::*;
use fa3_sched::{KvRange, SeqLens, Tiling, VisibleKeys};

use super::geometry::{Geometry, keys};
use super::table::Table;
use crate::kernels::params::{InKernel, Pass, Side};

/// The place where the lengths of sequences are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SequenceForm {
    /// All sequences have one length, which is an argument.
    Dense,
    /// A table in device memory has the first row and the length of each sequence ([`fa3_sched::packed`]). Sequences
    /// are packed, or only some rows of each are valid. The scheduler is
    /// [`Scheduler::DynamicPersistent`](fa3_sched::Scheduler::DynamicPersistent), a producer loads, e4m3 V is
    /// transposed in the kernel, and there are no clusters.
    Varlen,
}

/// The numbers of a launch that turn a tile index into a work tile.
#[derive(Clone, Copy)]
pub(crate) enum Lookup<S: Side> {
    /// Sequences have one length: each role computes a work tile from its index.
    Dense(Geometry<S::U32>),
    /// Sequences are in a table. The producer fetches tile indices from a counter.
    Varlen {
        /// The table.
        table: Table<S>,
        /// The address of the tile counter, which has 32 bits.
        tile_counter: S::Pointer,
    },
}

impl<A: Side> Lookup<A> {
    #[track_caller]
    pub(crate) fn pass<B: Side>(self, by: &mut impl Pass<A, B>) -> Lookup<B> {
        match self {
            Lookup::Dense(geometry) => {
                Lookup::Dense(geometry.map_named(&mut |name: &str, number| by.u32(name, number)))
            }
            Lookup::Varlen { table, tile_counter } => Lookup::Varlen {
                table: table.pass(by),
                tile_counter: by.pointer("tile_counter", tile_counter),
            },
        }
    }
}

impl<'k> Lookup<InKernel<'k>> {
    /// The tile sizes and the mask.
    pub(crate) fn tiling(&self) -> &Tiling<U32<'k>> {
        match self {
            Lookup::Dense(geometry) => &geometry.tiling,
            Lookup::Varlen { table, .. } => &table.tiling,
        }
    }

    /// The keys that query row `row` may see in a sequence of lengths `lens`; unspecified for a row beyond the end.
    #[track_caller]
    pub(crate) fn keys(&self, row: U32<'k>, lens: SeqLens<U32<'k>>) -> VisibleKeys<U32<'k>> {
        keys(self.tiling(), row, lens)
    }

    /// The KV blocks that tile `m_block` of a head visits in a sequence of lengths `lens`; none if there is no such
    /// tile.
    #[track_caller]
    pub(crate) fn kv_range(&self, m_block: U32<'k>, lens: SeqLens<U32<'k>>) -> KvRange<U32<'k>> {
        self.tiling().kv_range(m_block, lens)
    }
}
