//! Pipelines of stages in shared memory (CUTLASS: `PipelineTmaAsync`), which a producer fills by TMA copies and
//! consumers empty.
//!
//! Only this module handles stages and phases. A kernel has tokens for stages: [`Producer::acquire`] returns an
//! [`EmptyStage`], whose `commit` passes the stage to the consumers once its bytes have arrived. [`Consumer::wait`]
//! returns a [`FullStage`], whose `release` passes it back to the producer once every warp of every consumer has
//! released it. A token that is not given back in the block that got it is an error (V-25).

mod cp_async;
mod cursor;
mod empty;
mod handoff;
mod held;
mod rounds;

use std::panic::Location;

use crate::lang::{Arg, B32, Builder, Pred, Tile, TileShape, V};
use crate::watch::{DutyId, PipelineId};
use crate::{Fault, FenceInst, Region, SharedAddr, Source};

pub use cp_async::{CpAsyncFence, CpAsyncPipeline, CpAsyncProducer};
use cursor::Cursor;
pub use empty::EmptyStage;
pub use handoff::StageHandoff;
pub use held::HeldStage;
pub use rounds::Rounds;

/// A pipeline whose stages hold `N` tiles.
#[derive(Clone, Debug)]
pub struct Pipeline<'k, const N: usize> {
    builder: &'k Builder,
    name: String,
    stages: u32,
    /// The index of the pipeline's stage, if the pipeline is one stage of another pipeline.
    first: Option<V<'k, B32>>,
    full: Region,
    empty: Region,
    tiles: [(Region, TileShape); N],
    /// Warps that empty a stage.
    consumers: u32,
    /// Number of CTAs that fill each other's stages.
    cluster: u32,
    watched: PipelineId,
}

impl Builder {
    /// Declares a pipeline of `stages` stages with these tiles, which `consumers` warps empty.
    #[track_caller]
    pub fn pipeline<const N: usize>(
        &self,
        name: &str,
        stages: u32,
        consumers: u32,
        tiles: [(&str, TileShape); N],
    ) -> Pipeline<'_, N> {
        self.pipeline_across(name, stages, [1, consumers], tiles, 1)
    }

    /// Declares a pipeline whose stages `producers` warps fill by ordinary stores.
    #[track_caller]
    pub fn stored_pipeline<const N: usize>(
        &self,
        name: &str,
        stages: u32,
        [producers, consumers]: [u32; 2],
        tiles: [(&str, TileShape); N],
    ) -> Pipeline<'_, N> {
        self.pipeline_across(name, stages, [producers, consumers], tiles, 1)
    }

    /// Declares a pipeline in a cluster whose CTAs multicast into each other's stages: a stage is empty when the
    /// consumers of all of these CTAs have released it.
    #[track_caller]
    pub fn cluster_pipeline<const N: usize>(
        &self,
        name: &str,
        stages: u32,
        consumers: u32,
        tiles: [(&str, TileShape); N],
    ) -> Pipeline<'_, N> {
        let cluster = self.launch().cluster;
        self.pipeline_across(name, stages, [1, consumers], tiles, cluster)
    }

    #[track_caller]
    fn pipeline_across<const N: usize>(
        &self,
        name: &str,
        stages: u32,
        [producers, consumers]: [u32; 2],
        tiles: [(&str, TileShape); N],
        cluster: u32,
    ) -> Pipeline<'_, N> {
        if stages == 0 {
            let what = "stages of a pipeline";
            self.fault(Fault::Limit { what, given: 0, min: 1, max: u32::MAX, multiple: 1 });
        }
        let [full, empty] =
            self.barriers_of_stages(name, stages, [producers, consumers.saturating_mul(cluster)]);
        let _one = self.as_one();
        let tiles = tiles.map(|(tile, shape)| (self.tiles(tile, stages, shape), shape));
        let watched = self.watch().pipeline(name.to_owned(), consumers);
        Pipeline {
            builder: self,
            name: name.to_owned(),
            stages,
            first: None,
            full,
            empty,
            tiles,
            consumers,
            cluster,
            watched,
        }
    }

    /// The mbarriers of full stages and of empty stages, with these numbers of arrivals.
    fn barriers_of_stages(&self, name: &str, stages: u32, arrivals: [u32; 2]) -> [Region; 2] {
        let [full, empty] = arrivals;
        [("full", full), ("empty", empty)]
            .map(|(what, arrivals)| self.mbarriers(&format!("{name} {what}"), stages, arrivals))
    }
}

