//! A position in a ring.

use super::{Ring, Rounds, Stage};
use crate::Region;
use crate::lang::{B32, Pred, V, Var};

/// A position in a ring: the next stage and its phase.
#[derive(Debug)]
pub(super) struct Cursor<'k, const N: usize> {
    pub(super) ring: Ring<'k, N>,
    next: Next<'k>,
}

/// How the next stage is known.
#[derive(Debug)]
enum Next<'k> {
    /// Kept in registers: the stage, if there are several, and the parity of its phase.
    Kept { stage: Option<Var<'k, B32>>, parity: Var<'k, B32> },
    /// Derived from the number of a round. The first rounds have parity `initial`.
    OfRound { rounds: Rounds<'k>, initial: u32 },
}

impl<'k, const N: usize> Cursor<'k, N> {
    #[track_caller]
    pub(super) fn new(ring: &Ring<'k, N>, parity: u32) -> Cursor<'k, N> {
        let b = ring.builder;
        let stage = if ring.stages > 1 { Some(b.var("stage", 0)) } else { None };
        Cursor { ring: ring.clone(), next: Next::Kept { stage, parity: b.var("parity", parity) } }
    }

    #[track_caller]
    pub(super) fn by(ring: &Ring<'k, N>, rounds: Rounds<'k>, parity: u32) -> Cursor<'k, N> {
        // Other numbers of stages would need a division.
        if ring.stages.is_power_of_two() {
            Cursor { ring: ring.clone(), next: Next::OfRound { rounds, initial: parity } }
        } else {
            Cursor::new(ring, parity)
        }
    }

    /// Whether the next stage is full, or empty, now; `of` has the mbarriers that tell.
    #[track_caller]
    pub(super) fn test(&self, of: Region) -> V<'k, Pred> {
        let ring = &self.ring;
        let b = ring.builder;
        match self.next {
            Next::OfRound { rounds, initial } => {
                let stage = match ring.stages {
                    1 => ring.only_stage(),
                    stages => Stage::Number(rounds.stage(stages)),
                };
                b.mbarrier_test_wait(ring.barrier(of, stage), rounds.parity(ring.stages, initial))
            }
            Next::Kept { stage, parity } => {
                let stage = stage.map_or(ring.only_stage(), |stage| Stage::Number(stage.get()));
                b.mbarrier_test_wait(ring.barrier(of, stage), parity)
            }
        }
    }

    /// Waits until the next stage is full, or empty, and advances to the one after it.
    #[track_caller]
    pub(super) fn next(&self, of: Region) -> Stage<'k> {
        let b = self.ring.builder;
        let (next, kept) = match self.next {
            Next::OfRound { rounds, initial } => {
                let stages = self.ring.stages;
                let stage = match stages {
                    1 => self.ring.only_stage(),
                    _ => Stage::Number(rounds.stage(stages)),
                };
                b.mbarrier_wait(self.ring.barrier(of, stage), rounds.parity(stages, initial));
                return stage;
            }
            Next::Kept { stage: None, parity } => {
                let stage = self.ring.only_stage();
                b.mbarrier_wait(self.ring.barrier(of, stage), parity);
                parity.update(|parity| parity ^ 1);
                return stage;
            }
            Next::Kept { stage: Some(stage), parity } => (stage, parity),
        };
        let stage = next.get();
        b.mbarrier_wait(self.ring.barrier(of, Stage::Number(stage)), kept);
        let after = stage + 1;
        let wraps = after.eq(self.ring.stages);
        let (first, flip) = (wraps.select(0, after), wraps.select::<B32>(1, 0));
        let parity = kept ^ flip;
        next.set(first);
        kept.set(parity);
        Stage::Number(stage)
    }
}
