//! Rounds of a loop, whose number says which slot of each ring is next.

use crate::lang::{B32, Builder, V, Var};

/// The number of a round, which counts from 0. Whoever fills or empties a slot of several rings in every round needs no
/// registers for the stage and the parity of each. A ring that waits twice in a round waits for the same slot.
#[derive(Clone, Copy, Debug)]
pub struct Rounds<'k> {
    count: Var<'k, B32>,
    late: u32,
    every: u32,
}

impl<'k> Rounds<'k> {
    /// Begins with round 0.
    #[track_caller]
    pub fn begin(b: &'k Builder) -> Rounds<'k> {
        Rounds { count: b.var("round", 0), late: 0, every: 1 }
    }

    /// Goes on to the next round, which the loop does once in each.
    #[track_caller]
    pub fn next(&self) {
        self.count.update(|count| count + 1);
    }

    /// The same rounds for a ring that lags: its slot is the one that came so many rounds before.
    pub fn late(self, rounds: u32) -> Rounds<'k> {
        Rounds { late: self.late + rounds, ..self }
    }

    /// The same rounds for a ring of which only one in `rounds`, a power of 2, takes a slot.
    pub fn every(self, rounds: u32) -> Rounds<'k> {
        Rounds { every: self.every * rounds, ..self }
    }

    /// The number of this round.
    #[track_caller]
    pub fn number(self) -> V<'k, B32> {
        if self.late == 0 { self.count.get() } else { self.count.get() - self.late }
    }

    /// The stage of a ring of so many, a power of 2.
    #[track_caller]
    pub(super) fn stage(self, stages: u32) -> V<'k, B32> {
        let number = self.number();
        let slot = if self.every == 1 { number } else { number >> self.every.ilog2() };
        slot & (stages - 1)
    }

    /// The parity of that stage's phase, if that of its first one is `initial`.
    #[track_caller]
    pub(super) fn parity(self, stages: u32, initial: u32) -> V<'k, B32> {
        let parity = (self.number() >> (stages * self.every).ilog2()) & 1;
        if initial == 0 { parity } else { parity ^ initial }
    }
}
