//! Stages that a loop releases in a later round than it gets them.

use std::panic::Location;

use super::{Consumer, FullSlot, Ring, Stage};
use crate::lang::{B32, Pred, Tile, V, Var};
use crate::watch::DutyId;
use crate::{Fault, Source};

/// A full stage that a loop carries from one round to the next. It is released when everything that reads it is
/// complete: products have been waited for, and after ordinary loads there was [`FullSlot::fence_loads`].
#[must_use = "the last slot must be released"]
#[derive(Debug)]
pub struct HeldSlot<'k, const N: usize> {
    ring: Ring<'k, N>,
    /// `None` if the ring has only one stage.
    stage: Option<Var<'k, B32>>,
    state: State<'k>,
}

/// Whether a [`HeldSlot`] holds a stage.
#[derive(Clone, Copy, Debug)]
enum State<'k> {
    /// It does, until it is released.
    Full(DutyId),
    /// It does where this is true.
    At(Var<'k, Pred>),
    /// The kernel knows whether it does.
    Known,
}

impl<'k, const N: usize> FullSlot<'k, N> {
    /// Holds the stage for a later round of the loop.
    #[track_caller]
    pub fn hold(self) -> HeldSlot<'k, N> {
        let (ring, source) = (self.ring.clone(), Location::caller());
        let stage = self.kept(source).map(|stage| ring.builder.var("held", stage));
        let due =
            ring.builder.watch().due(format!("the held slot of ring {} is released", ring.name), source);
        HeldSlot { ring, stage, state: State::Full(due) }
    }

    /// Ends the duty to release the stage, which another token has. Returns its number, if the ring has several stages.
    fn kept(self, source: Source) -> Option<V<'k, B32>> {
        self.ring.builder.watch().done(self.due, source);
        self.number()
    }

    /// The stage's number, if its ring has several.
    fn number(&self) -> Option<V<'k, B32>> {
        match self.stage {
            Stage::Known(_) => None,
            Stage::Number(stage) => Some(stage),
        }
    }
}

impl<'k, const N: usize> Consumer<'k, N> {
    /// A [`HeldSlot`] that holds no stage yet.
    #[track_caller]
    pub fn held(&self) -> HeldSlot<'k, N> {
        let ring = self.cursor.ring.clone();
        let stage = (ring.stages > 1).then(|| ring.builder.var("held", 0));
        let holds = ring.builder.var("holds", false);
        HeldSlot { ring, stage, state: State::At(holds) }
    }

    /// Like [`Consumer::held`], for a loop that knows whether it holds a stage, and whose rounds read that stage beside
    /// one of their own: the ring must have several stages.
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
    /// Holds a stage. It must not hold one already.
    #[track_caller]
    pub fn hold(&mut self, slot: FullSlot<'k, N>) {
        self.begin(&slot);
        self.keep(slot);
        if let State::At(holds) = self.state {
            holds.set(true);
        }
    }

    /// Holds `next`, and releases the stage held before.
    #[track_caller]
    pub fn replace(&mut self, next: FullSlot<'k, N>) {
        let old = self.slot();
        self.begin(&next);
        self.keep(next);
        self.give_back(old);
    }

    /// Releases its stage, if it holds one.
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

    /// Releases `slot`, the one held so far.
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

    /// Reads `slot` in this round and the next. This loop releases it later, by [`HeldSlot::advance`] or
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

    /// Advances to the stage that this round has read, and releases the one before, unless it is the same.
    #[track_caller]
    pub fn advance(&mut self, slot: &FullSlot<'k, N>) {
        let Some((held, stage)) = self.stage.zip(slot.number()) else { return };
        self.ring.builder.if_uniform(held.now().ne(stage), || {
            self.release();
            held.set(stage);
        });
    }

    /// Takes over a stage to which [`HeldSlot::advance`] has advanced.
    #[track_caller]
    pub fn keep(&mut self, slot: FullSlot<'k, N>) {
        _ = slot.kept(Location::caller());
    }

    /// A token for the held stage, with the duty to release it.
    #[track_caller]
    fn slot(&self) -> FullSlot<'k, N> {
        FullSlot::new(self.ring.clone(), self.stage(), Location::caller())
    }

    #[track_caller]
    fn stage(&self) -> Stage<'k> {
        self.stage.map_or(self.ring.only_stage(), |stage| Stage::Number(stage.get()))
    }
}
