//! A consumer's share of dQ. The consumer stores dSᵀ of its keys for every block. It reads dSᵀ of all keys one block
//! later, when the other consumer has stored its part, too. It leaves dQ in a shared-memory stage that its writer warp
//! hands it.

use fa3_ir::lang::*;

use super::order::{DqAction, InOrder};
use super::state::{Adding, Dkv};
use crate::kernels::bwd::gradients::{places_of_registers, registers, store_registers, write};

/// A consumer's share of dQ.
pub(super) struct DqPart<'a, 'k> {
    pub(super) dkv: &'a Dkv<'k>,
    /// The consumer's index.
    pub(super) me: U32<'k>,
    /// Counts the blocks whose dSᵀ this consumer has stored.
    pub(super) blocks: Rounds<'k>,
    /// The pipeline of dSᵀ, for stores of the current block.
    pub(super) ds_in: Producer<'k, 1>,
    /// The pipeline of dSᵀ, for reads of the block before.
    pub(super) ds_out: Consumer<'k, 1>,
    dq_stages: Consumer<'k, 1>,
    in_order: Option<&'a InOrder<'k>>,
}

/// A shared-memory stage for dQ of a block.
pub(super) struct DqStage<'a, 'k> {
    dq_part: &'a DqPart<'a, 'k>,
    stage: FullStage<'k, 1>,
    /// The [`DqAction`], which says how this tile adds to dQ, if tiles add in order.
    action: Option<U32<'k>>,
}

impl<'a, 'k> DqPart<'a, 'k> {
    /// The share of consumer `me`, which computes dQ of one of every `every` blocks.
    #[track_caller]
    pub(super) fn of(
        dkv: &'a Dkv<'k>,
        adding: &'a Adding<'k>,
        me: U32<'k>,
        (blocks, every): (Rounds<'k>, u32),
    ) -> DqPart<'a, 'k> {
        let before = blocks.late(1);
        let (ds_in, ds_out) = (adding.ds.producer_by(blocks), adding.ds.consumer_by(before));
        let dq_stages = adding.dq.stage(me).consumer_by(before.every(every));
        DqPart { dkv, me, blocks, ds_in, ds_out, dq_stages, in_order: adding.in_order.as_ref() }
    }

    /// Stores dSᵀ of the consumer's keys in a block's stage.
    #[track_caller]
    pub(super) fn store(&self, ds: &AFrag<'k>, stage: &EmptyStage<'k, 1>) {
        let [tile] = stage.tiles();
        ds.store(tile.row_block(self.me, 64));
    }

    /// Waits until the writer has finished with the last dQ of this consumer and hands over an empty dQ stage.
    #[track_caller]
    pub(super) fn stage(&mut self) -> DqStage<'_, 'k> {
        let stage = self.dq_stages.wait();
        let b = self.dkv.builder;
        let action = self.in_order.map(|order| b.load::<B32>(order.action(b, self.me)));
        DqStage { dq_part: self, stage, action }
    }
}

impl<'k> DqStage<'_, 'k> {
    /// Leaves dQ in the stage for the writer. If no other tile will add to dQ, writes it to memory instead. The release
    /// of the stage has a fence, which covers all accesses of this thread to shared memory.
    #[track_caller]
    pub(super) fn give(self, dq: &Frag<'k>) {
        let (b, tile) = (dq.builder(), self.stage.tile());
        match self.dq_part.in_order.zip(self.action) {
            None => store_registers(dq, tile),
            Some((order, action)) => b.if_else_uniform(
                action.eq(DqAction::Leave as u32),
                || store_registers(dq, tile),
                || self.write(dq, order, action),
            ),
        }
        self.stage.release_loaded();
    }

    /// Adds the accumulator, unless dQ has a single part, and writes the rows of dQ to memory.
    #[track_caller]
    fn write(&self, dq: &Frag<'k>, order: &InOrder<'k>, action: U32<'k>) {
        let (b, DqPart { dkv, me, .. }) = (dq.builder(), self.dq_part);
        let (mut whole, numbers) = (Frag::zeros(b, dq.cols()), registers(dq));
        whole.map_in_place(|_, at| numbers[at.index()]);
        b.if_uniform(action.eq(DqAction::AddAndWrite as u32), || {
            let mut places = places_of_registers(b, self.stage.tile());
            let mut sum = None;
            whole.map_in_place(|x, at| {
                if at.index() % 4 == 0 {
                    sum = places.next().map(|place| b.load_vector::<F32, 4>(place));
                }
                sum.map_or(x, |sum| x + sum[at.index() % 4])
            });
        });
        let [_, batch, head, row] = b.load_vector::<B32, 4>(order.action(b, *me));
        let (inputs, spec, to) = (&dkv.params.inputs, &dkv.spec, [batch, head, row + b.frag_row()]);
        let format = (spec.elem, spec.head_dim);
        write(whole, Some(inputs.softmax_scale), order.dq(), to, order.end(b, *me), format);
    }
}
