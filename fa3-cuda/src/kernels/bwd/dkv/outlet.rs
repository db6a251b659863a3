//! Where a consumer leaves its dQ: a place in shared memory that its writer lends it.

use fa3_ir::lang::*;

use super::in_order::{Goal, InOrder};
use super::{Adding, Dkv};
use crate::kernels::bwd::gradients::{places_of_registers, registers, store_registers, write};

/// The places of one consumer, one after the other.
pub(super) struct Outlet<'a, 'k> {
    dkv: &'a Dkv<'k>,
    me: V<'k, B32>,
    lent: Consumer<'k, 1>,
    in_order: Option<&'a InOrder<'k>>,
}

/// A place for dQ of a block.
pub(super) struct Draft<'a, 'k> {
    outlet: &'a Outlet<'a, 'k>,
    slot: FullSlot<'k, 1>,
    /// If tiles add in order: what becomes of dQ.
    goal: Option<V<'k, B32>>,
}

impl<'a, 'k> Outlet<'a, 'k> {
    /// Those of consumer `me`, which leaves dQ in these rounds.
    #[track_caller]
    pub(super) fn of(
        dkv: &'a Dkv<'k>,
        adding: &'a Adding<'k>,
        me: V<'k, B32>,
        rounds: Rounds<'k>,
    ) -> Outlet<'a, 'k> {
        let lent = adding.dq.stage(me).consumer_by(rounds);
        Outlet { dkv, me, lent, in_order: adding.in_order.as_ref() }
    }

    /// Waits for the next one: until the writer is done with the dQ before.
    #[track_caller]
    pub(super) fn next(&mut self) -> Draft<'_, 'k> {
        let slot = self.lent.wait();
        let b = self.dkv.builder;
        let goal = self.in_order.map(|order| b.load::<B32>(order.goal(b, self.me)));
        Draft { outlet: self, slot, goal }
    }
}

impl<'k> Draft<'_, 'k> {
    /// Leaves dQ to the writer, or writes it if nobody will add to it any more. The fence is for all that this thread
    /// has done in shared memory.
    #[track_caller]
    pub(super) fn give(self, dq: &Frag<'k>) {
        let (b, tile) = (dq.builder(), self.slot.tile());
        match self.outlet.in_order.zip(self.goal) {
            None => store_registers(dq, tile),
            Some((order, goal)) => b.if_else_uniform(
                goal.eq(Goal::Leave as u32),
                || store_registers(dq, tile),
                || self.write(dq, order, goal),
            ),
        }
        self.slot.release_loaded();
    }

    /// Adds the sum so far, if there is one, and writes rows of dQ.
    #[track_caller]
    fn write(&self, dq: &Frag<'k>, order: &InOrder<'k>, goal: V<'k, B32>) {
        let (b, Outlet { dkv, me, .. }) = (dq.builder(), self.outlet);
        let (mut whole, numbers) = (Frag::zeros(b, dq.cols()), registers(dq));
        whole.map_in_place(|_, at| numbers[at.index()]);
        b.if_uniform(goal.eq(Goal::AddAndWrite as u32), || {
            let mut places = places_of_registers(b, self.slot.tile());
            let mut sum = None;
            whole.map_in_place(|x, at| {
                if at.index() % 4 == 0 {
                    sum = places.next().map(|place| b.load_vector::<F32, 4>(place));
                }
                sum.map_or(x, |sum| x + sum[at.index() % 4])
            });
        });
        let [_, batch, head, row] = b.load_vector::<B32, 4>(order.goal(b, *me));
        let (inputs, spec, to) = (&dkv.params.inputs, &dkv.spec, [batch, head, row + b.frag_row()]);
        let format = (spec.elem, spec.head_dim);
        write(whole, Some(inputs.softmax_scale), order.dq(), to, inputs.geometry.lens.k, format);
    }
}
