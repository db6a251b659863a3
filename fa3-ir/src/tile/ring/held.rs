//! Slots that a loop carries along.

use std::panic::Location;

use super::{FullSlot, Ring, Stage};
use crate::Source;
use crate::lang::{B32, Var};
use crate::watch::DutyId;

/// A full slot that a loop carries from one round to the next.
#[must_use = "the last slot must be taken and released"]
#[derive(Debug)]
pub struct HeldSlot<'k, const N: usize> {
    pub(super) ring: Ring<'k, N>,
    /// None if the ring has only one.
    pub(super) stage: Option<Var<'k, B32>>,
    pub(super) due: DutyId,
}

impl<'k, const N: usize> HeldSlot<'k, N> {
    /// Holds `next` instead, and gives what was held.
    #[track_caller]
    pub fn replace(&mut self, next: FullSlot<'k, N>) -> FullSlot<'k, N> {
        let b = self.ring.builder;
        b.watch().done(next.due, Location::caller());
        if next.ring.full != self.ring.full {
            b.misfit("a held slot", format!("ring {}", next.ring.name), format!("ring {}", self.ring.name));
        }
        let old = self.slot(Location::caller());
        if let (Some(held), Stage::Number(next)) = (self.stage, next.stage) {
            held.set(next);
        }
        old
    }

    /// Gives what is held.
    #[track_caller]
    pub fn take(self) -> FullSlot<'k, N> {
        self.ring.builder.watch().done(self.due, Location::caller());
        self.slot(Location::caller())
    }

    #[track_caller]
    fn slot(&self, source: Source) -> FullSlot<'k, N> {
        let stage = match self.stage {
            None => Stage::Known(0),
            Some(stage) => Stage::Number(stage.get()),
        };
        let _one = self.ring.builder.as_one();
        FullSlot::new(self.ring.clone(), stage, source)
    }
}