impl<'k, const N: usize> Pipeline<'k, N> {
    /// The producer's position in the pipeline: all stages are empty.
    #[track_caller]
    pub fn producer(&self) -> Producer<'k, N> {
        // Parity 1 is the phase before the first one: a wait for that phase returns at once.
        Producer { cursor: Cursor::new(self, 1) }
    }

    /// Like [`Pipeline::producer`], for a producer that fills one stage in each of these rounds.
    #[track_caller]
    pub fn producer_by(&self, rounds: Rounds<'k>) -> Producer<'k, N> {
        Producer { cursor: Cursor::by(self, rounds, 1) }
    }

    /// A pipeline over the same tiles with mbarriers of its own. One of the two passes on a part of each tile, the
    /// other one another part, and each stage has whole tiles: a consumer that reads both parts holds a stage of both.
    #[track_caller]
    pub fn of_same_tiles(&self, name: &str) -> Pipeline<'k, N> {
        let b = self.builder;
        let [full, empty] = b.barriers_of_stages(name, self.stages, [1, self.consumers]);
        let watched = b.watch().pipeline(name.to_owned(), self.consumers);
        Pipeline { name: name.to_owned(), full, empty, watched, ..self.clone() }
    }

    /// The tiles of stage `index`, for data that stays there whatever else the stage holds. Nothing that fills a stage
    /// may write there. Warps that fill stages store such data before they commit their first stage, whose fence covers
    /// these stores, too. Other threads store it in the prologue, with a fence.
    #[track_caller]
    pub fn tiles_of(&self, index: u32) -> [Tile<'k, 'k>; N] {
        if index >= self.stages {
            let count = self.stages as usize;
            self.builder.fault(Fault::Unknown { what: "stage of a pipeline", index, count });
        }
        let known = StageIndex::Known(index.min(self.stages.saturating_sub(1)));
        self.tiles(self.first.map_or(known, StageIndex::Number))
    }

    /// The stage of a pipeline that has only one.
    fn only_stage(&self) -> StageIndex<'k> {
        self.first.map_or(StageIndex::Known(0), StageIndex::Number)
    }

    /// A consumer warp's position in the pipeline.
    #[track_caller]
    pub fn consumer(&self) -> Consumer<'k, N> {
        Consumer { cursor: Cursor::new(self, 0) }
    }

    /// Like [`Pipeline::consumer`], for a consumer that empties one stage in each of these rounds.
    #[track_caller]
    pub fn consumer_by(&self, rounds: Rounds<'k>) -> Consumer<'k, N> {
        Consumer { cursor: Cursor::by(self, rounds, 0) }
    }

    /// Notes that a stage must be `done` in this block, that is committed or released.
    fn due(&self, done: &str, source: Source) -> DutyId {
        self.builder.watch().due(format!("a stage of pipeline {} is {done}", self.name), source)
    }

    /// The mbarrier of a stage.
    #[track_caller]
    fn barrier(&self, of: Region, stage: StageIndex<'k>) -> SharedAddr {
        self.address(of, 8, stage)
    }

    #[track_caller]
    fn tiles(&self, stage: StageIndex<'k>) -> [Tile<'k, 'k>; N] {
        self.tiles
            .map(|(region, shape)| Tile::new(self.builder, shape, self.address(region, shape.bytes(), stage)))
    }

    /// The address of the stage's part of a region that has `bytes` for each stage.
    #[track_caller]
    fn address(&self, region: Region, bytes: u32, stage: StageIndex<'k>) -> SharedAddr {
        match stage {
            StageIndex::Known(stage) => region.at((stage * bytes) as i32),
            StageIndex::Number(stage) => {
                let start = self.builder.address(region);
                stage.mad(bytes, start).at(0)
            }
        }
    }
}

/// The index of a stage: known when the kernel is built, or computed by the kernel.
#[derive(Clone, Copy, Debug)]
enum StageIndex<'k> {
    Known(u32),
    Number(V<'k, B32>),
}

/// Fills a pipeline. One thread uses this value, or in a [`Builder::stored_pipeline`] each warp that stores.
#[derive(Debug)]
pub struct Producer<'k, const N: usize> {
    cursor: Cursor<'k, N>,
}

impl<'k, const N: usize> Producer<'k, N> {
    /// Waits until the next stage is empty.
    #[track_caller]
    pub fn acquire(&mut self) -> EmptyStage<'k, N> {
        let pipeline = self.cursor.pipeline.clone();
        let due = pipeline.due("committed", Location::caller());
        let _one = pipeline.builder.as_one();
        let index = self.cursor.next(pipeline.empty);
        EmptyStage::new(pipeline, index, due)
    }

    /// Waits in all lanes of a warp until the next stage is empty, and runs `fill` in one lane, which fills it by
    /// loads. As all lanes wait, the compiler still knows which numbers are the same in all lanes.
    #[track_caller]
    pub fn fill_by_warp(&mut self, fill: impl FnOnce(EmptyStage<'k, N>)) {
        let pipeline = self.cursor.pipeline.clone();
        let (b, at) = (pipeline.builder, Location::caller());
        let _one = b.as_one();
        let index = self.cursor.next(pipeline.empty);
        b.once_per_warp(|| {
            let due = pipeline.due("committed", at);
            fill(EmptyStage::new(pipeline, index, due));
        });
    }
}

