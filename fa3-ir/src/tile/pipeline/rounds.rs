//! Rounds of a loop, whose number gives the next stage of each pipeline.

use crate::lang::{B32, Builder, V, Var};

/// The number of a round, which counts from 0. A warp that fills or empties a stage of several pipelines in every round
/// then needs no registers for the stage and the parity of each pipeline. If the warp waits twice for a pipeline in one
/// round, it waits for the same stage both times.
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

    /// Advances to the next round. The loop does this once in each.
    #[track_caller]
    pub fn next(&self) {
        self.count.update(|count| count + 1);
    }

    /// Rounds for a pipeline that lags by `rounds` rounds: it is at the stage of an earlier round.
    pub fn late(self, rounds: u32) -> Rounds<'k> {
        Rounds { late: self.late + rounds, ..self }
    }

    /// Rounds for a pipeline that takes a stage only once in `rounds` rounds, a power of 2.
    pub fn every(self, rounds: u32) -> Rounds<'k> {
        Rounds { every: self.every * rounds, ..self }
    }

    /// The number of this round.
    #[track_caller]
    pub fn number(self) -> V<'k, B32> {
        if self.late == 0 { self.count.get() } else { self.count.get() - self.late }
    }

    /// The stage of a pipeline of `stages` stages, a power of 2.
    #[track_caller]
    pub(super) fn stage(self, stages: u32) -> V<'k, B32> {
        let number = self.number();
        let stage = if self.every == 1 { number } else { number >> self.every.ilog2() };
        stage & (stages - 1)
    }

    /// The parity of the phase of [`Rounds::stage`]. The first phase of a stage has parity `initial`.
    #[track_caller]
    pub(super) fn parity(self, stages: u32, initial: u32) -> V<'k, B32> {
        let parity = (self.number() >> (stages * self.every).ilog2()) & 1;
        if initial == 0 { parity } else { parity ^ initial }
    }
}
