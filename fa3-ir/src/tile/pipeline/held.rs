//! Stages that a loop gets in one round and releases in a later round.

use std::panic::Location;

use super::{Consumer, FullStage, Pipeline, StageIndex};
use crate::lang::{B32, Pred, Tile, V, Var};
use crate::watch::DutyId;
use crate::{Fault, Source};

/// A full stage that a loop carries from one round to the next. It is released when everything that reads it is
/// complete: products have been waited for, and after ordinary loads there was [`FullStage::fence_loads`].
#[must_use = "the last stage must be released"]
#[derive(Debug)]
pub struct HeldStage<'k, const N: usize> {
    pipeline: Pipeline<'k, N>,
    /// `None` if the pipeline has only one stage.
    index: Option<Var<'k, B32>>,
    state: State<'k>,
}

/// Whether a [`HeldStage`] holds a stage.
#[derive(Clone, Copy, Debug)]
enum State<'k> {
    /// It holds a stage until the stage is released.
    Full(DutyId),
    /// It holds a stage where this predicate is true.
    At(Var<'k, Pred>),
    /// The kernel's loop knows in which rounds it holds a stage.
    Known,
}

impl<'k, const N: usize> FullStage<'k, N> {
    /// Holds the stage for a later round of the loop.
    #[track_caller]
    pub fn hold(self) -> HeldStage<'k, N> {
        let (pipeline, source) = (self.pipeline.clone(), Location::caller());
        let index = self.kept(source).map(|index| pipeline.builder.var("held", index));
        let due = pipeline.due("released", source);
        HeldStage { pipeline, index, state: State::Full(due) }
    }

    /// Ends this token's duty to release the stage, which passes to another token. Returns the stage's index, if the
    /// pipeline has several stages.
    fn kept(self, source: Source) -> Option<V<'k, B32>> {
        self.pipeline.builder.watch().done(self.due, source);
        self.number()
    }

    /// The stage's index, if its pipeline has several.
    fn number(&self) -> Option<V<'k, B32>> {
        match self.index {
            StageIndex::Known(_) => None,
            StageIndex::Number(index) => Some(index),
        }
    }
}

impl<'k, const N: usize> Consumer<'k, N> {
    /// A [`HeldStage`] that holds no stage yet.
    #[track_caller]
    pub fn held(&self) -> HeldStage<'k, N> {
        let pipeline = self.cursor.pipeline.clone();
        let index = (pipeline.stages > 1).then(|| pipeline.builder.var("held", 0));
        let holds = pipeline.builder.var("holds", false);
        HeldStage { pipeline, index, state: State::At(holds) }
    }

    /// Like [`Consumer::held`], for a loop that itself knows whether a stage is held. Its rounds read the held stage
    /// and one stage of their own, so that the pipeline must have several stages.
    #[track_caller]
    pub fn held_beside(&self) -> HeldStage<'k, N> {
        let pipeline = self.cursor.pipeline.clone();
        let b = pipeline.builder;
        if pipeline.stages == 1 {
            let what = "stages of a pipeline, two of which a round reads";
            b.fault(Fault::Limit { what, given: 1, min: 2, max: u32::MAX, multiple: 1 });
        }
        HeldStage { pipeline, index: Some(b.var("held", 0)), state: State::Known }
    }
}

impl<'k> HeldStage<'k, 1> {
    /// The tile of the stage.
    #[track_caller]
    pub fn tile(&self) -> Tile<'_, 'k> {
        let [tile] = self.pipeline.tiles(self.index());
        tile
    }
}

impl<'k, const N: usize> HeldStage<'k, N> {
    /// Holds a stage. It must not hold one already.
    #[track_caller]
    pub fn hold(&mut self, stage: FullStage<'k, N>) {
        self.begin(&stage);
        self.keep(stage);
        if let State::At(holds) = self.state {
            holds.set(true);
        }
    }

    /// Holds `next`, and releases the stage held before.
    #[track_caller]
    pub fn replace(&mut self, next: FullStage<'k, N>) {
        let old = self.stage();
        self.begin(&next);
        self.keep(next);
        self.give_back(old);
    }

    /// Releases the held stage, if any.
    #[track_caller]
    pub fn release(&mut self) {
        let _one = self.pipeline.builder.as_one();
        let stage = self.stage();
        self.give_back(stage);
        match self.state {
            State::Full(due) => self.pipeline.builder.watch().done(due, Location::caller()),
            State::At(holds) => holds.set(false),
            State::Known => {}
        }
    }

    /// Releases `stage`, which was held so far.
    #[track_caller]
    fn give_back(&self, stage: FullStage<'k, N>) {
        match self.state {
            State::Full(_) | State::Known => stage.release(),
            State::At(holds) => {
                stage.release_if(holds);
                stage.released();
            }
        }
    }

    /// Holds `stage`, which this round and the next round read. The loop releases it later, by [`HeldStage::advance`]
    /// or [`HeldStage::release`].
    #[track_caller]
    pub fn begin(&mut self, stage: &FullStage<'k, N>) {
        let pipeline = &self.pipeline;
        if stage.pipeline.full != pipeline.full {
            pipeline.builder.misfit(
                "a held stage",
                format!("pipeline {}", stage.pipeline.name),
                format!("pipeline {}", pipeline.name),
            );
        }
        if let Some((held, index)) = self.index.zip(stage.number()) {
            held.set(index);
        }
    }

    /// Advances to the stage that this round has read, and releases the stage held before, if the two stages differ.
    #[track_caller]
    pub fn advance(&mut self, stage: &FullStage<'k, N>) {
        let Some((held, index)) = self.index.zip(stage.number()) else { return };
        self.pipeline.builder.if_uniform(held.now().ne(index), || {
            self.release();
            held.set(index);
        });
    }

    /// Takes over a stage to which [`HeldStage::advance`] has advanced.
    #[track_caller]
    pub fn keep(&mut self, stage: FullStage<'k, N>) {
        _ = stage.kept(Location::caller());
    }

    /// A token for the held stage, with the duty to release it.
    #[track_caller]
    fn stage(&self) -> FullStage<'k, N> {
        FullStage::new(self.pipeline.clone(), self.index(), Location::caller())
    }

    #[track_caller]
    fn index(&self) -> StageIndex<'k> {
        self.index.map_or(self.pipeline.only_stage(), |index| StageIndex::Number(index.get()))
    }
}