/// Empties a pipeline; each consumer warp has one.
#[derive(Debug)]
pub struct Consumer<'k, const N: usize> {
    cursor: Cursor<'k, N>,
}

impl<'k, const N: usize> Consumer<'k, N> {
    /// Waits until the next stage is full.
    #[track_caller]
    pub fn wait(&mut self) -> FullStage<'k, N> {
        let pipeline = self.cursor.pipeline.clone();
        let _one = pipeline.builder.as_one();
        let index = self.cursor.next(pipeline.full);
        FullStage::new(pipeline, index, Location::caller())
    }

    /// Whether the next stage is full now. Lanes may see different answers.
    #[track_caller]
    pub fn is_full(&self) -> V<'k, Pred> {
        let pipeline = &self.cursor.pipeline;
        let _one = pipeline.builder.as_one();
        self.cursor.test(pipeline.full)
    }
}

/// A full stage, which a consumer reads.
#[must_use = "a stage must be released"]
#[derive(Debug)]
pub struct FullStage<'k, const N: usize> {
    pipeline: Pipeline<'k, N>,
    index: StageIndex<'k>,
    tiles: [Tile<'k, 'k>; N],
    due: DutyId,
}

impl<'k> FullStage<'k, 1> {
    /// The stage's tile.
    pub fn tile(&self) -> Tile<'_, 'k> {
        let [tile] = self.tiles;
        tile
    }
}

impl<'k, const N: usize> FullStage<'k, N> {
    #[track_caller]
    fn new(pipeline: Pipeline<'k, N>, index: StageIndex<'k>, source: Source) -> FullStage<'k, N> {
        let (tiles, due) = (pipeline.tiles(index), pipeline.due("released", source));
        FullStage { pipeline, index, tiles, due }
    }

    /// The stage's tiles.
    pub fn tiles(&self) -> [Tile<'_, 'k>; N] {
        self.tiles
    }

    /// Releases the stage. This warp must have read it: products that read it must be complete.
    #[track_caller]
    pub fn release(self) {
        let b = self.pipeline.builder;
        b.watch().done(self.due, Location::caller());
        self.by_these_warps(Location::caller());
        let _one = b.as_one();
        b.once_per_warp(|| self.arrive());
    }

    /// Releases the stage where `condition` holds, for example in the last round of a loop that reads the stage. On
    /// every path through the kernel the condition must hold exactly once before [`FullStage::released`], and in all
    /// lanes of a warp or in none; the simulator checks that. Products that read the stage must have been waited for,
    /// which the borrow checker does not enforce here.
    #[track_caller]
    pub fn release_if(&self, condition: impl Arg<Ty = Pred>) {
        let b = self.pipeline.builder;
        self.by_these_warps(Location::caller());
        let _one = b.as_one();
        b.guarded(b.elect() & condition, || self.arrive());
    }

    /// Says that [`FullStage::release_if`] has released the stage.
    #[track_caller]
    pub fn released(self) {
        self.pipeline.builder.watch().done(self.due, Location::caller());
    }

    /// Releases the stage after ordinary loads from it (`ldmatrix`, `ld.shared`). Without the fence that this method
    /// executes, copies into the stage would not wait for such loads.
    #[track_caller]
    pub fn release_loaded(self) {
        self.fence_loads();
        self.release();
    }

    /// Releases the stage without a fence: ordinary stores fill the stage, or another warp executes the fence first.
    #[track_caller]
    pub fn release_unfenced(self) {
        let b = self.pipeline.builder;
        let _one = b.as_one();
        b.warp_sync();
        self.release();
    }

    /// The fence of [`FullStage::release_loaded`], for a warp that waits for something else before it releases the
    /// stage.
    #[track_caller]
    pub fn fence_loads(&self) {
        let b = self.pipeline.builder;
        let _one = b.as_one();
        b.fence(FenceInst::ProxyAsyncShared);
        b.warp_sync();
    }

    /// Notes that the warps that run the code being built release the stage.
    fn by_these_warps(&self, source: Source) {
        let (b, pipeline) = (self.pipeline.builder, self.pipeline.watched);
        let warps = b.warps();
        b.watch().release(pipeline, warps, source);
    }

    /// Arrives, in one thread, at the stage's empty mbarriers.
    #[track_caller]
    fn arrive(&self) {
        let (b, empty) = (self.pipeline.builder, self.pipeline.barrier(self.pipeline.empty, self.index));
        match self.pipeline.cluster {
            1 => b.mbarrier_arrive(empty),
            ctas => (0..ctas).for_each(|cta| b.mbarrier_arrive_remote(b.map_address(empty, cta))),
        }
    }
}
