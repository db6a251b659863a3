//! The state of deterministic additions to dQ.

use fa3_ir::lang::*;
use fa3_sched::backward::DkvTile;

use crate::kernels::bwd::params::InOrderParams;
use crate::kernels::params::InKernel;
use crate::kernels::parts::lookup::Lookup;
use crate::kernels::parts::strided::Strided;

/// Number of blocks by which the semaphore warp runs ahead of the writers.
const AHEAD: u32 = 4;

/// Bytes of a consumer's action in shared memory: four words.
const ACTION: u32 = 16;

/// Bytes of a word of [`Ends::Sent`].
pub(super) const END: u32 = 4;

/// The state that warps share, beside [`Adding`](super::state::Adding), if tiles add in order.
pub(super) struct InOrder<'k> {
    /// The pipeline by which the semaphore warp says that a block's accumulator is ready for this tile.
    pub(super) ready: Pipeline<'k, 0>,
    /// Four words for each consumer: the [`DqAction`] of its next dQ, and that dQ's sequence, head and first row.
    actions: Region,
    pub(super) ends: Ends<'k>,
    pub(super) params: InOrderParams<InKernel<'k>>,
}

/// End row (exclusive), in memory, of the sequence to which each consumer's next dQ belongs.
pub(super) enum Ends<'k> {
    /// One end for all sequences.
    Dense(U32<'k>),
    /// A word for each consumer, which its writer stores.
    Sent(Region),
}

/// The action of a consumer on its dQ.
#[derive(Clone, Copy)]
pub(super) enum DqAction {
    /// Leaves dQ in its stage: the writer adds it in memory.
    Leave = 0,
    /// Writes dQ, because it is the only part.
    Write = 1,
    /// Adds dQ, the last part, to the accumulator, which the writer has loaded into the stage, and writes the sum.
    AddAndWrite = 2,
}

impl<'k> InOrder<'k> {
    /// Declares the state.
    #[track_caller]
    pub(super) fn declare(
        b: &'k Builder,
        tile: &DkvTile,
        lookup: &Lookup<InKernel<'k>>,
        params: InOrderParams<InKernel<'k>>,
    ) -> InOrder<'k> {
        let consumers = tile.consumers();
        InOrder {
            ready: b.stored_pipeline("ready", AHEAD, [1, consumers], []),
            actions: b.region("actions", ACTION * consumers, ACTION),
            ends: match lookup {
                Lookup::Dense(geometry) => Ends::Dense(geometry.lens.k),
                Lookup::Varlen { .. } => Ends::Sent(b.region("ends of rows", END * consumers, END)),
            },
            params,
        }
    }

    /// The tensor dQ.
    pub(super) fn dq(&self) -> &Strided<InKernel<'k>> {
        &self.params.dq
    }

    /// The end row of the sequence to which the next dQ of consumer `me` belongs.
    #[track_caller]
    pub(super) fn end(&self, b: &'k Builder, me: U32<'k>) -> U32<'k> {
        match self.ends {
            Ends::Dense(end) => end,
            Ends::Sent(ends) => b.load(me.mad(END, b.address(ends))),
        }
    }

    /// The shared-memory address of the action of consumer `me`.
    #[track_caller]
    pub(super) fn action(&self, b: &'k Builder, me: U32<'k>) -> U32<'k> {
        me.mad(ACTION, b.address(self.actions))
    }
}
