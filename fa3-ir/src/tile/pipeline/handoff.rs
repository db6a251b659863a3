//! Stages that go back and forth between two warpgroups or warps: one hands a stage over, the other returns it.

use std::panic::Location;

use super::{EmptyStage, Pipeline};
use crate::lang::{B32, Tile, V, Var};

impl<'k, const N: usize> Pipeline<'k, N> {
    /// Stage `number` as a pipeline of its own, where different warps fill or empty the stages. A computed number is
    /// not checked.
    #[track_caller]
    pub fn stage(&self, number: V<'k, B32>) -> Pipeline<'k, N> {
        self.builder.watch().divide(self.watched);
        Pipeline { stages: 1, first: Some(number), ..self.clone() }
    }

    /// The state of a warp that hands the only stage of this pipeline to its consumer, and takes it back with the
    /// consumer's results.
    #[track_caller]
    pub fn handoff(&self) -> StageHandoff<'k, N> {
        StageHandoff { pipeline: self.clone(), parity: self.builder.var("parity", 0) }
    }
}

/// The producer's end of a pipeline of one stage that its consumer returns filled. The producer has the stage at first.
#[derive(Debug)]
pub struct StageHandoff<'k, const N: usize> {
    pipeline: Pipeline<'k, N>,
    parity: Var<'k, B32>,
}

impl<'k, const N: usize> StageHandoff<'k, N> {
    /// The stage, filled or empty, to be handed over by a commit. It must not be with the consumer already.
    #[track_caller]
    pub fn hand_over(&mut self) -> EmptyStage<'k, N> {
        let due = self.pipeline.due("committed", Location::caller());
        EmptyStage::new(self.pipeline.clone(), self.pipeline.only_stage(), due)
    }

    /// Waits until the consumer has returned the stage. Returns the stage's tiles, with the consumer's results.
    #[track_caller]
    pub fn take_back(&mut self) -> [Tile<'_, 'k>; N] {
        let (pipeline, stage) = (&self.pipeline, self.pipeline.only_stage());
        let _one = pipeline.builder.as_one();
        pipeline.builder.mbarrier_wait(pipeline.barrier(pipeline.empty, stage), self.parity);
        self.parity.update(|parity| parity ^ 1);
        pipeline.tiles(stage)
    }
}
