//! Pipelines whose stage i goes back and forth between two warpgroups or warps: one hands it over, the other returns it.

use std::panic::Location;

use super::{EmptyStage, Pipeline};
use crate::lang::{B32, Tile, V, Var};

impl<'k, const N: usize> Pipeline<'k, N> {
    /// Stage `number` as a pipeline of its own, for a pipeline whose stages different warps fill or empty. A computed number is
    /// not checked.
    #[track_caller]
    pub fn stage(&self, number: V<'k, B32>) -> Pipeline<'k, N> {
        self.builder.watch().divide(self.watched);
        Pipeline { stages: 1, first: Some(number), ..self.clone() }
    }

    /// The state of a warp that hands the only stage of this pipeline to its consumer and gets it back with the consumer's
    /// results.
    #[track_caller]
    pub fn handoff(&self) -> StageHandoff<'k, N> {
        StageHandoff { pipeline: self.clone(), parity: self.builder.var("parity", 0) }
    }
}

/// Hands over the only stage of a pipeline time after time. It has the stage at first.
#[derive(Debug)]
pub struct StageHandoff<'k, const N: usize> {
    pipeline: Pipeline<'k, N>,
    parity: Var<'k, B32>,
}

impl<'k, const N: usize> StageHandoff<'k, N> {
    /// The stage, to be filled or not, and handed over by a commit. It must be here.
    #[track_caller]
    pub fn hand_over(&mut self) -> EmptyStage<'k, N> {
        let b = self.pipeline.builder;
        let due = b
            .watch()
            .due(format!("a stage of pipeline {} is committed", self.pipeline.name), Location::caller());
        EmptyStage::new(self.pipeline.clone(), self.pipeline.only_stage(), due)
    }

    /// Waits until the stage is returned. Returns its tiles, with the consumer's results.
    #[track_caller]
    pub fn take_back(&mut self) -> [Tile<'_, 'k>; N] {
        let stage = self.pipeline.only_stage();
        let b = self.pipeline.builder;
        let _one = b.as_one();
        b.mbarrier_wait(self.pipeline.barrier(self.pipeline.empty, stage), self.parity);
        self.parity.update(|parity| parity ^ 1);
        self.pipeline.tiles(stage)
    }
}
