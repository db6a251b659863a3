//! The state of additions to dQ in the order of keys.

use fa3_ir::lang::*;
use fa3_sched::backward::DkvTile;

use crate::kernels::bwd::params::InOrderParams;
use crate::kernels::params::InKernel;
use crate::kernels::parts::lookup::Lookup;
use crate::kernels::parts::strided::Strided;

/// Blocks by which the watch runs ahead.
const AHEAD: u32 = 4;

/// Bytes of a [`Goal`].
const GOAL: u32 = 16;

/// Bytes of the end of rows.
pub(super) const END: u32 = 4;

/// The state that the warps share besides if tiles add in order.
pub(super) struct InOrder<'k> {
    /// Blocks whose sums are ready for this tile's part.
    pub(super) ready: Ring<'k, 0>,
    /// Fate of the next dQ of each consumer: a [`Goal`], then batch, head and first row of the block in memory.
    goals: Region,
    pub(super) ends: Ends<'k>,
    pub(super) params: InOrderParams<InKernel<'k>>,
}

/// The end of the rows of the sequence of each consumer's next dQ, in memory.
pub(super) enum Ends<'k> {
    /// One for all sequences.
    Equal(V<'k, B32>),
    /// A word of each consumer's, which its writer writes.
    Said(Region),
}

/// The fate of a consumer's dQ.
#[derive(Clone, Copy)]
pub(super) enum Goal {
    /// The writer adds it to memory.
    Leave = 0,
    /// It is the only part: the consumer writes it.
    Write = 1,
    /// It is the last part: the consumer adds it to the sum so far, which is in its place, and writes that.
    AddAndWrite = 2,
}

impl<'k> InOrder<'k> {
    /// Declares it.
    #[track_caller]
    pub(super) fn declare(
        b: &'k Builder,
        tile: &DkvTile,
        lookup: &Lookup<InKernel<'k>>,
        params: InOrderParams<InKernel<'k>>,
    ) -> InOrder<'k> {
        let consumers = tile.consumers();
        InOrder {
            ready: b.stored_ring("ready", AHEAD, [1, consumers], []),
            goals: b.region("goals", GOAL * consumers, GOAL),
            ends: match lookup {
                Lookup::Equal(geometry) => Ends::Equal(geometry.lens.k),
                Lookup::Listed { .. } => Ends::Said(b.region("ends of rows", END * consumers, END)),
            },
            params,
        }
    }

    /// Where dQ goes.
    pub(super) fn dq(&self) -> &Strided<InKernel<'k>> {
        &self.params.dq
    }

    /// The end of the rows of which the dQ of consumer `me` is.
    #[track_caller]
    pub(super) fn end(&self, b: &'k Builder, me: V<'k, B32>) -> V<'k, B32> {
        match self.ends {
            Ends::Equal(end) => end,
            Ends::Said(ends) => b.load(me.mad(END, b.address(ends))),
        }
    }

    /// The address of what is said to consumer `me`.
    #[track_caller]
    pub(super) fn goal(&self, b: &'k Builder, me: V<'k, B32>) -> V<'k, B32> {
        me.mad(GOAL, b.address(self.goals))
    }
}
