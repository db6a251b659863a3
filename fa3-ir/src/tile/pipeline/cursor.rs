//! A position in a pipeline.

use super::{Pipeline, Rounds, StageIndex};
use crate::Region;
use crate::lang::{B32, Pred, V, Var};

/// A position in a pipeline: the next stage and its phase.
#[derive(Debug)]
pub(super) struct Cursor<'k, const N: usize> {
    pub(super) pipeline: Pipeline<'k, N>,
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
    pub(super) fn new(pipeline: &Pipeline<'k, N>, parity: u32) -> Cursor<'k, N> {
        let b = pipeline.builder;
        let stage = if pipeline.stages > 1 { Some(b.var("stage", 0)) } else { None };
        Cursor { pipeline: pipeline.clone(), next: Next::Kept { stage, parity: b.var("parity", parity) } }
    }

    #[track_caller]
    pub(super) fn by(pipeline: &Pipeline<'k, N>, rounds: Rounds<'k>, parity: u32) -> Cursor<'k, N> {
        // For other numbers of stages, the stage of a round would be the remainder of a division.
        if pipeline.stages.is_power_of_two() {
            Cursor { pipeline: pipeline.clone(), next: Next::OfRound { rounds, initial: parity } }
        } else {
            Cursor::new(pipeline, parity)
        }
    }

    /// Whether the next stage is full (if `of` is the region of full mbarriers) or empty (of empty mbarriers) now.
    #[track_caller]
    pub(super) fn test(&self, of: Region) -> V<'k, Pred> {
        let pipeline = &self.pipeline;
        let b = pipeline.builder;
        match self.next {
            Next::OfRound { rounds, initial } => {
                let stage = match pipeline.stages {
                    1 => pipeline.only_stage(),
                    stages => StageIndex::Number(rounds.stage(stages)),
                };
                b.mbarrier_test_wait(pipeline.barrier(of, stage), rounds.parity(pipeline.stages, initial))
            }
            Next::Kept { stage, parity } => {
                let stage = stage.map_or(pipeline.only_stage(), |stage| StageIndex::Number(stage.get()));
                b.mbarrier_test_wait(pipeline.barrier(of, stage), parity)
            }
        }
    }

    /// Waits until the next stage is full, or empty, as in [`Cursor::test`], and advances to the stage after it.
    #[track_caller]
    pub(super) fn next(&self, of: Region) -> StageIndex<'k> {
        let b = self.pipeline.builder;
        let (next, kept) = match self.next {
            Next::OfRound { rounds, initial } => {
                let stages = self.pipeline.stages;
                let stage = match stages {
                    1 => self.pipeline.only_stage(),
                    _ => StageIndex::Number(rounds.stage(stages)),
                };
                b.mbarrier_wait(self.pipeline.barrier(of, stage), rounds.parity(stages, initial));
                return stage;
            }
            Next::Kept { stage: None, parity } => {
                let stage = self.pipeline.only_stage();
                b.mbarrier_wait(self.pipeline.barrier(of, stage), parity);
                parity.update(|parity| parity ^ 1);
                return stage;
            }
            Next::Kept { stage: Some(stage), parity } => (stage, parity),
        };
        let stage = next.get();
        b.mbarrier_wait(self.pipeline.barrier(of, StageIndex::Number(stage)), kept);
        let after = stage + 1;
        let wraps = after.eq(self.pipeline.stages);
        let (first, flip) = (wraps.select(0, after), wraps.select::<B32>(1, 0));
        let parity = kept ^ flip;
        next.set(first);
        kept.set(parity);
        StageIndex::Number(stage)
    }
}
