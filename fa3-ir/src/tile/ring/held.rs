//! Slots that a loop gives back in a later round than it gets them.

use std::panic::Location;

use super::{Consumer, FullSlot, Ring, Stage};
use crate::lang::{B32, Pred, Tile, V, Var};
use crate::watch::DutyId;
use crate::{Fault, Source};

/// A full slot that a loop carries from one round to the next, to be given back when what read it is complete: products
/// have been waited for, and after ordinary loads there was [`FullSlot::fence_loads`].
#[must_use = "the last slot must be released"]
#[derive(Debug)]
pub struct HeldSlot<'k, const N: usize> {
    ring: Ring<'k, N>,
    /// None if the ring has only one.
    stage: Option<Var<'k, B32>>,
    state: State<'k>,
}

/// Whether a [`HeldSlot`] holds one.
#[derive(Clone, Copy, Debug)]
enum State<'k> {
    /// Always, until it is released.
    Full(DutyId),
    /// Where this is true.
    At(Var<'k, Pred>),
    /// The kernel knows.
    Known,
}

impl<'k, const N: usize> FullSlot<'k, N> {
    /// Holds the slot for a later round of the loop.
    #[track_caller]
    pub fn hold(self) -> HeldSlot<'k, N> {
        let (ring, source) = (self.ring.clone(), Location::caller());
        let stage = self.kept(source).map(|stage| ring.builder.var("held", stage));
        let due =
            ring.builder.watch().due(format!("the held slot of ring {} is released", ring.name), source);
        HeldSlot { ring, stage, state: State::Full(due) }
    }

    /// Somebody else gives it back. Its stage, if its ring has several.
    fn kept(self, source: Source) -> Option<V<'k, B32>> {
        self.ring.builder.watch().done(self.due, source);
        self.number()
    }

    /// Its stage, if its ring has several.
    fn number(&self) -> Option<V<'k, B32>> {
        match self.stage {
            Stage::Known(_) => None,
            Stage::Number(stage) => Some(stage),
        }
    }
}

impl<'k, const N: usize> Consumer<'k, N> {
    /// Holds no slot yet.
    #[track_caller]
    pub fn held(&self) -> HeldSlot<'k, N> {
        let ring = self.cursor.ring.clone();
        let stage = (ring.stages > 1).then(|| ring.builder.var("held", 0));
        let holds = ring.builder.var("holds", false);
        HeldSlot { ring, stage, state: State::At(holds) }
    }

    /// The same for a loop that knows whether there is one, and whose rounds read it beside a slot of their own: the
    /// ring must have several stages.
    #[track_caller]
    pub fn held_beside(&self) -> HeldSlot<'k, N> {
        let ring = self.cursor.ring.clone();
        let b = ring.builder;
        if ring.stages == 1 {
            let what = "stages of a ring of which a round reads two slots";
            b.fault(Fault::Limit { what, given: 1, min: 2, max: u32::MAX, multiple: 1 });
        }
        HeldSlot { ring, stage: Some(b.var("held", 0)), state: State::Known }
    }
}

impl<'k> HeldSlot<'k, 1> {
    /// The tile of the slot.
    #[track_caller]
    pub fn tile(&self) -> Tile<'_, 'k> {
        let [tile] = self.ring.tiles(self.stage());
        tile
    }
}

impl<'k, const N: usize> HeldSlot<'k, N> {
    /// Holds a slot. It must hold none.
    #[track_caller]
    pub fn hold(&mut self, slot: FullSlot<'k, N>) {
        self.begin(&slot);
        self.keep(slot);
        if let State::At(holds) = self.state {
            holds.set(true);
        }
    }

    /// Holds `next`, and gives back what was held.
    #[track_caller]
    pub fn replace(&mut self, next: FullSlot<'k, N>) {
        let old = self.slot();
        self.begin(&next);
        self.keep(next);
        self.give_back(old);
    }

    /// Gives back what it holds, if it holds a slot.
    #[track_caller]
    pub fn release(&mut self) {
        let _one = self.ring.builder.as_one();
        let slot = self.slot();
        self.give_back(slot);
        match self.state {
            State::Full(due) => self.ring.builder.watch().done(due, Location::caller()),
            State::At(holds) => holds.set(false),
            State::Known => {}
        }
    }

    /// Gives back `slot`, the one held so far.
    #[track_caller]
    fn give_back(&self, slot: FullSlot<'k, N>) {
        match self.state {
            State::Full(_) | State::Known => slot.release(),
            State::At(holds) => {
                slot.release_if(holds);
                slot.released();
            }
        }
    }

    /// Reads `slot` in this round and the next. This loop gives it back later, by [`HeldSlot::advance`] or
    /// [`HeldSlot::release`].
    #[track_caller]
    pub fn begin(&mut self, slot: &FullSlot<'k, N>) {
        let ring = &self.ring;
        if slot.ring.full != ring.full {
            ring.builder.misfit(
                "a held slot",
                format!("ring {}", slot.ring.name),
                format!("ring {}", ring.name),
            );
        }
        if let (Some(held), Some(stage)) = (self.stage, slot.number()) {
            held.set(stage);
        }
    }

    /// Goes on to the slot that this round has read. Gives back the one before, if that is another.
    #[track_caller]
    pub fn advance(&mut self, slot: &FullSlot<'k, N>) {
        let Some((held, stage)) = self.stage.zip(slot.number()) else { return };
        self.ring.builder.if_uniform(held.now().ne(stage), || {
            self.release();
            held.set(stage);
        });
    }

    /// Takes over a slot that [`HeldSlot::advance`] has gone on to.
    #[track_caller]
    pub fn keep(&mut self, slot: FullSlot<'k, N>) {
        _ = slot.kept(Location::caller());
    }

    /// The slot, with a duty to give it back.
    #[track_caller]
    fn slot(&self) -> FullSlot<'k, N> {
        FullSlot::new(self.ring.clone(), self.stage(), Location::caller())
    }

    #[track_caller]
    fn stage(&self) -> Stage<'k> {
        self.stage.map_or(self.ring.only_stage(), |stage| Stage::Number(stage.get()))
    }
}
