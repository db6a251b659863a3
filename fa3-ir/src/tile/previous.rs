//! Slots that a loop's next round reads once more.

use std::panic::Location;

use crate::Fault;
use crate::lang::{B32, Builder, Consumer, FullSlot, Ring, Tile, Var};

/// The slot that the round before has read: the same that this round reads, or the one before that, which then has
/// still to be given back.
#[derive(Debug)]
pub struct Previous<'k, const N: usize> {
    builder: &'k Builder,
    ring: Ring<'k, N>,
    stage: Var<'k, B32>,
}

impl<'k, const N: usize> Consumer<'k, N> {
    /// A place for the slot of the round before, with none in it. The ring must have several stages.
    #[track_caller]
    pub fn previous(&self) -> Previous<'k, N> {
        let b = self.builder();
        if !self.has_stages() {
            let what = "stages of a ring of which a round reads two slots";
            b.fault(Fault::Limit { what, given: 1, min: 2, max: u32::MAX, multiple: 1 });
        }
        Previous { builder: b, ring: self.ring(), stage: b.var("previous", 0) }
    }
}

impl<'k> Previous<'k, 1> {
    /// The tile of the slot.
    #[track_caller]
    pub fn tile(&self) -> Tile<'_, 'k> {
        let [tile] = self.ring.tiles_of_stage(Some(self.stage.get()));
        tile
    }
}

impl<'k, const N: usize> Previous<'k, N> {
    /// Begins with a slot: there is no round before.
    #[track_caller]
    pub fn begin(&mut self, slot: &FullSlot<'k, N>) {
        self.stage.set(slot.stage().unwrap_or_else(|| self.builder.value(0)));
    }

    /// Goes on to the slot that this round has read. One that it has not read is given back: products that read it are
    /// complete.
    #[track_caller]
    pub fn advance(&mut self, slot: &FullSlot<'k, N>) {
        let stage = slot.stage().unwrap_or_else(|| self.builder.value(0));
        self.builder.if_uniform(self.stage.now().ne(stage), || {
            FullSlot::of_stage(self.ring.clone(), Some(self.stage.get()), Location::caller()).release();
            self.stage.set(stage);
        });
    }

    /// Gives the slot back: products that read it are complete, and the next round begins anew.
    #[track_caller]
    pub fn end(&mut self) {
        FullSlot::of_stage(self.ring.clone(), Some(self.stage.get()), Location::caller()).release();
    }

    /// Takes over the slot that the last rounds have read, which the next round gives back. After the last round
    /// nobody does.
    #[track_caller]
    pub fn keep(&mut self, slot: FullSlot<'k, N>) {
        _ = slot.kept(Location::caller());
    }
}
