//! Pipelines that warps fill by cp.async: copies of 16 bytes a thread, each thread from its own addresses.
//!
//! These copies write through the generic proxy, and products read through the async proxy, so that a fence must lie
//! between the two. The copying warps should not execute it, since they would have to wait until their copies are
//! complete, nor should a computing warp. Another thread does, which has the pipeline's [`CpAsyncFence`]: it waits
//! until the copies of a stage have landed, executes the fence, and passes the stage on.

use super::{Cursor, Pipeline, Rounds};
use crate::lang::{Builder, Tile, TileShape};
use crate::{FenceInst, Region};

/// Threads of a warp, each of which arrives when its copies are complete.
const LANES: u32 = 32;

/// A pipeline whose stages some warps fill by [`Builder::copy_async`] and a thread of another warp passes on.
#[derive(Clone, Debug)]
pub struct CpAsyncPipeline<'k, const N: usize> {
    pipeline: Pipeline<'k, N>,
    /// The warps that fill stages.
    copiers: u32,
    /// The mbarriers of stages whose copies are complete.
    landed: Region,
}

impl Builder {
    /// Declares a pipeline of `stages` stages with these tiles. Each of `copiers` warps fills a part of a stage by
    /// copies of 16 bytes a thread, a thread of another warp fences, and `consumers` warps empty the stages.
    #[track_caller]
    pub fn cp_async_pipeline<const N: usize>(
        &self,
        name: &str,
        stages: u32,
        [copiers, consumers]: [u32; 2],
        tiles: [(&str, TileShape); N],
    ) -> CpAsyncPipeline<'_, N> {
        CpAsyncPipeline::over(name, copiers, self.pipeline(name, stages, consumers, tiles))
    }
}

impl<'k, const N: usize> CpAsyncPipeline<'k, N> {
    #[track_caller]
    fn over(name: &str, copiers: u32, pipeline: Pipeline<'k, N>) -> CpAsyncPipeline<'k, N> {
        let arrivals = copiers.saturating_mul(LANES);
        let landed = pipeline.builder.mbarriers(&format!("{name} landed"), pipeline.stages, arrivals);
        CpAsyncPipeline { pipeline, copiers, landed }
    }

    /// Declares a pipeline for another part of the same tiles: see [`Pipeline::of_same_tiles`].
    #[track_caller]
    pub fn of_same_tiles(&self, name: &str) -> CpAsyncPipeline<'k, N> {
        CpAsyncPipeline::over(name, self.copiers, self.pipeline.of_same_tiles(name))
    }

    /// The pipeline that the consumers see.
    pub fn pipeline(&self) -> &Pipeline<'k, N> {
        &self.pipeline
    }

    /// The position of a copying warp, which fills one stage in each of these rounds: all stages are empty.
    #[track_caller]
    pub fn producer_by(&self, rounds: Rounds<'k>) -> CpAsyncProducer<'k, N> {
        CpAsyncProducer { cursor: Cursor::by(&self.pipeline, rounds, 1), landed: self.landed }
    }

    /// The position of the fencing thread.
    #[track_caller]
    pub fn fence(&self) -> CpAsyncFence<'k, N> {
        CpAsyncFence { cursor: Cursor::new(&self.pipeline, 0), landed: self.landed }
    }
}

/// Fills a pipeline by copies. Each of the copying warps has it.
#[derive(Debug)]
pub struct CpAsyncProducer<'k, const N: usize> {
    cursor: Cursor<'k, N>,
    landed: Region,
}

impl<'k, const N: usize> CpAsyncProducer<'k, N> {
    /// Waits until the next stage is empty, and runs `copy` in all lanes, which begins to copy to the stage's tiles.
    #[track_caller]
    pub fn fill(&mut self, copy: impl FnOnce([Tile<'_, 'k>; N])) {
        let pipeline = &self.cursor.pipeline;
        let stage = {
            let _one = pipeline.builder.as_one();
            self.cursor.next(pipeline.empty)
        };
        copy(pipeline.tiles(stage));
        let _one = pipeline.builder.as_one();
        pipeline.builder.mbarrier_arrive_copied(pipeline.barrier(self.landed, stage));
    }
}

/// Passes on the stages of a pipeline. One thread has it.
#[derive(Debug)]
pub struct CpAsyncFence<'k, const N: usize> {
    cursor: Cursor<'k, N>,
    landed: Region,
}

impl<const N: usize> CpAsyncFence<'_, N> {
    /// Waits until the copies to the next stage are complete, and passes it to the consumers: products may read it.
    #[track_caller]
    pub fn pass(&mut self) {
        let pipeline = &self.cursor.pipeline;
        let b = pipeline.builder;
        let _one = b.as_one();
        let stage = self.cursor.next(self.landed);
        b.fence(FenceInst::ProxyAsyncShared);
        b.mbarrier_arrive(pipeline.barrier(pipeline.full, stage));
    }
}
