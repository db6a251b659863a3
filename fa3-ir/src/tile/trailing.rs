//! Slots that are given back a round of a loop late.

use std::panic::Location;

use crate::lang::{B32, Builder, Consumer, FullSlot, Pred, Ring, Var};

/// The slot of a ring that a loop's last round has read, to be given back when the products that read it are complete:
/// in the next round, or after the loop. Of a [`HeldSlot`](crate::lang::HeldSlot) it differs in that at first it holds
/// none.
#[must_use = "the last slot must be released"]
#[derive(Debug)]
pub struct Trailing<'k, const N: usize> {
    builder: &'k Builder,
    ring: Ring<'k, N>,
    /// None if the ring has only one.
    stage: Option<Var<'k, B32>>,
    holds: Var<'k, Pred>,
}

impl<'k, const N: usize> Consumer<'k, N> {
    /// A place for the slots that this consumer gets, with none in it.
    #[track_caller]
    pub fn trailing(&self) -> Trailing<'k, N> {
        let b = self.builder();
        let stage = self.has_stages().then(|| b.var("trailing", 0));
        Trailing { builder: b, ring: self.ring(), stage, holds: b.var("holds", false) }
    }
}

impl<'k, const N: usize> Trailing<'k, N> {
    /// Keeps a slot for the next round. It must hold none.
    #[track_caller]
    pub fn hold(&mut self, slot: FullSlot<'k, N>) {
        if let (Some(held), Some(stage)) = (self.stage, slot.kept(Location::caller())) {
            held.set(stage);
        }
        self.holds.set(true);
    }

    /// Gives back what it holds, if it holds a slot. This warp has read it: products are complete, and after ordinary
    /// loads there was [`FullSlot::fence_loads`].
    #[track_caller]
    pub fn release(&mut self) {
        let b = self.builder;
        let _one = b.as_one();
        let slot = FullSlot::of_stage(self.ring.clone(), self.stage.map(Var::get), Location::caller());
        slot.release_if(self.holds);
        slot.released();
        self.holds.set(false);
    }
}
